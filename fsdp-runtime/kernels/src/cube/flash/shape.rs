//! Lengths and strides of an attention, and the keys that queries see.

use cubecl::prelude::*;

use super::plan::Plan;

/// Strides of a tensor `[batch, heads, rows, width]`, in chunks.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Strides {
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) row: usize,
}

/// Lengths, strides and rule of an attention.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct AttentionShape {
    /// Number of queries of a head.
    pub(super) queries: usize,
    /// Number of keys of a head.
    pub(super) keys: usize,
    /// Number of heads of the queries.
    pub(super) heads: usize,
    /// Number of heads of the queries that share a head of the keys.
    pub(super) group: usize,
    pub(super) query: Strides,
    pub(super) key: Strides,
    pub(super) value: Strides,
    /// Query `q` sees no key before key `q + first_more - first_fewer`. Segments have a table instead.
    pub(super) first_more: usize,
    pub(super) first_fewer: usize,
    /// Query `q` sees the keys before key `q + end_more - end_fewer`.
    pub(super) end_more: usize,
    pub(super) end_fewer: usize,
    /// Factor of the scores, above 0.
    pub(super) scale: f32,
    /// Factor of the weights that dropout keeps, or 1.
    pub(super) keep: f32,
    /// Number of words of a row of the dropout mask.
    pub(super) mask_words: usize,
}

/// Table of the keys that each query of each row of the batch sees, if there are segments: the first key, and the
/// one after the last.
pub(super) type Table = Sequence<Box<[u32]>>;

/// Returns the first key that a query sees.
#[cube]
pub(super) fn first_key(
    batch: usize,
    query: usize,
    table: &Table,
    shape: &AttentionShape,
    #[comptime] plan: Plan,
) -> usize {
    let mut first = 0usize.runtime();
    if comptime!(plan.bounded[0]) {
        first = shifted(query, shape.first_more, shape.first_fewer, shape.keys);
    }
    #[unroll]
    for at in 0..table.len() {
        first = table[at][(batch * shape.queries + query) * 2] as usize;
    }
    first
}

/// Returns the key after the last one that a query sees.
#[cube]
pub(super) fn end_key(
    batch: usize,
    query: usize,
    table: &Table,
    shape: &AttentionShape,
    #[comptime] plan: Plan,
) -> usize {
    let mut end = shape.keys;
    if comptime!(plan.bounded[1]) {
        end = shifted(query, shape.end_more, shape.end_fewer, shape.keys);
    }
    #[unroll]
    for at in 0..table.len() {
        end = table[at][(batch * shape.queries + query) * 2 + 1] as usize;
    }
    end
}

/// Returns `query + more - fewer`, at least 0 and at most the number of keys.
#[cube]
fn shifted(query: usize, more: usize, fewer: usize, keys: usize) -> usize {
    min(max(query + more, fewer) - fewer, keys)
}

/// Keys that queries see. Neither the first key nor the last decreases from one query to the next.
#[derive(CubeType, Clone, Copy)]
pub(super) struct SeenKeys {
    /// First key that some query sees.
    pub(super) first: usize,
    /// Key after the last one that some query sees.
    pub(super) end: usize,
    /// First key that all queries see.
    pub(super) all_first: usize,
    /// Key after the last one that all queries see.
    pub(super) all_end: usize,
}

/// Returns the keys that the queries from the first to the last see.
#[cube]
pub(super) fn seen_keys(
    batch: usize,
    first: usize,
    last: usize,
    table: &Table,
    shape: &AttentionShape,
    #[comptime] plan: Plan,
) -> SeenKeys {
    SeenKeys {
        first: first_key(batch, first, table, shape, plan),
        end: end_key(batch, last, table, shape, plan),
        all_first: first_key(batch, last, table, shape, plan),
        all_end: end_key(batch, first, table, shape, plan),
    }
}

/// Returns the index from the last of `count` items that an item has from the first.
#[cube]
pub(super) fn from_last(index: usize, count: usize) -> usize {
    count - 1 - index
}

/// Returns `number / divisor`, for numbers below 2^32. Indices have 64 bits, whose division is slow.
#[cube]
pub(super) fn quotient(number: usize, divisor: usize) -> usize {
    (number as u32 / divisor as u32) as usize
}
