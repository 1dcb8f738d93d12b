//! Tiles: how the threads of a launch divide the vectors of a tensor.

use cubecl::client::Client;
use cubecl::prelude::*;

use super::device::on_cpu;
use super::span::grid;

/// Shape of the tiles that a tensor's vectors are divided into. `lanes` neighbouring threads
/// process a tile of `lanes · rows` consecutive vectors row by row: in each row every thread takes
/// one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    /// Number of threads for a tile.
    pub(super) lanes: usize,
    /// Number of vectors that each thread takes.
    pub(super) rows: usize,
}

impl Tile {
    /// Returns the tile shape for the device: on a CPU each thread reads consecutive cache lines,
    /// on other devices neighbouring threads read neighbouring vectors.
    pub(super) fn new(client: &Client) -> Self {
        match on_cpu(client) {
            true => Self { lanes: 1, rows: 64 },
            false => Self { lanes: 32, rows: 4 },
        }
    }

    /// Returns the number of tiles that `vectors` vectors of one tensor are divided into.
    pub(super) fn count(&self, vectors: usize) -> usize {
        vectors.div_ceil(self.lanes * self.rows)
    }

    /// Returns a grid with threads for all tiles of one tensor.
    pub(super) fn grid(&self, client: &Client, vectors: usize) -> (CubeCount, CubeDim) {
        grid(client, self.count(vectors) * self.lanes)
    }
}

/// Returns the index of this thread's tile among all tiles of the launch.
#[cube]
pub(super) fn own_tile(#[comptime] tile: Tile) -> usize {
    ABSOLUTE_POS / comptime!(tile.lanes)
}

/// Returns the index of this thread's first vector in tile `at` of a tensor. The thread's next
/// vector is `lanes` further.
#[cube]
pub(super) fn begin(at: usize, #[comptime] tile: Tile) -> usize {
    at * comptime!(tile.lanes * tile.rows) + ABSOLUTE_POS % comptime!(tile.lanes)
}

/// Returns the index after the last vector of tile `at`, in a tensor of `count` vectors.
#[cube]
pub(super) fn end(at: usize, count: usize, #[comptime] tile: Tile) -> usize {
    min((at + 1) * comptime!(tile.lanes * tile.rows), count)
}
