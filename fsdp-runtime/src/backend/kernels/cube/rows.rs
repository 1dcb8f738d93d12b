//! Rows: how the threads of a launch divide a matrix for sums over its rows.

use cubecl::client::Client;
use cubecl::prelude::*;

use super::device::on_cpu;
use super::span::grid;

/// Returns the number of threads that share a row of `vectors` vectors: a power of two, and 1 on a CPU.
pub(super) fn lanes(client: &Client, vectors: usize) -> usize {
    if on_cpu(client) {
        return 1;
    }
    let most = client.properties().hardware.max_units_per_cube as usize;
    vectors.next_power_of_two().clamp(32, 256.min(most))
}

/// Returns a grid with `lanes` threads for each row. A cube of several lanes has one row.
pub(super) fn row_grid(client: &Client, rows: usize, lanes: usize) -> (CubeCount, CubeDim) {
    if lanes == 1 {
        return grid(client, rows);
    }
    let dim = CubeDim::new_1d(lanes as u32);
    (cubecl::calculate_cube_count_elemwise(client, rows * lanes, dim), dim)
}

/// Returns the row of this thread. Threads beyond the last row repeat it, so that all threads of a cube
/// reach the barriers.
#[cube]
pub(super) fn own_row(rows: usize, #[comptime] lanes: usize) -> usize {
    if comptime!(lanes == 1) { min(ABSOLUTE_POS, rows - 1) } else { min(CUBE_POS, rows - 1) }
}

/// Returns the index of this thread among those of its row.
#[cube]
pub(super) fn own_lane(#[comptime] lanes: usize) -> usize {
    if comptime!(lanes == 1) { 0usize.runtime() } else { UNIT_POS as usize }
}

/// Returns the sum of all elements of `part`, over the threads of a row. All of them call it.
#[cube]
pub(super) fn row_sum<N: Size>(part: Vector<f32, N>, #[comptime] lanes: usize) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for at in 0..N::value() {
        sum += part.extract(at);
    }
    if comptime!(lanes > 1) {
        let lane = UNIT_POS as usize;
        let mut sums = Shared::<[f32]>::new_slice(lanes);
        sums[lane] = sum;
        sync_cube();
        let mut width = comptime!(lanes / 2).runtime();
        while width > 0 {
            if lane < width {
                sums[lane] = sums[lane] + sums[lane + width];
            }
            sync_cube();
            width /= 2;
        }
        sum = sums[0];
    }
    sum
}
