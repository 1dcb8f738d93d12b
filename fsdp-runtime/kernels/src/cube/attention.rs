//! The rows of attention's scores, in one kernel forward and one backward.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::attention_kernels::{
    Bounds, ScoreRowsLaunch, add_rows_kernel, attention_slopes_kernel, attention_weights_kernel,
};
use super::buffer_slice::BufferSlice;
use super::copy::{exclusive, fill};
use super::device::rounds_in_integers;
use super::dropout::{dropout, dropout_part};
use super::product::product;
use super::rows::Team;
use super::span::{Span, row_span};
use super::tensors::{contiguous, element, empty};
use crate::attention::{AttentionRule, AttentionTensors, Block, BlockOps, MASK_ROWS};

/// Number of scores of a block, if that many have at least [`MASK_ROWS`] queries: 128 MiB in half precision.
const MAX_SCORES: usize = 1 << 26;
/// Number of blocks under a rule that hides keys, if each has at least [`MASK_ROWS`] queries. The products of
/// queries with keys that only other queries of the block see are wasted.
const HIDING_BLOCKS: usize = 8;

/// The kernels on the rows of a block.
pub(super) struct RowKernels;

impl BlockOps<CubeBackend> for RowKernels {
    fn queries(&self, tensors: &AttentionTensors<CubeTensor>, rule: &AttentionRule) -> usize {
        let [batch, heads, queries, _] = tensors.query.shape().dims();
        let of_query = batch * heads * tensors.key.shape()[2];
        let most = if rule.hides() { queries / HIDING_BLOCKS } else { queries };
        match rule.dropout {
            Some(_) => MASK_ROWS,
            None => most.min(MAX_SCORES / of_query).next_multiple_of(MASK_ROWS).max(MASK_ROWS),
        }
    }

    fn weights(&self, products: CubeTensor, block: &Block<'_, CubeBackend>) -> [CubeTensor; 2] {
        let scores = exclusive(products);
        let [batch, heads, queries, _] = scores.shape().dims();
        let statistics = empty(&scores, Shape::from([batch, heads, queries, 1]), DType::F32);
        let rows = Rows::new(&[&scores], queries, block);
        let client = scores.client.clone();
        let (count, dim) = rows.team.grid(&client, rows.count);
        // SAFETY: `Rows::new` checked that the buffers hold the rows; the kernel accesses only these, and a
        // number for each in the statistics.
        unsafe {
            attention_weights_kernel::launch_unchecked(
                &client,
                count,
                dim,
                rows.span.width,
                rows.argument(&scores),
                rows.arguments(&rows.bias),
                rows.arguments(&rows.mask),
                rows.table.into_iter().collect(),
                BufferSlice::of(&statistics).buffer_arg(),
                rows.shape,
                rows.bounds,
                rows.team,
                rounds_in_integers(&client, scores.dtype),
                element(scores.dtype),
            );
        }
        [scores, statistics]
    }

    fn slopes(
        &self,
        tensors: [CubeTensor; 2],
        saved: [&CubeTensor; 2],
        block: &Block<'_, CubeBackend>,
    ) -> [CubeTensor; 2] {
        let [scores, grads] = tensors.map(exclusive);
        let [statistics, means] = saved.map(|tensor| contiguous(tensor.clone()));
        let rows = Rows::new(&[&scores, &grads], statistics.shape()[2], block);
        for tensor in [&statistics, &means] {
            assert_eq!(tensor.shape(), statistics.shape(), "two numbers for each query");
            let all = BufferSlice::of(tensor).len();
            assert!(tensor.shape().num_elements() <= all, "two numbers for each query");
        }
        assert!(block.queries.end <= statistics.shape()[2], "the block's queries are among all");
        let client = scores.client.clone();
        let (count, dim) = rows.team.grid(&client, rows.count);
        // SAFETY: `Rows::new` checked that the buffers hold the rows, and the assertions that the statistics
        // and means have a number for each; the kernel accesses only these.
        unsafe {
            attention_slopes_kernel::launch_unchecked(
                &client,
                count,
                dim,
                rows.span.width,
                rows.argument(&scores),
                rows.argument(&grads),
                rows.arguments(&rows.bias),
                rows.arguments(&rows.mask),
                rows.table.into_iter().collect(),
                BufferSlice::of(&statistics).buffer_arg(),
                BufferSlice::of(&means).buffer_arg(),
                rows.shape,
                rows.bounds,
                rows.team,
                rounds_in_integers(&client, scores.dtype),
                element(scores.dtype),
            );
        }
        [grads, scores]
    }

    fn product(&self, factors: [CubeTensor; 2]) -> CubeTensor {
        let dtype = factors[0].dtype;
        product(factors, dtype)
    }

    fn add(&self, sums: CubeTensor, rows: CubeTensor, first: usize) -> CubeTensor {
        let (sums, rows) = (exclusive(sums), contiguous(rows));
        let client = sums.client.clone();
        let [_, _, keys, width] = rows.shape().dims();
        let (of_head, of_all) = (keys * width, sums.shape()[2] * width);
        let skipped = first * width;
        assert!(skipped + of_head <= of_all, "the rows are among those of all keys");
        let heads = rows.shape().num_elements() / of_head;
        let slices = [&sums, &rows].map(BufferSlice::of);
        assert!(heads * of_all <= slices[0].len(), "rows for each row of the heads");
        let numel = heads * of_head;
        let power = common_power([of_head, of_all, skipped]);
        let span = row_span(&client, &slices.each_ref(), &[], numel, power);
        let (count, dim) = span.grid(&client);
        let [(write, _), (read, _)] = slices.each_ref().map(|slice| span.argument(slice));
        // SAFETY: the assertions and `row_span` checked that both buffers hold the rows; the kernel accesses
        // only these.
        unsafe {
            add_rows_kernel::launch_unchecked(
                &client,
                count,
                dim,
                span.width,
                write,
                read,
                span.count,
                of_head / span.width,
                of_all / span.width,
                skipped / span.width,
                element(rows.dtype),
            );
        }
        sums
    }
}

/// The rows of scores of a block of queries, and how a launch divides them.
struct Rows {
    /// Number of rows.
    count: usize,
    shape: ScoreRowsLaunch,
    team: Team,
    span: Span,
    bias: Option<CubeTensor>,
    /// The dropout mask, whose elements are 0 where a weight is dropped.
    mask: Option<CubeTensor>,
    /// For each query of the block in each row of the batch, the first key that it sees and the one after
    /// the last, if there are segments.
    table: Option<BufferArg>,
    bounds: Bounds,
}

impl Rows {
    /// Returns the rows of tensors of the scores' shape. The statistics have `all_queries` rows of a head.
    ///
    /// # Panics
    ///
    /// If the buffer of a tensor, of the bias or of the mask is too small.
    fn new(tensors: &[&CubeTensor], all_queries: usize, block: &Block<'_, CubeBackend>) -> Self {
        let scores = tensors[0];
        let client = scores.client.clone();
        let [batch, heads, queries, keys] = scores.shape().dims();
        let bias = block.bias.cloned().map(contiguous);
        let mask = block.dropout().map(|source| {
            let shape = Shape::from([batch, heads, queries, block.mask_keys().len()]);
            let numel = shape.num_elements();
            let ones = empty(scores, shape, scores.dtype);
            fill(&client, &BufferSlice::of(&ones), numel, 1.0);
            match block.mask_part() {
                Some(part) => dropout_part(ones, &source, &part),
                None => dropout(ones, &source),
            }
        });
        let slices: Vec<BufferSlice> =
            tensors.iter().map(|tensor| BufferSlice::of(tensor)).collect();
        let per_key = [&bias, &mask].map(|tensor| tensor.as_ref().map(BufferSlice::of));
        for (slice, rows) in per_key
            .iter()
            .zip([batch * block.all_keys(), batch * heads * queries * block.mask_keys().len()])
        {
            assert!(
                slice.as_ref().is_none_or(|slice| rows <= slice.len()),
                "a number for each key"
            );
        }
        // A vector is within a row of each tensor. Rows of the mask have whole vectors of any width, or the keys of
        // the scores.
        let width_divides = common_power([keys, block.all_keys(), block.keys.start]);
        let span = row_span(
            &client,
            &slices.iter().collect::<Vec<_>>(),
            &per_key.iter().flatten().collect::<Vec<_>>(),
            scores.shape().num_elements(),
            width_divides,
        );
        let width = span.width;
        let count = batch * heads * queries;
        let ([first, end], bounds) = shifts(block);
        let shape = ScoreRowsLaunch::new(
            count,
            queries,
            heads * queries,
            keys / width,
            block.all_keys() / width,
            block.mask_keys().len() / width,
            (block.keys.start - block.mask_keys().start) / width,
            block.keys.start / width,
            all_queries,
            block.queries.start,
            first[0],
            first[1],
            end[0],
            end[1],
            block.rule().scale as f32,
            block.rule().dropout.map_or(1.0, |source| source.keep()),
        );
        let team = Team::new(&client, keys, width);
        Self { count, shape, team, span, bias, mask, table: table(&client, block), bounds }
    }

    /// Returns a tensor as a kernel argument.
    fn argument(&self, tensor: &CubeTensor) -> BufferArg {
        self.span.argument(&BufferSlice::of(tensor)).0
    }

    /// Returns a tensor, if there is one, as a kernel argument.
    fn arguments<S: FromIterator<BufferArg>>(&self, tensor: &Option<CubeTensor>) -> S {
        tensor.iter().map(|tensor| self.argument(tensor)).collect()
    }
}

/// Returns which of the block's keys its query `q` sees without segments, as two numbers each for the first key
/// and the one after the last: `q` plus the one less the other, at least 0 and at most the number of keys. Also
/// returns which of both is not that of all keys.
fn shifts(block: &Block<'_, CubeBackend>) -> ([[usize; 2]; 2], Bounds) {
    let position = block.ranges.position(block.queries.start) - block.keys.start as i64;
    let [before, after] = block.ranges.reach();
    let shift = |by: i64| [by.max(0) as usize, (-by).max(0) as usize];
    let first = before.map_or([0, block.queries.len()], |before| shift(position - before));
    let end = after.map_or([block.keys.len(), 0], |after| shift(position + after + 1));
    let has_table = block.rule().segments.is_some();
    let bounds = Bounds { first: before.is_some() || has_table, end: after.is_some() || has_table };
    ([first, end], bounds)
}

/// Returns the keys that the block's queries see, if there are segments.
fn table(client: &Client, block: &Block<'_, CubeBackend>) -> Option<BufferArg> {
    block.rule().segments.as_ref()?;
    let keys = &block.keys;
    let of_query = |row, query| {
        let seen = block.ranges.of_query(row, query);
        [seen.start, seen.end].map(|key| key.clamp(keys.start, keys.end) - keys.start)
    };
    let table: Vec<u32> = (0..block.batch)
        .flat_map(|row| block.queries.clone().flat_map(move |query| of_query(row, query)))
        .map(|key| key as u32)
        .collect();
    let handle = client.create_from_slice(bytemuck::cast_slice(&table));
    // SAFETY: the buffer was made of as many numbers.
    Some(unsafe { BufferArg::from_raw_parts(handle, table.len()) })
}

/// Returns the largest power of two that divides the numbers, some of which are not 0.
fn common_power(numbers: [usize; 3]) -> usize {
    1 << numbers.iter().fold(0, |all, number| all | number).trailing_zeros()
}

#[cfg(all(test, feature = "cpu", feature = "flex"))]
mod tests {
    use burn::backend::{Flex, TensorMetadata};
    use burn::tensor::{DType, Shape, TensorData};
    use burn_cubecl::{CubeBackend, CubeDevice};

    use super::RowKernels;
    use crate::attention::composed::ComposedOps;
    use crate::attention::{Block, BlockOps, KeyRanges, Segments};
    use crate::contract::dropout_kernels;
    use crate::tensor::Float;
    use crate::{AttentionRule, Kernels, MaskSource};
    use crate::{cast, to_data};

    const BATCH: usize = 2;
    const HEADS: usize = 2;
    /// Index of the block's first query.
    const FIRST: usize = 128;

    /// A block of queries of random numbers.
    #[derive(Clone, Debug)]
    struct Case {
        queries: usize,
        keys: std::ops::Range<usize>,
        all_keys: usize,
        /// Position of the first query among the keys.
        position: i64,
        /// In the second row of the batch, every third key is hidden.
        masked: bool,
        rule: AttentionRule,
    }

    impl Case {
        /// Returns pseudo-random multiples of 1/64 up to 2, which are exact in f16.
        fn scores<B: Kernels>(&self, device: &B::Device, seed: usize, dtype: DType) -> Float<B> {
            let shape = Shape::from([BATCH, HEADS, self.queries, self.keys.len()]);
            let number =
                |i: usize| ((i * 7919 + seed * 104_729 + i / 97) % 257) as f32 / 64.0 - 2.0;
            let numbers: Vec<f32> = (0..shape.num_elements()).map(number).collect();
            cast::<B>(B::float_from_data(TensorData::new(numbers, shape), device), dtype)
        }

        /// Returns the attention weights, the statistics, the gradients of the scores, the weights again,
        /// and the sum of both with two more rows before and one after.
        fn run<B: Kernels>(
            &self,
            device: &B::Device,
            dtype: DType,
            ops: &impl BlockOps<B>,
        ) -> Vec<Vec<f32>> {
            let Self { queries, ref keys, all_keys, position, .. } = *self;
            let bias =
                (0..BATCH * all_keys).map(|at| match at >= all_keys && at.is_multiple_of(3) {
                    true => f32::NEG_INFINITY,
                    false => 0.0,
                });
            let bias = TensorData::new(bias.collect::<Vec<_>>(), [BATCH, all_keys]);
            let bias = self.masked.then(|| cast::<B>(B::float_from_data(bias, device), dtype));
            let all_queries = (FIRST + all_keys) as i64 - position;
            // The second block of queries of a tensor.
            let block = Block::<B> {
                ranges: KeyRanges::new(&self.rule, [all_queries as usize, all_keys]),
                bias: bias.as_ref(),
                batch: BATCH,
                heads: [HEADS; 2],
                queries: FIRST..FIRST + queries,
                keys: keys.clone(),
            };
            let [forward, statistics] = ops.weights(self.scores::<B>(device, 1, dtype), &block);
            assert_eq!((forward.dtype(), statistics.dtype()), (dtype, DType::F32));
            let earlier = Shape::from([BATCH, HEADS, FIRST, 1]);
            let earlier = B::float_zeros(earlier, device, DType::F32.into());
            let all = B::float_cat(vec![earlier, statistics.clone()], 2);
            let scores = [1, 2].map(|seed| self.scores::<B>(device, seed, dtype));
            let means = B::float_mul_scalar(
                B::float_ones(all.shape(), device, DType::F32.into()),
                0.25.into(),
            );
            let [slopes, backward] = ops.slopes(scores, [&all, &means], &block);
            let zeros = Shape::from([BATCH, HEADS, queries + 3, keys.len()]);
            let zeros = B::float_zeros(zeros, device, DType::F32.into());
            let sums = ops.add(ops.add(zeros, slopes.clone(), 2), backward.clone(), 2);
            let numbers = |tensor| to_data::<B>(cast::<B>(tensor, DType::F32)).iter().collect();
            [forward, statistics, slopes, backward, sums].into_iter().map(numbers).collect()
        }
    }

    /// Returns blocks under every kind of rule.
    fn cases() -> Vec<Case> {
        let dropout = Some(MaskSource { key: [1, 2], counter: [3, 4], prob: 0.2 });
        let plain = AttentionRule::new(0.4);
        let rule = AttentionRule { dropout, ..plain.clone() };
        let whole =
            Case { queries: 7, keys: 0..64, all_keys: 64, position: 57, masked: true, rule };
        let causal = AttentionRule { causal: true, ..whole.rule.clone() };
        let window = AttentionRule { window: Some(11), ..plain.clone() };
        let both = AttentionRule { window: Some(11), ..causal.clone() };
        // The block's seven queries have the segments 1 and 2 in the first row, and 3 in the second.
        let numbers = (0..150).map(|at| i64::from(at >= 120) + i64::from(at >= 132));
        let segments: Vec<i64> = numbers.chain((0..150).map(|at| 3 + at / 140)).collect();
        let segments = Segments::new(&segments, 150).ok();
        let packed = AttentionRule { segments, ..plain.clone() };
        let packed_causal = AttentionRule { causal: true, dropout, ..packed.clone() };
        let keys = 112..150;
        let of_packed = Case { keys, all_keys: 150, position: 128, masked: false, ..whole.clone() };
        let of_window = Case { keys: 32..64, ..whole.clone() };
        let rule = AttentionRule { causal: true, ..plain };
        vec![
            Case { masked: false, rule, ..whole.clone() },
            Case {
                keys: 0..60,
                all_keys: 130,
                position: 53,
                rule: causal.clone(),
                ..whole.clone()
            },
            // The first three queries come before the first key.
            Case {
                keys: 0..5,
                all_keys: 9,
                position: -3,
                queries: 8,
                rule: causal,
                ..whole.clone()
            },
            Case { rule: window, position: 40, ..of_window.clone() },
            Case { rule: both, ..of_window },
            Case { rule: packed, ..of_packed.clone() },
            Case { rule: packed_causal, masked: true, keys: 0..144, ..of_packed },
            whole,
        ]
    }

    #[test]
    fn rows_are_those_of_burns_operations() {
        let device = CubeDevice::Cpu(cubecl::device::CpuDevice);
        for (dtype, rounding) in [(DType::F32, 1e-5), (DType::F16, 2e-3)] {
            for case in cases() {
                let found = case.run::<CubeBackend>(&device, dtype, &RowKernels);
                let composed = ComposedOps::<Flex>::new(dropout_kernels());
                let expected = case.run::<Flex>(&Default::default(), DType::F32, &composed);
                for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert_eq!(found.len(), expected.len());
                    assert!(expected.iter().any(|x| *x != 0.0));
                    // Statistics of queries without keys are large.
                    let close = |(found, expected): (&f32, &f32)| {
                        (found - expected).abs() <= rounding * expected.abs().max(1.0)
                    };
                    let wrong = found.iter().zip(expected).find(|pair| !close(*pair));
                    assert_eq!(wrong, None, "result {number} of {case:?} in {dtype:?}");
                }
            }
        }
    }
}
