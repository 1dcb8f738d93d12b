//! Kernels of layer norm, RMS norm and their gradients. Computed in f32.
//!
//! RMS norm is layer norm with the mean 0.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::rounding::{narrowed, rounded};
use super::rows::{Team, own_lane, own_team, team_sum};

/// Shape of the rows of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Rows {
    /// Number of rows.
    rows: usize,
    /// Number of vectors of a row.
    count: usize,
    /// Number of elements of a row.
    len: f32,
    /// Added to the variance.
    epsilon: f32,
    /// The number 0, which the compiler does not know.
    zero: u32,
}

/// Returns vector `at` of the rows to be normalized: of the source, or of its sum with the residual, if
/// there is one, rounded to the dtype.
#[cube]
fn summed<F: Float, N: Size>(
    source: &[Vector<F, N>],
    residuals: &Sequence<Box<[Vector<F, N>]>>,
    firsts: &Sequence<usize>,
    from: usize,
    at: usize,
    #[comptime] integers: bool,
) -> Vector<f32, N> {
    let mut x = Vector::<f32, N>::cast_from(source[from + at]);
    #[unroll]
    for part in 0..residuals.len() {
        let sum = x + Vector::cast_from(residuals[part][firsts[part] + at]);
        let sum: Vector<F, N> = narrowed(sum, integers);
        x = Vector::cast_from(sum);
    }
    x
}

/// Returns the mean of a row, of which `first` is the first vector, and 1 / √(variance + epsilon). All
/// threads of the cube must call it. Rows that are not centered have the mean 0.
#[cube]
fn moments<F: Float, N: Size>(
    source: &[Vector<F, N>],
    residuals: &Sequence<Box<[Vector<F, N>]>>,
    residual_firsts: &Sequence<usize>,
    from: usize,
    first: usize,
    shape: &Rows,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] centered: bool,
    #[comptime] team: Team,
    #[comptime] integers: bool,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let (lane, step) = (own_lane(team), comptime!(team.lanes));
    let mut mean = Vector::<f32, N>::new(0.0f32);
    if comptime!(centered) {
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut index = lane;
        while index < shape.count {
            sum += summed(source, residuals, residual_firsts, from, first + index, integers);
            index += step;
        }
        mean = Vector::<f32, N>::new(team_sum(sum, shared, team) / shape.len);
    }

    let mut squares = Vector::<f32, N>::new(0.0f32);
    let mut index = lane;
    while index < shape.count {
        let x = summed(source, residuals, residual_firsts, from, first + index, integers) - mean;
        squares += x * x;
        index += step;
    }
    let variance = team_sum(squares, shared, team) / shape.len;
    let scale = 1.0f32 / f32::sqrt(variance + shape.epsilon);
    (mean, Vector::new(scale))
}

/// Normalizes rows. `residuals` and `sums` have one tensor each or none. `params` is gamma, and beta if
/// there is one.
#[cube(launch_unchecked)]
pub(super) fn normalize_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    residuals: &Sequence<Box<[Vector<F, N>]>>,
    params: &Sequence<Box<[Vector<F, N>]>>,
    target: &mut [Vector<F, N>],
    sums: &mut Sequence<Box<[Vector<F, N>]>>,
    from: usize,
    residual_firsts: &Sequence<usize>,
    param_firsts: &Sequence<usize>,
    to: usize,
    sum_firsts: &Sequence<usize>,
    shape: Rows,
    #[comptime] centered: bool,
    #[comptime] team: Team,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(team.threads);
    let row = own_team(team);
    // Surplus teams process the last row as well, as all threads of a cube must meet. They do not write.
    let first = min(row, shape.rows - 1) * shape.count;
    let (mean, scale) = moments(
        source,
        residuals,
        residual_firsts,
        from,
        first,
        &shape,
        &mut shared,
        centered,
        team,
        integers,
    );
    if row < shape.rows {
        let mut index = own_lane(team);
        while index < shape.count {
            let x = summed(source, residuals, residual_firsts, from, first + index, integers);
            #[unroll]
            for part in 0..sum_firsts.len() {
                sums.index_mut(part)[sum_firsts[part] + first + index] = narrowed(x, integers);
            }
            let gamma = Vector::<f32, N>::cast_from(params[0][param_firsts[0] + index]);
            let mut y = (x - mean) * scale * gamma;
            #[unroll]
            for beta in 1..params.len() {
                y += Vector::cast_from(params[beta][param_firsts[beta] + index]);
            }
            target[to + first + index] = narrowed(y, integers);
            index += comptime!(team.lanes);
        }
    }
}

/// Writes the gradient of the rows, to which it adds that of the sum, if `sum_grads` has one. Also writes
/// the mean of each row and its factor 1 / √(variance + epsilon), for [`param_sums_kernel`].
#[cube(launch_unchecked)]
pub(super) fn normalize_backward_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    grads: &[Vector<F, N>],
    sum_grads: &Sequence<Box<[Vector<F, N>]>>,
    gamma: &[Vector<F, N>],
    target: &mut [Vector<F, N>],
    moments_of_rows: &mut [f32],
    from: usize,
    grads_from: usize,
    sum_grad_firsts: &Sequence<usize>,
    gamma_from: usize,
    to: usize,
    moments_to: usize,
    shape: Rows,
    #[comptime] centered: bool,
    #[comptime] team: Team,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(team.threads);
    let row = own_team(team);
    let (lane, step) = (own_lane(team), comptime!(team.lanes));
    let len = Vector::<f32, N>::new(shape.len);
    let no_residuals = Sequence::<Box<[Vector<F, N>]>>::new();
    let no_firsts = Sequence::<usize>::new();
    // Surplus teams process the last row as well, as all threads of a cube must meet. They do not write.
    let first = min(row, shape.rows - 1) * shape.count;
    let (mean, scale) = moments(
        source,
        &no_residuals,
        &no_firsts,
        from,
        first,
        &shape,
        &mut shared,
        centered,
        team,
        integers,
    );

    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut slope = Vector::<f32, N>::new(0.0f32);
    let mut index = lane;
    while index < shape.count {
        let grad = Vector::<f32, N>::cast_from(grads[grads_from + first + index]);
        let scaled = grad * Vector::cast_from(gamma[gamma_from + index]);
        let x = Vector::<f32, N>::cast_from(source[from + first + index]);
        sum += scaled;
        slope += scaled * ((x - mean) * scale);
        index += step;
    }
    let mut mean_grad = Vector::<f32, N>::new(0.0f32);
    if comptime!(centered) {
        mean_grad = Vector::<f32, N>::new(team_sum(sum, &mut shared, team)) / len;
    }
    let slope = Vector::<f32, N>::new(team_sum(slope, &mut shared, team)) / len;

    if row < shape.rows {
        if lane == 0 {
            moments_of_rows[moments_to + 2 * row] = mean.extract(0usize);
            moments_of_rows[moments_to + 2 * row + 1] = scale.extract(0usize);
        }
        index = lane;
        while index < shape.count {
            let grad = Vector::<f32, N>::cast_from(grads[grads_from + first + index]);
            let scaled = grad * Vector::cast_from(gamma[gamma_from + index]);
            let x = Vector::<f32, N>::cast_from(source[from + first + index]);
            let normal = (x - mean) * scale;
            let mut dx = scale * (scaled - mean_grad - normal * slope);
            #[unroll]
            for part in 0..sum_grads.len() {
                let more = sum_grads[part][sum_grad_firsts[part] + first + index];
                dx = rounded(dx, shape.zero) + Vector::cast_from(more);
            }
            target[to + first + index] = narrowed(dx, integers);
            index += step;
        }
    }
}

/// Writes, for each group of `group_rows` rows, a row of the sums from which [`column_sums_kernel`]
/// computes the gradients of gamma and, if `sums` has two tensors, of beta. A thread has a vector of
/// columns, so that neighbouring threads read neighbouring vectors.
#[cube(launch_unchecked)]
pub(super) fn param_sums_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    grads: &[Vector<F, N>],
    moments_of_rows: &[f32],
    sums: &mut Sequence<Box<[Vector<f32, N>]>>,
    from: usize,
    grads_from: usize,
    moments_from: usize,
    sums_firsts: &Sequence<usize>,
    groups: usize,
    group_rows: usize,
    shape: Rows,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < groups * shape.count {
        let (group, column) = (ABSOLUTE_POS / shape.count, ABSOLUTE_POS % shape.count);
        let end = min((group + 1) * group_rows, shape.rows);
        let mut gamma_sum = Vector::<f32, N>::new(0.0f32);
        let mut beta_sum = Vector::<f32, N>::new(0.0f32);
        let mut row = group * group_rows;
        while row < end {
            let mean = Vector::<f32, N>::new(moments_of_rows[moments_from + 2 * row]);
            let scale = Vector::<f32, N>::new(moments_of_rows[moments_from + 2 * row + 1]);
            let at = row * shape.count + column;
            let grad = Vector::<f32, N>::cast_from(grads[grads_from + at]);
            let x = Vector::<f32, N>::cast_from(source[from + at]);
            gamma_sum += grad * ((x - mean) * scale);
            beta_sum += grad;
            row += 1;
        }
        sums.index_mut(0)[sums_firsts[0] + ABSOLUTE_POS] = gamma_sum;
        #[unroll]
        for beta in 1..sums_firsts.len() {
            sums.index_mut(beta)[sums_firsts[beta] + ABSOLUTE_POS] = beta_sum;
        }
    }
}

/// Adds the rows of sums that [`param_sums_kernel`] wrote, column by column. `lanes` threads add
/// every `lanes`-th element of a column of vectors; a cube has `columns` columns.
#[cube(launch_unchecked)]
pub(super) fn column_sums_kernel<F: Float, N: Size>(
    sums: &Sequence<Box<[Vector<f32, N>]>>,
    grads: &mut Sequence<Box<[Vector<F, N>]>>,
    sums_firsts: &Sequence<usize>,
    grads_firsts: &Sequence<usize>,
    groups: usize,
    count: usize,
    #[comptime] lanes: usize,
    #[comptime] columns: usize,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(lanes * columns));
    // Neighbouring threads have neighbouring columns.
    let column = ABSOLUTE_POS / comptime!(lanes * columns) * columns + ABSOLUTE_POS % columns;
    let lane = ABSOLUTE_POS / columns % lanes;
    let at = min(column, count - 1);
    #[unroll]
    for part in 0..sums_firsts.len() {
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut group = lane;
        while group < groups {
            sum += sums[part][sums_firsts[part] + group * count + at];
            group += lanes;
        }
        if comptime!(lanes > 1) {
            let unit = UNIT_POS as usize;
            shared[unit] = sum;
            sync_cube();
            #[unroll]
            for at in 0..comptime!(lanes.ilog2() as usize) {
                let step = comptime!(lanes >> (at + 1));
                if lane < step {
                    shared[unit] = shared[unit] + shared[unit + comptime!(step * columns)];
                }
                sync_cube();
            }
            sum = shared[unit];
        }
        if lane == 0 && column < count {
            grads.index_mut(part)[grads_firsts[part] + column] = narrowed(sum, integers);
        }
    }
}
