//! Fragments: which elements of a tile each thread of a plane holds.
//!
//! A tile of a left factor has 16 rows and 16 columns, one of a right factor as many, and one of sums 16 rows
//! and 8 columns. A thread holds pairs of neighbouring elements of a row. The matrix instructions fix the
//! places of 32 threads: *Matrix fragments for mma.m16n8k16* in NVIDIA's
//! [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution). Without them one thread holds a tile.

use cubecl::prelude::*;

/// Eight neighbouring elements of a row: 16 bytes in half precision.
pub(super) type Chunk<F> = Vector<F, Const<8>>;
/// Two neighbouring elements of a row.
pub(super) type Pair<F> = Vector<F, Const<2>>;

/// Number of rows of a tile, and of columns of a factor's tile.
pub(super) const TILE: usize = 16;
/// Number of elements of a [`Chunk`], and of columns of a tile of sums.
pub(super) const CHUNK: usize = 8;

/// Threads that hold the elements of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Fragments {
    /// 32 threads, as the instruction `mma.m16n8k16` takes them.
    Matrix,
    /// One thread.
    Scalar,
}

impl Fragments {
    /// Returns the number of threads of a plane.
    pub(super) const fn lanes(self) -> usize {
        match self {
            Self::Matrix => 32,
            Self::Scalar => 1,
        }
    }

    /// Returns the number of pairs of a factor's tile that a thread holds.
    pub(super) const fn factor_pairs(self) -> usize {
        TILE * TILE / 2 / self.lanes()
    }

    /// Returns the number of pairs of a tile of sums that a thread holds.
    pub(super) const fn sum_pairs(self) -> usize {
        self.rows() * self.row_pairs()
    }

    /// Returns the number of rows of which a thread holds sums.
    pub(super) const fn rows(self) -> usize {
        match self {
            Self::Matrix => 2,
            Self::Scalar => TILE,
        }
    }

    /// Returns the number of pairs of each row of a tile of sums that a thread holds. Pair `p` of the thread's
    /// row `r` has the index `r · row_pairs + p`.
    pub(super) const fn row_pairs(self) -> usize {
        match self {
            Self::Matrix => 1,
            Self::Scalar => CHUNK / 2,
        }
    }

    /// Returns whether loops over a thread's elements are unrolled, so that the elements stay in registers.
    pub(super) const fn unrolls(self) -> bool {
        matches!(self, Self::Matrix)
    }
}

/// Returns the row in its tile of row `at` of the rows of sums that a thread holds.
#[cube]
pub(super) fn sum_row(lane: usize, at: usize, #[comptime] fragments: Fragments) -> usize {
    if comptime!(fragments == Fragments::Matrix) { lane / 4 + at * 8 } else { at }
}

/// Returns the first column in its tile of pair `at` of the pairs of a row of sums that a thread holds.
#[cube]
pub(super) fn sum_column(lane: usize, at: usize, #[comptime] fragments: Fragments) -> usize {
    if comptime!(fragments == Fragments::Matrix) { lane % 4 * 2 } else { at * 2 }
}

/// Returns the row in its tile of pair `at` of a left factor.
#[cube]
pub(super) fn left_row(lane: usize, at: usize, #[comptime] fragments: Fragments) -> usize {
    if comptime!(fragments == Fragments::Matrix) { lane / 4 + at % 2 * 8 } else { at / 8 }
}

/// Returns the first column in its tile of pair `at` of a left factor.
#[cube]
pub(super) fn left_column(lane: usize, at: usize, #[comptime] fragments: Fragments) -> usize {
    if comptime!(fragments == Fragments::Matrix) { lane % 4 * 2 + at / 2 * 8 } else { at % 8 * 2 }
}

/// Returns the row whose chunk a thread gives to `ldmatrix`, where the tile's four matrices of 8 · 8 elements
/// lie in the order of a left factor, or of the transpose of a right factor: below each other first.
#[cube]
pub(super) fn address_row(lane: usize) -> usize {
    lane % 16
}

/// Returns the chunk of the row of [`address_row`].
#[cube]
pub(super) fn address_chunk(lane: usize) -> usize {
    lane / 16
}

/// Returns the row whose chunk a thread gives to `ldmatrix`, where the four matrices lie in the order of a
/// right factor whose columns are the rows in memory: beside each other first.
#[cube]
pub(super) fn column_address_row(lane: usize) -> usize {
    lane % 8 + lane / 16 * 8
}

/// Returns the chunk of the row of [`column_address_row`].
#[cube]
pub(super) fn column_address_chunk(lane: usize) -> usize {
    lane / 8 % 2
}

/// The arithmetic of the threads' places, with instructions that are simulated as NVIDIA describes them.
#[cfg(test)]
mod tests {
    use super::Fragments::Matrix;
    use super::*;

    /// A row-major matrix of 16 · 16 small whole numbers.
    type Tile16 = [[f32; TILE]; TILE];
    /// Pairs of the 32 threads.
    type Pairs = Vec<Vec<[f32; 2]>>;

    fn numbers(seed: usize) -> Tile16 {
        std::array::from_fn(|row| {
            std::array::from_fn(|column| ((row * 7 + column * 13 + seed) % 11) as f32 - 5.0)
        })
    }

    /// Simulates `ldmatrix.x4`: thread `l` gives row `l % 8` of matrix `l / 8`. Register `m` of thread `l` gets
    /// columns `2 · (l % 4)` and the next of row `l / 4` of matrix `m`; with `trans`, of its transpose.
    fn ldmatrix(tile: &Tile16, address: impl Fn(usize) -> [usize; 2], trans: bool) -> Pairs {
        let element = |matrix: usize, row: usize, column: usize| {
            let (row, column) = if trans { (column, row) } else { (row, column) };
            let [at, chunk] = address(matrix * 8 + row);
            tile[at][chunk * CHUNK + column]
        };
        let register = |lane: usize, matrix: usize| {
            [0, 1].map(|at| element(matrix, lane / 4, lane % 4 * 2 + at))
        };
        (0..32).map(|lane| (0..4).map(|matrix| register(lane, matrix)).collect()).collect()
    }

    /// Simulates `mma.m16n8k16` by the tables of the manual, with `group = lane / 4` and `thread = lane % 4`.
    fn mma(left: &Pairs, right: &Pairs, sums: &mut Pairs) {
        let (mut a, mut b) = ([[0.0; 16]; 16], [[0.0; 8]; 16]);
        for lane in 0..32 {
            let (group, thread) = (lane / 4, lane % 4);
            for index in 0..8 {
                let row = if index < 2 || (4..6).contains(&index) { group } else { group + 8 };
                let column = thread * 2 + (index & 1) + if index >= 4 { 8 } else { 0 };
                a[row][column] = left[lane][index / 2][index % 2];
            }
            for index in 0..4 {
                let row = thread * 2 + (index & 1) + if index >= 2 { 8 } else { 0 };
                b[row][group] = right[lane][index / 2][index % 2];
            }
        }
        for (lane, sums) in sums.iter_mut().enumerate() {
            for index in 0..4 {
                let row = if index < 2 { lane / 4 } else { lane / 4 + 8 };
                let column = lane % 4 * 2 + (index & 1);
                let product: f32 = (0..16).map(|k| a[row][k] * b[k][column]).sum();
                sums[index / 2][index % 2] += product;
            }
        }
    }

    /// Returns the sums of the product of a left and a right factor, two tiles of 16 · 8 elements, by the places
    /// of the kernels.
    fn product(left: &Pairs, right: &Pairs) -> Tile16 {
        let mut result = [[0.0; 16]; 16];
        for half in 0..2 {
            let right: Pairs = right.iter().map(|pairs| pairs[2 * half..][..2].to_vec()).collect();
            let mut sums = vec![vec![[0.0; 2]; Matrix.sum_pairs()]; 32];
            mma(left, &right, &mut sums);
            for (lane, sums) in sums.iter().enumerate() {
                for (row, pair) in sums.iter().enumerate() {
                    let column = half * CHUNK + sum_column(lane, 0, Matrix);
                    result[sum_row(lane, row, Matrix)][column..][..2].copy_from_slice(pair);
                }
            }
        }
        result
    }

    fn expected(left: &Tile16, right: impl Fn(usize, usize) -> f32) -> Tile16 {
        let sum =
            |row: usize, column: usize| (0..16).map(|k| left[row][k] * right(k, column)).sum();
        std::array::from_fn(|row| std::array::from_fn(|column| sum(row, column)))
    }

    #[test]
    fn factors_from_shared_memory_have_the_places_of_the_instruction() {
        let [a, b] = [1, 2].map(numbers);
        let left = ldmatrix(&a, |lane| [address_row(lane), address_chunk(lane)], false);
        let columns = |lane| [column_address_row(lane), column_address_chunk(lane)];
        let found = product(&left, &ldmatrix(&b, columns, false));
        assert_eq!(found, expected(&a, |k, column| b[column][k]));
        let rows = ldmatrix(&b, |lane| [address_row(lane), address_chunk(lane)], true);
        assert_eq!(product(&left, &rows), expected(&a, |k, column| b[k][column]));
    }

    #[test]
    fn a_left_factor_from_global_memory_or_from_sums_has_the_same_places() {
        let a = numbers(3);
        let from_shared = ldmatrix(&a, |lane| [address_row(lane), address_chunk(lane)], false);
        for (lane, pairs) in from_shared.iter().enumerate() {
            for (at, pair) in pairs.iter().enumerate() {
                let (row, column) = (left_row(lane, at, Matrix), left_column(lane, at, Matrix));
                assert_eq!(a[row][column..][..2], *pair);
                // `left_of_sums` takes pair `at % 2` of the tile of sums `at / 2`.
                let of_sums = at / 2 * CHUNK + sum_column(lane, 0, Matrix);
                assert_eq!([row, column], [sum_row(lane, at % 2, Matrix), of_sums]);
            }
        }
    }

    #[test]
    fn every_element_of_a_tile_has_one_place() {
        for fragments in [Matrix, Fragments::Scalar] {
            let (mut left, mut sums) = ([[0; 16]; 16], [[0; 8]; 16]);
            for lane in 0..fragments.lanes() {
                for at in 0..fragments.factor_pairs() {
                    let column = left_column(lane, at, fragments);
                    let row = &mut left[left_row(lane, at, fragments)];
                    row[column..][..2].iter_mut().for_each(|count| *count += 1);
                }
                for (row, pair) in (0..fragments.rows())
                    .flat_map(|row| (0..fragments.row_pairs()).map(move |pair| (row, pair)))
                {
                    let column = sum_column(lane, pair, fragments);
                    let row = &mut sums[sum_row(lane, row, fragments)];
                    row[column..][..2].iter_mut().for_each(|count| *count += 1);
                }
            }
            assert_eq!(left, [[1; 16]; 16]);
            assert_eq!(sums, [[1; 8]; 16]);
        }
    }

    /// Eight rows that `ldmatrix` reads at once have 16 bytes in each of the 8 groups of 4 banks.
    #[test]
    fn rows_of_a_tile_in_shared_memory_share_no_bank() {
        for width in (16..=128).step_by(16) {
            let stride = super::super::plan::stride(width);
            let mut groups: Vec<usize> = (0..8).map(|row| row * stride % 8).collect();
            groups.sort_unstable();
            assert_eq!(groups, (0..8).collect::<Vec<_>>(), "width {width}");
        }
    }
}
