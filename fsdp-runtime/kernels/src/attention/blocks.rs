//! Attention in blocks of queries. The scores of a block of queries with the keys that some of them see exist
//! at once.

use std::ops::Range;

use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice};

use super::{AttentionRule, AttentionTensors, KeyRanges, MASK_ROWS};
use crate::mask::{BATCH, MaskPart, MaskSource, Places};
use crate::tensor::{Float, wide};

/// Operations on the scores of a block, made of Burn's operations or kernels.
///
/// "Products" are those of queries and keys, `[batch, heads, queries, keys]`, in the dtype of the tensors.
/// Scores are products times the scale, plus the bias.
pub(crate) trait BlockOps<B: Backend> {
    /// Returns the number of queries of a block: [`MASK_ROWS`] under dropout, else a multiple of it. The
    /// last block may have fewer.
    fn queries(&self, tensors: &AttentionTensors<Float<B>>, rule: &AttentionRule) -> usize;

    /// Turns products into the attention weights, with dropout. Also returns for each query the logarithm
    /// of the sum of the exponentials of its scores, `[batch, heads, queries, 1]`, in f32 or f64.
    fn weights(&self, products: Float<B>, block: &Block<'_, B>) -> [Float<B>; 2];

    /// Returns the gradients of the products, and the attention weights with dropout. Given are the
    /// products, the gradients of these weights, in the same shape and dtype, and for all queries the second
    /// result of [`weights`](Self::weights) and the sums of the products of output and its gradient, in one
    /// shape and dtype.
    fn slopes(
        &self,
        tensors: [Float<B>; 2],
        saved: [&Float<B>; 2],
        block: &Block<'_, B>,
    ) -> [Float<B>; 2];

    /// Adds the rows of the keys from `first` on, `[batch, key_heads, keys, width]`, to sums over the rows
    /// of all keys, which are in f32 or f64.
    fn add(&self, sums: Float<B>, rows: Float<B>, first: usize) -> Float<B>;

    /// Returns `a · b` for each row of the batch and each head.
    fn product(&self, [a, b]: [Float<B>; 2]) -> Float<B> {
        B::float_matmul(a, b)
    }

    /// Returns the rows in the range, of a tensor `[batch, heads, rows, width]`.
    fn rows(&self, tensor: &Float<B>, range: Range<usize>) -> Float<B> {
        part::<B>(tensor, 2, range)
    }
}

/// Implements [`Kernels::tiled_attention`](crate::Kernels::tiled_attention).
pub(crate) fn forward<B: Backend>(
    tensors: &AttentionTensors<Float<B>>,
    rule: &AttentionRule,
    ops: &impl BlockOps<B>,
) -> [Float<B>; 2] {
    let (mut outputs, mut statistics) = (Vec::new(), Vec::new());
    for block in Block::<B>::all(tensors, rule, ops.queries(tensors, rule)) {
        let [weights, of_rows] = ops.weights(block.products(tensors, ops), &block);
        let output = ops.product([block.grouped(weights), block.seen(&tensors.value, ops)]);
        outputs.push(block.ungrouped(output));
        statistics.push(of_rows);
    }
    [outputs, statistics].map(joined::<B>)
}

/// Implements
/// [`Kernels::tiled_attention_backward`](crate::Kernels::tiled_attention_backward), given
/// the results of [`forward`].
pub(crate) fn backward<B: Backend>(
    tensors: &AttentionTensors<Float<B>>,
    [output, statistics]: &[Float<B>; 2],
    grad: &Float<B>,
    rule: &AttentionRule,
    ops: &impl BlockOps<B>,
) -> [Float<B>; 3] {
    let dtype = tensors.query.dtype();
    let [output, of_output] =
        [output, grad].map(|tensor| B::float_cast(tensor.clone(), wide(dtype).into()));
    let means = B::float_sum_dim(B::float_mul(output, of_output), 3);
    let mut query_grads = Vec::new();
    let mut sums: Option<[Float<B>; 2]> = None;
    for block in Block::<B>::all(tensors, rule, ops.queries(tensors, rule)) {
        let grad = block.grouped(block.of_queries(grad, ops));
        let values = B::float_transpose(block.seen(&tensors.value, ops));
        let of_weights = block.ungrouped(ops.product([grad.clone(), values]));
        let products = block.products(tensors, ops);
        let [slopes, weights] = ops
            .slopes([products, of_weights], [statistics, &means], &block)
            .map(|tensor| block.grouped(tensor));
        // These products add up over the heads of a group as well.
        let queries = block.grouped(block.of_queries(&tensors.query, ops));
        let of_key = ops.product([B::float_transpose(slopes.clone()), queries]);
        let of_value = ops.product([B::float_transpose(weights), grad]);
        let of_query = ops.product([slopes, block.seen(&tensors.key, ops)]);
        query_grads.push(block.ungrouped(of_query));
        if block.is_all() {
            sums = Some([of_key, of_value]);
            break;
        }
        let [of_keys, of_values] = sums.take().unwrap_or_else(|| {
            [&tensors.key, &tensors.value]
                .map(|tensor| B::float_zeros(tensor.shape(), &tensor.device(), wide(dtype).into()))
        });
        let first = block.keys.start;
        sums = Some([ops.add(of_keys, of_key, first), ops.add(of_values, of_value, first)]);
    }
    let sums = sums.expect("a query");
    let [key_grad, value_grad] = sums.map(|tensor| B::float_cast(tensor, dtype.into()));
    [joined::<B>(query_grads), key_grad, value_grad]
}

/// Returns the rows of all queries.
fn joined<B: Backend>(mut blocks: Vec<Float<B>>) -> Float<B> {
    if blocks.len() == 1 { blocks.remove(0) } else { B::float_cat(blocks, 2) }
}

/// Multiple of keys at which those of a block begin and, but for the last key, end. Vectors of rows that have
/// all keys, and of the block's rows, then begin at the same keys.
const KEY_STEP: usize = 16;

/// A block of queries, and the keys from the first to the last that some of them see.
pub(crate) struct Block<'a, B: Backend> {
    pub(crate) ranges: KeyRanges<'a>,
    /// Number to add to all scores of a key, `[batch, all_keys]`.
    pub(crate) bias: Option<&'a Float<B>>,
    /// Number of rows of the batch.
    pub(crate) batch: usize,
    /// Number of heads of the queries, and of the keys and values.
    pub(crate) heads: [usize; 2],
    pub(crate) queries: Range<usize>,
    /// At least one key. It begins at a multiple of [`KEY_STEP`]. A key may be hidden from all queries.
    pub(crate) keys: Range<usize>,
}

impl<'a, B: Backend> Block<'a, B> {
    /// Returns the blocks of all queries, each of this many.
    fn all(
        tensors: &'a AttentionTensors<Float<B>>,
        rule: &'a AttentionRule,
        of_block: usize,
    ) -> impl Iterator<Item = Self> {
        let [batch, heads, queries, _] = tensors.query.shape().dims();
        let [_, key_heads, keys, _] = tensors.key.shape().dims();
        let ranges = KeyRanges::new(rule, [queries, keys]);
        let in_order = |start: usize| start..(start + of_block).min(queries);
        let blocks: Vec<_> = match (&rule.dropout, &rule.places) {
            (Some(_), Some(places)) => places.query_runs(0..queries).collect(),
            _ => (0..queries).step_by(of_block).map(in_order).collect(),
        };
        blocks.into_iter().map(move |queries| {
            let seen = ranges.of_queries(0..batch, queries.clone());
            let end = seen.end.max(1).next_multiple_of(KEY_STEP).min(keys);
            let keys = seen.start / KEY_STEP * KEY_STEP..end;
            let bias = tensors.bias.as_ref();
            Self { ranges, bias, batch, heads: [heads, key_heads], queries, keys }
        })
    }

    /// Returns the rule of the attention.
    pub(crate) fn rule(&self) -> &'a AttentionRule {
        self.ranges.rule()
    }

    /// Returns whether the block has all queries and all keys.
    fn is_all(&self) -> bool {
        self.queries == (0..self.ranges.queries()) && self.keys == (0..self.all_keys())
    }

    /// Returns the number of all keys, seen or not.
    pub(crate) fn all_keys(&self) -> usize {
        self.ranges.keys()
    }

    /// Returns the rows of the block's queries.
    pub(super) fn of_queries(&self, tensor: &Float<B>, ops: &impl BlockOps<B>) -> Float<B> {
        ops.rows(tensor, self.queries.clone())
    }

    /// Returns the rows of the keys that the block sees.
    fn seen(&self, tensor: &Float<B>, ops: &impl BlockOps<B>) -> Float<B> {
        ops.rows(tensor, self.keys.clone())
    }

    /// Returns rows of the block's queries, `[batch, heads, queries, width]`, as those of the heads that
    /// share keys: `[batch, key_heads, heads / key_heads · queries, width]`.
    fn grouped(&self, rows: Float<B>) -> Float<B> {
        let [heads, key_heads] = self.heads;
        self.with_heads(rows, key_heads, heads / key_heads * self.queries.len())
    }

    /// Returns the rows of which [`grouped`](Self::grouped) made these.
    fn ungrouped(&self, rows: Float<B>) -> Float<B> {
        self.with_heads(rows, self.heads[0], self.queries.len())
    }

    fn with_heads(&self, rows: Float<B>, heads: usize, queries: usize) -> Float<B> {
        let width = rows.shape()[3];
        let shape = Shape::from([self.batch, heads, queries, width]);
        if rows.shape() == shape { rows } else { B::float_reshape(rows, shape) }
    }

    /// Returns the source of the dropout mask of the block's weights. Its elements are numbered in the shape
    /// `[batch, heads, queries, padded_keys]`, of all weights.
    pub(crate) fn dropout(&self) -> Option<MaskSource> {
        let (source, first) = (self.rule().dropout?, self.queries.start);
        Some(match &self.rule().places {
            Some(places) => places.row(source, first).source,
            None => source.of_block(first / MASK_ROWS),
        })
    }

    /// Returns the part of the mask that belongs to the block's weights, if these are a part of all weights.
    pub(crate) fn mask_part(&self) -> Option<MaskPart> {
        let places = self.rule().places.as_ref()?;
        let row = places.row(self.rule().dropout?, self.queries.start);
        let queries = row.row..row.row + self.queries.len();
        let mut keys = places.keys.runs(self.keys.clone());
        let mut run = || {
            let (run, place) = keys.next().unwrap_or((0..0, places.padded_keys()));
            place..place + run.len()
        };
        Some(MaskPart::new([
            Places::all(self.batch),
            places.heads,
            Places::blocks(row.of_block, [queries, row.of_block..row.of_block]),
            Places::blocks(places.padded_keys(), [run(), run()]),
        ]))
    }

    /// Returns the keys that the mask of the block has: those of the block if it is a [part](Self::mask_part), else
    /// all, seen or not, padded to whole batches of the random generator.
    pub(crate) fn mask_keys(&self) -> Range<usize> {
        match self.rule().places {
            Some(_) => self.keys.clone(),
            None => 0..self.all_keys().next_multiple_of(BATCH),
        }
    }

    /// Returns the products of the queries and the keys, `[batch, heads, queries, keys]`.
    fn products(&self, tensors: &AttentionTensors<Float<B>>, ops: &impl BlockOps<B>) -> Float<B> {
        let key = B::float_transpose(self.seen(&tensors.key, ops));
        let queries = self.grouped(self.of_queries(&tensors.query, ops));
        self.ungrouped(ops.product([queries, key]))
    }
}

/// Returns the elements of a tensor whose index in dimension `dim` is in the range.
pub(super) fn part<B: Backend>(tensor: &Float<B>, dim: usize, range: Range<usize>) -> Float<B> {
    if range == (0..tensor.shape()[dim]) {
        return tensor.clone();
    }
    let slices = slices(&tensor.shape(), dim, range);
    B::float_slice(tensor.clone(), &slices)
}

/// Returns the slices of all dimensions, of which all but `dim` are whole.
pub(super) fn slices(shape: &Shape, dim: usize, range: Range<usize>) -> Vec<Slice> {
    let slice = |at: usize| if at == dim { range.clone().into() } else { (0..shape[at]).into() };
    (0..shape.num_dims()).map(slice).collect()
}
