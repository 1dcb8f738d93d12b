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
    pub(super) count: usize,
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
    let each = comptime!(plan.chunks_of_thread(len));
    let mut part = Array::<Chunk<F>>::new(each);
    #[unroll(plan.unrolls())]
    for at in 0..each {
        let row = min(first + own_row(at, len, plan), rows.count - 1);
        part[at] = source[rows.first + row * rows.stride + own_column(at, plan)];
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
    #[unroll(plan.unrolls())]
    for at in 0..comptime!(plan.chunks_of_thread(len)) {
        let row = own_row(at, len, plan);
        tile[row * comptime!(plan.stride()) + own_column(at, plan)] = part[at];
    }
}

/// Returns the row of chunk `at` of this thread, in a tile of `len` rows. The threads take whole rows at a time, if
/// there are enough, so that all chunks of a thread have one column. Surplus threads and rows have the last ones as
/// well.
#[cube]
fn own_row(at: usize, #[comptime] len: usize, #[comptime] plan: Plan) -> usize {
    let (rows, chunks) = comptime!((plan.rows_at_once(), plan.chunks() as u32));
    if comptime!(rows == 0) {
        (at as u32 / chunks) as usize
    } else {
        let own = min(UNIT_POS, comptime!(rows as u32 * chunks - 1)) / chunks;
        let row = own as usize + at * rows;
        if comptime!(len.is_multiple_of(rows)) { row } else { min(row, comptime!(len - 1)) }
    }
}

/// Returns the index in its row of chunk `at` of this thread.
#[cube]
fn own_column(at: usize, #[comptime] plan: Plan) -> usize {
    let (rows, chunks) = comptime!((plan.rows_at_once(), plan.chunks() as u32));
    if comptime!(rows == 0) {
        (at as u32 % chunks) as usize
    } else {
        (min(UNIT_POS, comptime!(rows as u32 * chunks - 1)) % chunks) as usize
    }
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
