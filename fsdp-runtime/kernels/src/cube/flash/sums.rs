//! Tiles of sums on their way to global memory.

use cubecl::prelude::*;

use super::fragments::{CHUNK, Pair, sum_column, sum_row};
use super::plan::Plan;
use super::scores::Sums;
use super::tiles::HeadRows;
use crate::cube::rounding::narrowed;

/// Writes the rows of a plane, from row `first` of a head on, times `scale`.
#[cube]
pub(super) fn write_sums<F: Float>(
    sums: &Sums,
    target: &mut [Pair<F>],
    rows: &HeadRows,
    first: usize,
    lane: usize,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let fragments = comptime!(plan.fragments);
    #[unroll]
    for strip in 0..comptime!(plan.strips) {
        #[unroll(plan.unrolls())]
        for row in 0..comptime!(fragments.rows()) {
            let own = first + strip * 16 + sum_row(lane, row, fragments);
            if own < rows.count {
                let at = (rows.first + own * rows.stride) * comptime!(CHUNK / 2);
                #[unroll]
                for tile in 0..comptime!(plan.width_tiles()) {
                    let of_tile = &sums[comptime!(strip * plan.width_tiles() + tile)];
                    #[unroll(plan.unrolls())]
                    for pair in 0..comptime!(fragments.row_pairs()) {
                        let column = sum_column(lane, pair, fragments) / 2;
                        let element = of_tile[row * comptime!(fragments.row_pairs()) + pair];
                        let element = element * Pair::<f32>::new(scale);
                        target[at + comptime!(tile * 4) + column] =
                            narrowed(element, comptime!(plan.integers));
                    }
                }
            }
        }
    }
}
