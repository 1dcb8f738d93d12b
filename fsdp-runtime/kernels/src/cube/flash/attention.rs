//! Attention as the kernels take it: tensors with their strides, the division into tiles, and the rule as kernel
//! arguments.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::dropout::{self, Mask};
use super::fragments::CHUNK;
use super::plan::{Pass, Plan, Setting, plan};
use super::shape::{AttentionShapeLaunch, StridesLaunch};
use crate::attention::{AttentionRule, AttentionTensors, KeyRanges, WeightPlaces};
use crate::cube::buffer_slice::BufferSlice;
use crate::cube::tensors::contiguous;

/// Least factor of scores: times [`HIDDEN`](super::scores::HIDDEN), it is far below all exponents.
const LEAST_SCALE: f64 = 1e-20;

/// An attention that the kernels take.
pub(super) struct Attention<'a> {
    pub(super) client: Client,
    /// Query, key and value, whose rows are whole chunks.
    pub(super) tensors: AttentionTensors<CubeTensor>,
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) key_heads: usize,
    pub(super) rule: &'a AttentionRule,
    ranges: KeyRanges<'a>,
    setting: Setting,
}

impl<'a> Attention<'a> {
    /// Returns the attention, or `None` if the kernels do not take it.
    pub(super) fn new(
        tensors: &AttentionTensors<CubeTensor>,
        rule: &'a AttentionRule,
        setting: Setting,
    ) -> Option<Self> {
        let client = tensors.query.client.clone();
        let [batch, heads, queries, width] = tensors.query.shape().dims();
        let [_, key_heads, keys, value_width] = tensors.value.shape().dims();
        let (most_x, most_y, most_z) = client.properties().hardware.max_cube_count;
        let fits = queries <= most_x as usize
            && keys <= most_x as usize
            && heads <= most_y as usize
            && batch <= most_z as usize;
        // A mask has the bits of whole batches of keys, which a part of the keys has not.
        let has_all_keys = rule.places.as_ref().is_none_or(|places| places.keys.is_all());
        let has_place = has_all_keys && dropout::fits(batch * heads * queries, keys);
        let has_place = rule.dropout.is_none() || has_place;
        let is_taken = width == value_width && rule.scale >= LEAST_SCALE && has_place;
        if !fits || !is_taken {
            return None;
        }
        plan(&client, tensors.query.dtype, width, Pass::Forward, setting)?;
        let AttentionTensors { query, key, value, bias } = tensors.clone();
        let tensors = AttentionTensors {
            query: in_chunks(query)?,
            key: in_chunks(key)?,
            value: in_chunks(value)?,
            bias: bias.map(contiguous),
        };
        if let Some(bias) = &tensors.bias {
            assert!(batch * keys <= BufferSlice::of(bias).len(), "a number for each key");
        }
        let ranges = KeyRanges::new(rule, [queries, keys]);
        Some(Self { client, tensors, batch, heads, key_heads, rule, ranges, setting })
    }

    /// Returns the division of a pass.
    pub(super) fn plan(&self, pass: Pass) -> Plan {
        let query = &self.tensors.query;
        let plan = plan(&self.client, query.dtype, query.shape()[3], pass, self.setting)
            .expect("`new` has found the kernels to take the attention");
        let [before, after] = self.ranges.reach();
        let has_table = self.rule.segments.is_some();
        let plan = if self.rule.dropout.is_some() { plan.with_whole_words(pass) } else { plan };
        Plan { bounded: [before.is_some() || has_table, after.is_some() || has_table], ..plan }
    }

    /// Returns the number of queries of a head.
    pub(super) fn queries(&self) -> usize {
        self.ranges.queries()
    }

    /// Returns the number of keys of a head.
    pub(super) fn keys(&self) -> usize {
        self.ranges.keys()
    }

    /// Returns lengths, strides and rule.
    pub(super) fn shape(&self) -> AttentionShapeLaunch {
        let AttentionTensors { query, key, value, .. } = &self.tensors;
        let position = self.ranges.position(0);
        let [before, after] = self.ranges.reach();
        let shift = |by: i64| [by.max(0) as usize, (-by).max(0) as usize];
        let first = before.map_or([0, self.queries()], |before| shift(position - before));
        let end = after.map_or([self.keys(), 0], |after| shift(position + after + 1));
        AttentionShapeLaunch::new(
            self.queries(),
            self.keys(),
            self.heads,
            self.heads / self.key_heads,
            strides(query),
            strides(key),
            strides(value),
            first[0],
            first[1],
            end[0],
            end[1],
            self.rule.scale as f32,
            self.rule.dropout.map_or(1.0, |source| source.keep()),
            dropout::row_words(self.keys()),
        )
    }

    /// Returns the bias as a kernel argument, if there is one.
    pub(super) fn bias<S: FromIterator<BufferArg>>(&self) -> S {
        self.tensors.bias.iter().map(|bias| BufferSlice::of(bias).buffer_arg()).collect()
    }

    /// Returns the dropout mask, if the rule has dropout.
    pub(super) fn mask(&self) -> Option<Mask> {
        let all = WeightPlaces::all(self.heads, [self.queries(), self.keys()]);
        let places = self.rule.places.as_ref().unwrap_or(&all);
        self.rule.dropout.map(|source| Mask::new(&self.client, self.batch, places, &source))
    }

    /// Returns the keys that each query of each row of the batch sees, if there are segments: the first key, and
    /// the one after the last.
    pub(super) fn table<S: FromIterator<BufferArg>>(&self) -> S {
        let of_query = |row, query| {
            let seen = self.ranges.of_query(row, query);
            [seen.start as u32, seen.end as u32]
        };
        let segments = self.rule.segments.iter().map(|_| {
            let table: Vec<u32> = (0..self.batch)
                .flat_map(|row| (0..self.queries()).flat_map(move |query| of_query(row, query)))
                .collect();
            let handle = self.client.create_from_slice(bytemuck::cast_slice(&table));
            // SAFETY: the buffer was made of as many numbers.
            unsafe { BufferArg::from_raw_parts(handle, table.len()) }
        });
        segments.collect()
    }
}

/// Returns the tensor, or a contiguous copy if its rows are not whole chunks at addresses that are multiples of a
/// chunk. Returns `None` if not even the copy is so, or if it is too long for the kernels' indices.
///
/// # Panics
///
/// If the tensor's buffer is too small.
pub(super) fn in_chunks(tensor: CubeTensor) -> Option<CubeTensor> {
    let tensor = if is_in_chunks(&tensor) { tensor } else { contiguous(tensor) };
    let len = BufferSlice::of(&tensor).len();
    if !is_in_chunks(&tensor) || len >= 1 << 32 {
        return None;
    }
    let dims = tensor.shape();
    let last = |(len, stride): (&usize, &usize)| (len - 1) * stride;
    let end: usize = dims.iter().zip(tensor.meta.strides().iter()).map(last).sum();
    assert!(end < len, "the rows of a tensor are in its buffer");
    Some(tensor)
}

/// Returns whether all rows are whole chunks at addresses that are multiples of a chunk.
fn is_in_chunks(tensor: &CubeTensor) -> bool {
    let (dims, strides) = (tensor.shape(), tensor.meta.strides());
    let chunk = (CHUNK * tensor.dtype.size()) as u64;
    strides[3] == 1
        && (0..3).all(|dim| dims[dim] == 1 || strides[dim].is_multiple_of(CHUNK))
        && BufferSlice::of(tensor).byte_offset().is_multiple_of(chunk)
}

/// Returns the strides of a tensor that [`in_chunks`] returned.
pub(super) fn strides(tensor: &CubeTensor) -> StridesLaunch {
    let (dims, strides) = (tensor.shape(), tensor.meta.strides());
    let stride = |dim: usize| if dims[dim] == 1 { 0 } else { strides[dim] / CHUNK };
    StridesLaunch::new(stride(0), stride(1), stride(2))
}
