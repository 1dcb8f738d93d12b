//! Rows: teams of threads that each process a row, and the sums and maxima of a team.
//!
//! On a device other than a CPU an element of a row is added to one of up to 256 sums, according to its
//! index modulo their number, and the sums are added in the order of a tree. The order depends only on
//! the row's length, not on the width of the vectors. On a CPU a team is one thread, and the width of
//! vectors depends only on the row's length and the dtype. [`Team::of_long_rows`] makes teams with more sums.

use cubecl::client::Client;
use cubecl::prelude::*;

use super::device::on_cpu;
use super::span::grid;

/// Largest number of partial sums of a row.
const MAX_SUMS: usize = 256;
/// Smallest number of partial sums of a row. Fewer would leave threads of a plane idle.
const MIN_SUMS: usize = 32;
/// Number of threads of a cube. Every device allows as many.
const THREADS: usize = 256;

/// Threads that process a row together. The vectors of the row are dealt to the threads in turn.
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

    /// Returns the team for rows of many vectors, of which a launch may have few: a thread for each vector, up
    /// to all threads of a cube. The order of sums depends on the width of the vectors.
    pub(super) fn of_long_rows(client: &Client, vectors: usize, width: usize) -> Self {
        if on_cpu(client) {
            return Self { lanes: 1, threads: 1, width };
        }
        let lanes = vectors.next_power_of_two().clamp(MIN_SUMS, THREADS);
        Self { lanes, threads: THREADS, width }
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

/// Operation that combines the elements of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fold {
    Sum,
    Largest,
}

/// Returns the elementwise result of an operation on two vectors.
#[cube]
fn combined<N: Size>(
    left: Vector<f32, N>,
    right: Vector<f32, N>,
    #[comptime] fold: Fold,
) -> Vector<f32, N> {
    if comptime!(fold == Fold::Sum) { left + right } else { max(left, right) }
}

/// Returns the result of an operation on the vectors that the threads of the team have, in the order
/// of a tree. All threads of the cube must call it, with memory for a vector of each.
#[cube]
fn team_fold<N: Size>(
    partial: Vector<f32, N>,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] team: Team,
    #[comptime] fold: Fold,
) -> Vector<f32, N> {
    let mut result = partial;
    if comptime!(team.lanes > 1) {
        let unit = UNIT_POS as usize;
        let lane = unit % comptime!(team.lanes);
        shared[unit] = partial;
        sync_cube();
        #[unroll]
        for at in 0..comptime!(team.lanes.ilog2() as usize) {
            let step = comptime!(team.lanes >> (at + 1));
            if lane < step {
                shared[unit] = combined(shared[unit], shared[unit + step], fold);
            }
            sync_cube();
        }
        result = shared[unit - lane];
        // The next call writes the memory.
        sync_cube();
    }
    result
}

/// Returns the sum of the partial sums that the threads of the team have. All threads of the cube must
/// call it, with memory for a vector of each.
#[cube]
pub(super) fn team_sum<N: Size>(
    partial: Vector<f32, N>,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] team: Team,
) -> f32 {
    let mut sum = team_fold(partial, shared, team, Fold::Sum);
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
    let top = team_fold(partial, shared, team, Fold::Largest);
    let mut largest = top.extract(0usize);
    #[unroll]
    for index in 1..comptime!(team.width) {
        largest = max(largest, top.extract(index));
    }
    largest
}

/// Returns eˣ for x ≤ 0, and 0 where it is below the normal numbers, as Flex does.
#[cube]
pub(super) fn power<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let least = Vector::<f32, N>::new(-87.0f32);
    select_many(x.less_than(&least), Vector::new(0.0f32), Vector::exp(x))
}

/// The kernels on rows, called without the operations that models record.
#[cfg(all(test, feature = "cpu", feature = "flex"))]
mod tests {
    use burn::backend::Flex;
    use burn::backend::TensorMetadata;
    use burn::tensor::{DType, Shape, TensorData};
    use burn_cubecl::{CubeBackend, CubeDevice};

    use crate::tensor::Float;
    use crate::{Kernels, NormalizationGrads, NormalizationRule, NormalizationTensors, Normalized};
    use crate::{cast, to_data};

    /// Returns pseudo-random multiples of 1/64 up to 2, which are exact in f16.
    fn tensor<B: Kernels>(
        device: &B::Device,
        shape: &[usize],
        seed: usize,
        dtype: DType,
    ) -> Float<B> {
        let numel = shape.iter().product::<usize>();
        let number = |i: usize| ((i * 7919 + seed * 104_729) % 257) as f32 / 64.0 - 2.0;
        let values: Vec<f32> = (0..numel).map(number).collect();
        cast::<B>(B::float_from_data(TensorData::new(values, Shape::from(shape)), device), dtype)
    }

    /// Returns the results of all kernels on rows, for matrices of this shape.
    fn results<B: Kernels>(
        device: &B::Device,
        [rows, len]: [usize; 2],
        dtype: DType,
    ) -> Vec<Vec<f32>> {
        let matrix = |seed| tensor::<B>(device, &[rows, len], seed, dtype);
        let row = |seed| tensor::<B>(device, &[len], seed, dtype);
        let mut results = Vec::new();
        for (centered, bias, residual) in
            [(true, false, false), (true, true, true), (false, false, false), (false, false, true)]
        {
            let rule = NormalizationRule { centered, epsilon: 1e-3 };
            let second = |seed| residual.then(|| matrix(seed));
            let (gamma, beta) = (row(2), bias.then(|| row(3)));
            let tensors =
                NormalizationTensors { input: matrix(1), residual: second(5), gamma, beta };
            let Normalized { output, sum } = B::normalize(tensors, &rule);
            results.extend([output].into_iter().chain(sum));
            let (grad, sum_grad) = (matrix(4), second(6));
            let tensors = NormalizationGrads { input: matrix(1), gamma: row(2), grad, sum_grad };
            let gradients = B::normalize_backward(tensors, &rule);
            assert_eq!(gradients.len(), if centered { 3 } else { 2 });
            results.extend(gradients);
        }
        results.push(<B as Kernels>::softmax(matrix(1)));
        results.push(B::softmax_backward(matrix(1), matrix(4)));
        assert!(results.iter().all(|result| result.dtype() == dtype));
        let numbers = |result| to_data::<B>(cast::<B>(result, DType::F32)).iter().collect();
        results.into_iter().map(numbers).collect()
    }

    #[test]
    fn results_are_those_of_flex() {
        let device = CubeDevice::Cpu(cubecl::device::CpuDevice);
        for (dtype, rounding) in [(DType::F32, 4e-6), (DType::F16, 1.0 / 1024.0)] {
            // 130 rows make 44 groups of 3 rows, of which the last has one row.
            for shape in [[1, 1], [3, 7], [2, 64], [130, 100]] {
                let found = results::<CubeBackend>(&device, shape, dtype);
                let expected = results::<Flex>(&Default::default(), shape, DType::F32);
                assert_eq!(found.len(), expected.len());
                for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert_eq!(found.len(), expected.len(), "result {number} of {shape:?}");
                    let largest = expected.iter().fold(1.0f32, |top, x| top.max(x.abs()));
                    for (found, expected) in found.iter().zip(expected) {
                        assert!(
                            (found - expected).abs() <= rounding * largest,
                            "{found} {expected} in result {number} of {shape:?} in {dtype:?}"
                        );
                    }
                }
            }
        }
    }
}
