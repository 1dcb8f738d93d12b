//! Products of tiles: with matrix instructions, or one multiplication at a time.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::fragments::{
    CHUNK, Chunk, Fragments, Pair, TILE, address_chunk, address_row, column_address_chunk,
    column_address_row,
};
use crate::cube::rounding::narrowed;

/// The product of a tile of a left factor and one of a right factor, in the places of [`Fragments`].
#[cube]
pub(super) trait TileProduct: Send + Sync + 'static {
    /// Returns a tile of a left factor: the rows that begin with chunk `first` and are `stride` chunks apart.
    fn left_of_rows<F: Float>(
        tile: &Shared<[Chunk<F>]>,
        first: usize,
        #[comptime] stride: usize,
    ) -> Array<Pair<F>>;

    /// Returns a tile of a left factor, rounded from two tiles of sums that lie beside each other.
    fn left_of_sums<F: Float>(
        left: &Array<Pair<f32>>,
        right: &Array<Pair<f32>>,
        #[comptime] integers: bool,
    ) -> Array<Pair<F>>;

    /// Returns a tile of a right factor, whose rows lie in shared memory like those of
    /// [`left_of_rows`](Self::left_of_rows).
    fn right_of_rows<F: Float>(
        tile: &Shared<[Chunk<F>]>,
        first: usize,
        #[comptime] stride: usize,
    ) -> Array<Pair<F>>;

    /// Returns a tile of a right factor, whose columns lie in shared memory as rows.
    fn right_of_columns<F: Float>(
        tile: &Shared<[Chunk<F>]>,
        first: usize,
        #[comptime] stride: usize,
    ) -> Array<Pair<F>>;

    /// Adds to a tile of sums the product of a left factor and the left or the right half of a right one.
    fn multiply<F: Float>(
        left: &Array<Pair<F>>,
        right: &Array<Pair<F>>,
        sums: &mut Array<Pair<f32>>,
        #[comptime] half: usize,
    );

    /// Returns the largest of the numbers of the threads that hold a row of sums.
    fn row_max(number: f32) -> f32;

    /// Returns the sum of the numbers of the threads that hold a row of sums.
    fn row_sum(number: f32) -> f32;
}

/// [`TileProduct`] of [`Fragments::Matrix`].
pub(super) struct MatrixProduct;

/// Returns the index of this thread in its plane.
#[cube]
fn matrix_lane() -> usize {
    UNIT_POS as usize % comptime!(Fragments::Matrix.lanes())
}

#[cube]
impl TileProduct for MatrixProduct {
    fn left_of_rows<F: Float>(
        tile: &Shared<[Chunk<F>]>,
        first: usize,
        #[comptime] stride: usize,
    ) -> Array<Pair<F>> {
        let lane = matrix_lane();
        let at = first + address_row(lane) * stride + address_chunk(lane);
        let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
        mma.load_matrix::<Chunk<F>, Const<2>>(&tile[at..at + 1], MatrixIdent::A, 4usize, false)
    }

    fn left_of_sums<F: Float>(
        left: &Array<Pair<f32>>,
        right: &Array<Pair<f32>>,
        #[comptime] integers: bool,
    ) -> Array<Pair<F>> {
        let mut factor = Array::<Pair<F>>::new(4usize);
        factor[0] = narrowed(left[0], integers);
        factor[1] = narrowed(left[1], integers);
        factor[2] = narrowed(right[0], integers);
        factor[3] = narrowed(right[1], integers);
        factor
    }

    fn right_of_rows<F: Float>(
        tile: &Shared<[Chunk<F>]>,
        first: usize,
        #[comptime] stride: usize,
    ) -> Array<Pair<F>> {
        let lane = matrix_lane();
        let at = first + address_row(lane) * stride + address_chunk(lane);
        let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
        mma.load_matrix::<Chunk<F>, Const<2>>(&tile[at..at + 1], MatrixIdent::B, 4usize, true)
    }

    fn right_of_columns<F: Float>(
        tile: &Shared<[Chunk<F>]>,
        first: usize,
        #[comptime] stride: usize,
    ) -> Array<Pair<F>> {
        let lane = matrix_lane();
        let at = first + column_address_row(lane) * stride + column_address_chunk(lane);
        let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
        mma.load_matrix::<Chunk<F>, Const<2>>(&tile[at..at + 1], MatrixIdent::B, 4usize, false)
    }

    fn multiply<F: Float>(
        left: &Array<Pair<F>>,
        right: &Array<Pair<F>>,
        sums: &mut Array<Pair<f32>>,
        #[comptime] half: usize,
    ) {
        let mut columns = Array::<Pair<F>>::new(2usize);
        columns[0] = right[comptime!(2 * half)];
        columns[1] = right[comptime!(2 * half + 1)];
        let mma = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
        mma.execute_inplace::<Const<2>, Const<2>, Const<2>>(left, &columns, sums);
    }

    fn row_max(number: f32) -> f32 {
        let number = max(number, plane_shuffle_xor(number, 1u32));
        max(number, plane_shuffle_xor(number, 2u32))
    }

    fn row_sum(number: f32) -> f32 {
        let number = number + plane_shuffle_xor(number, 1u32);
        number + plane_shuffle_xor(number, 2u32)
    }
}

/// [`TileProduct`] of [`Fragments::Scalar`]. A right factor is held by columns: pair `p` of column `c` has the
/// index `8 · c + p`.
pub(super) struct ScalarProduct;

#[cube]
impl TileProduct for ScalarProduct {
    fn left_of_rows<F: Float>(
        tile: &Shared<[Chunk<F>]>,
        first: usize,
        #[comptime] stride: usize,
    ) -> Array<Pair<F>> {
        let mut factor = Array::<Pair<F>>::new(comptime!(Fragments::Scalar.factor_pairs()));
        for row in 0..comptime!(TILE) {
            #[unroll]
            for part in 0..2usize {
                let chunk = tile[first + row * stride + part];
                #[unroll]
                for at in 0..4usize {
                    let mut pair = Pair::<F>::empty();
                    pair.insert(0usize, chunk.extract(comptime!(2 * at)));
                    pair.insert(1usize, chunk.extract(comptime!(2 * at + 1)));
                    factor[row * 8 + comptime!(part * 4 + at)] = pair;
                }
            }
        }
        factor
    }

    fn left_of_sums<F: Float>(
        left: &Array<Pair<f32>>,
        right: &Array<Pair<f32>>,
        #[comptime] integers: bool,
    ) -> Array<Pair<F>> {
        let mut factor = Array::<Pair<F>>::new(comptime!(Fragments::Scalar.factor_pairs()));
        for row in 0..comptime!(TILE) {
            for at in 0..4usize {
                factor[row * 8 + at] = narrowed(left[row * 4 + at], integers);
                factor[row * 8 + 4 + at] = narrowed(right[row * 4 + at], integers);
            }
        }
        factor
    }

    fn right_of_rows<F: Float>(
        tile: &Shared<[Chunk<F>]>,
        first: usize,
        #[comptime] stride: usize,
    ) -> Array<Pair<F>> {
        let mut factor = Array::<Pair<F>>::new(comptime!(Fragments::Scalar.factor_pairs()));
        for at in 0..comptime!(TILE / 2) {
            #[unroll]
            for part in 0..2usize {
                let upper = tile[first + 2 * at * stride + part];
                let lower = tile[first + (2 * at + 1) * stride + part];
                #[unroll]
                for column in 0..comptime!(CHUNK) {
                    let mut pair = Pair::<F>::empty();
                    pair.insert(0usize, upper.extract(column));
                    pair.insert(1usize, lower.extract(column));
                    factor[at + comptime!((part * CHUNK + column) * 8)] = pair;
                }
            }
        }
        factor
    }

    fn right_of_columns<F: Float>(
        tile: &Shared<[Chunk<F>]>,
        first: usize,
        #[comptime] stride: usize,
    ) -> Array<Pair<F>> {
        Self::left_of_rows(tile, first, stride)
    }

    fn multiply<F: Float>(
        left: &Array<Pair<F>>,
        right: &Array<Pair<F>>,
        sums: &mut Array<Pair<f32>>,
        #[comptime] half: usize,
    ) {
        for row in 0..comptime!(TILE) {
            for at in 0..comptime!(CHUNK / 2) {
                let column = comptime!(half * CHUNK) + 2 * at;
                let mut one = Pair::<f32>::new(0.0f32);
                let mut other = Pair::<f32>::new(0.0f32);
                for k in 0..comptime!(TILE / 2) {
                    let factor = Pair::<f32>::cast_from(left[row * 8 + k]);
                    one += factor * Pair::<f32>::cast_from(right[column * 8 + k]);
                    other += factor * Pair::<f32>::cast_from(right[(column + 1) * 8 + k]);
                }
                let mut sum = sums[row * 4 + at];
                let first = sum.extract(0usize) + one.extract(0usize) + one.extract(1usize);
                let second = sum.extract(1usize) + other.extract(0usize) + other.extract(1usize);
                sum.insert(0usize, first);
                sum.insert(1usize, second);
                sums[row * 4 + at] = sum;
            }
        }
    }

    fn row_max(number: f32) -> f32 {
        number
    }

    fn row_sum(number: f32) -> f32 {
        number
    }
}
