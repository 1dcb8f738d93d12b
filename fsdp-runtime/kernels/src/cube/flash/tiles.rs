//! Rows of tensors on their way from global to shared memory.

use cubecl::prelude::*;

use super::fragments::{Chunk, Pair, left_column, left_row};
use super::plan::Plan;
use super::shape::Strides;

/// Rows of one head, in a tensor of any strides.
#[derive(CubeType, Clone, Copy)]
pub(super) struct HeadRows {
    /// Index of the head's first chunk.
    pub(super) first: usize,
    /// Number of chunks from one row to the next.
    pub(super) stride: usize,
    /// Number of rows.
    count: usize,
}

/// Returns the rows of a head.
#[cube]
pub(super) fn head_rows(batch: usize, head: usize, strides: &Strides, count: usize) -> HeadRows {
    HeadRows { first: batch * strides.batch + head * strides.head, stride: strides.row, count }
}

/// Reads the part of this thread of `len` rows from row `first` on. Rows after the head's last are that one.
#[cube]
pub(super) fn read_rows<F: Float>(
    source: &[Chunk<F>],
    rows: &HeadRows,
    first: usize,
    #[comptime] len: usize,
    #[comptime] plan: Plan,
) -> Array<Chunk<F>> {
    let all = comptime!(len * plan.chunks());
    let each = comptime!(all.div_ceil(plan.threads()));
    let mut part = Array::<Chunk<F>>::new(each);
    #[unroll(plan.unrolls())]
    for at in 0..each {
        let index = own_chunk(at, all, plan);
        let row = min(first + row_of(index, plan), rows.count - 1);
        part[at] = source[rows.first + row * rows.stride + column_of(index, plan)];
    }
    part
}

/// Writes what [`read_rows`] returned to shared memory. Every thread of the cube must call it.
#[cube]
pub(super) fn write_rows<F: Float>(
    part: &Array<Chunk<F>>,
    tile: &mut Shared<[Chunk<F>]>,
    #[comptime] len: usize,
    #[comptime] plan: Plan,
) {
    let all = comptime!(len * plan.chunks());
    #[unroll(plan.unrolls())]
    for at in 0..comptime!(all.div_ceil(plan.threads())) {
        let index = own_chunk(at, all, plan);
        let row = row_of(index, plan);
        tile[row * comptime!(plan.stride()) + column_of(index, plan)] = part[at];
    }
}

/// Returns the index, in a tile of `all` chunks, of chunk `at` of this thread. Threads without a chunk have the last
/// one as well.
#[cube]
fn own_chunk(at: usize, #[comptime] all: usize, #[comptime] plan: Plan) -> u32 {
    let index = UNIT_POS + at as u32 * comptime!(plan.threads() as u32);
    if comptime!(all.is_multiple_of(plan.threads())) {
        index
    } else {
        min(index, comptime!(all as u32 - 1))
    }
}

/// Returns the row of a chunk of a tile.
#[cube]
fn row_of(index: u32, #[comptime] plan: Plan) -> usize {
    (index / comptime!(plan.chunks() as u32)) as usize
}

/// Returns the index of a chunk of a tile in its row.
#[cube]
fn column_of(index: u32, #[comptime] plan: Plan) -> usize {
    (index % comptime!(plan.chunks() as u32)) as usize
}

/// Returns the tiles of a left factor of `plan.plane_rows()` rows from row `first` on: those of a strip beside
/// each other, then those of the next strip. Rows after the head's last are that one.
#[cube]
pub(super) fn left_factor<F: Float>(
    source: &[Pair<F>],
    rows: &HeadRows,
    first: usize,
    lane: usize,
    #[comptime] plan: Plan,
) -> Sequence<Array<Pair<F>>> {
    let fragments = comptime!(plan.fragments);
    let mut factor = Sequence::<Array<Pair<F>>>::new();
    #[unroll]
    for strip in 0..comptime!(plan.strips) {
        #[unroll]
        for step in 0..comptime!(plan.steps()) {
            let mut tile = Array::<Pair<F>>::new(comptime!(fragments.factor_pairs()));
            #[unroll(plan.unrolls())]
            for at in 0..comptime!(fragments.factor_pairs()) {
                let row = first + strip * 16 + left_row(lane, at, fragments);
                let row = rows.first + min(row, rows.count - 1) * rows.stride;
                let column = left_column(lane, at, fragments) / 2;
                tile[at] = source[row * 4 + step * 8 + column];
            }
            factor.push(tile);
        }
    }
    factor
}
