//! Rows: teams of threads that each process a row, and the sums and maxima of a team.
//!
//! On a device other than a CPU an element of a row is added to one of up to 256 sums, according to its
//! index modulo their number, and the sums are added in the order of a tree. The order depends only on
//! the row's length, not on the width of the vectors. On a CPU a team is one thread, and the width of
//! vectors depends only on the row's length and the dtype.

use cubecl::client::Client;
use cubecl::prelude::*;

use super::device::on_cpu;
use super::span::grid;

/// Largest number of partial sums of a row.
const MAX_SUMS: usize = 256;
/// Smallest number of partial sums of a row: fewer would leave threads of a plane idle.
const MIN_SUMS: usize = 32;
/// Number of threads of a cube. Every device allows as many.
const THREADS: usize = 256;

/// Threads that process a row together: in turns, each takes one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Team {
    /// Number of threads of a team: a power of two, or 1 on a CPU.
    pub(super) lanes: usize,
    /// Number of threads of a cube: a multiple of `lanes`, or 1 if `lanes` is 1.
    pub(super) threads: usize,
    /// Number of elements of a vector.
    pub(super) width: usize,
}

impl Team {
    /// Returns the team for rows of this length, which is a multiple of `width`.
    pub(super) fn new(client: &Client, row_len: usize, width: usize) -> Self {
        if on_cpu(client) {
            return Self { lanes: 1, threads: 1, width };
        }
        let sums = row_len.next_power_of_two().clamp(MIN_SUMS, MAX_SUMS);
        Self { lanes: sums / width, threads: THREADS, width }
    }

    /// Returns a grid with at least this many teams.
    pub(super) fn grid(&self, client: &Client, teams: usize) -> (CubeCount, CubeDim) {
        if self.lanes == 1 {
            return grid(client, teams);
        }
        let dim = CubeDim::new_1d(self.threads as u32);
        let threads = teams * self.lanes;
        (cubecl::calculate_cube_count_elemwise(client, threads, dim), dim)
    }
}

/// Returns the index of this thread's team in the launch.
#[cube]
pub(super) fn own_team(#[comptime] team: Team) -> usize {
    ABSOLUTE_POS / comptime!(team.lanes)
}

/// Returns the index of this thread in its team.
#[cube]
pub(super) fn own_lane(#[comptime] team: Team) -> usize {
    ABSOLUTE_POS % comptime!(team.lanes)
}

/// Returns the sum of the partial sums that the threads of the team have. All threads of the cube must
/// call it, with memory for a vector of each.
#[cube]
pub(super) fn team_sum<N: Size>(
    partial: Vector<f32, N>,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] team: Team,
) -> f32 {
    let mut sum = partial;
    if comptime!(team.lanes > 1) {
        let unit = UNIT_POS as usize;
        let lane = unit % comptime!(team.lanes);
        shared[unit] = partial;
        sync_cube();
        #[unroll]
        for at in 0..comptime!(team.lanes.ilog2() as usize) {
            let step = comptime!(team.lanes >> (at + 1));
            if lane < step {
                shared[unit] = shared[unit] + shared[unit + step];
            }
            sync_cube();
        }
        sum = shared[unit - lane];
        // The next call writes the memory.
        sync_cube();
    }
    #[unroll]
    for at in 0..comptime!(team.width.ilog2() as usize) {
        let step = comptime!(team.width >> (at + 1));
        #[unroll]
        for index in 0..step {
            let pair = sum.extract(index) + sum.extract(comptime!(index + step));
            sum.insert(index, pair);
        }
    }
    sum.extract(0usize)
}

/// Returns the largest of the elements that the threads of the team have. All threads of the cube must
/// call it, with memory for a vector of each.
#[cube]
pub(super) fn team_max<N: Size>(
    partial: Vector<f32, N>,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] team: Team,
) -> f32 {
    let mut top = partial;
    if comptime!(team.lanes > 1) {
        let unit = UNIT_POS as usize;
        let lane = unit % comptime!(team.lanes);
        shared[unit] = partial;
        sync_cube();
        #[unroll]
        for at in 0..comptime!(team.lanes.ilog2() as usize) {
            let step = comptime!(team.lanes >> (at + 1));
            if lane < step {
                shared[unit] = max(shared[unit], shared[unit + step]);
            }
            sync_cube();
        }
        top = shared[unit - lane];
        sync_cube();
    }
    let mut largest = top.extract(0usize);
    #[unroll]
    for index in 1..comptime!(team.width) {
        largest = max(largest, top.extract(index));
    }
    largest
}
