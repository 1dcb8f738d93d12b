//! Kernels of layer normalization and its gradients. Computed in f32.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::rounding::narrowed;
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
}

/// Returns the mean of a row, of which `first` is the first vector, and 1 / √(variance + epsilon). All
/// threads of the cube must call it.
#[cube]
fn moments<F: Float, N: Size>(
    source: &[Vector<F, N>],
    first: usize,
    shape: &Rows,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] team: Team,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let (lane, step) = (own_lane(team), comptime!(team.lanes));
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut index = lane;
    while index < shape.count {
        sum += Vector::cast_from(source[first + index]);
        index += step;
    }
    let mean = Vector::<f32, N>::new(team_sum(sum, shared, team) / shape.len);

    let mut squares = Vector::<f32, N>::new(0.0f32);
    index = lane;
    while index < shape.count {
        let x = Vector::<f32, N>::cast_from(source[first + index]) - mean;
        squares += x * x;
        index += step;
    }
    let variance = team_sum(squares, shared, team) / shape.len;
    let scale = 1.0f32 / f32::sqrt(variance + shape.epsilon);
    (mean, Vector::new(scale))
}

/// Normalises rows. `params` is gamma, and beta if there is one.
#[cube(launch_unchecked)]
pub(super) fn layer_norm_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    params: &Sequence<Box<[Vector<F, N>]>>,
    target: &mut [Vector<F, N>],
    from: usize,
    param_firsts: &Sequence<usize>,
    to: usize,
    shape: Rows,
    #[comptime] team: Team,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(team.threads);
    let row = own_team(team);
    // Surplus teams process the last row as well, as all threads of a cube must meet. They do not write.
    let first = min(row, shape.rows - 1) * shape.count;
    let (mean, scale) = moments(source, from + first, &shape, &mut shared, team);
    if row < shape.rows {
        let mut index = own_lane(team);
        while index < shape.count {
            let x = Vector::<f32, N>::cast_from(source[from + first + index]);
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

/// Writes the gradient of the rows. For each group of `group_rows` rows, also writes a row of the sums
/// from which [`column_sums_kernel`] computes the gradients of gamma and beta. A group has a team.
#[cube(launch_unchecked)]
pub(super) fn layer_norm_backward_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    grads: &[Vector<F, N>],
    gamma: &[Vector<F, N>],
    target: &mut [Vector<F, N>],
    gamma_sums: &mut [Vector<f32, N>],
    beta_sums: &mut [Vector<f32, N>],
    from: usize,
    grads_from: usize,
    gamma_from: usize,
    to: usize,
    sums_to: usize,
    groups: usize,
    group_rows: usize,
    shape: Rows,
    #[comptime] team: Team,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(team.threads);
    let group = own_team(team);
    let (lane, step) = (own_lane(team), comptime!(team.lanes));
    let len = Vector::<f32, N>::new(shape.len);
    for at in 0..group_rows {
        let row = group * group_rows + at;
        let first = min(row, shape.rows - 1) * shape.count;
        let (mean, scale) = moments(source, from + first, &shape, &mut shared, team);

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
        let mean_grad = Vector::<f32, N>::new(team_sum(sum, &mut shared, team)) / len;
        let slope = Vector::<f32, N>::new(team_sum(slope, &mut shared, team)) / len;

        if group < groups && row < shape.rows {
            index = lane;
            while index < shape.count {
                let grad = Vector::<f32, N>::cast_from(grads[grads_from + first + index]);
                let scaled = grad * Vector::cast_from(gamma[gamma_from + index]);
                let x = Vector::<f32, N>::cast_from(source[from + first + index]);
                let normal = (x - mean) * scale;
                let dx = scale * (scaled - mean_grad - normal * slope);
                target[to + first + index] = narrowed(dx, integers);

                let mut gamma_sum = grad * normal;
                let mut beta_sum = grad;
                let sums = sums_to + group * shape.count + index;
                if at > 0 {
                    gamma_sum += gamma_sums[sums];
                    beta_sum += beta_sums[sums];
                }
                gamma_sums[sums] = gamma_sum;
                beta_sums[sums] = beta_sum;
                index += step;
            }
        }
    }
}

/// Adds the rows of sums that [`layer_norm_backward_kernel`] wrote, column by column. `lanes` threads
/// add every `lanes`-th element of a column of vectors; a cube has `columns` columns.
#[cube(launch_unchecked)]
pub(super) fn column_sums_kernel<F: Float, N: Size>(
    gamma_sums: &[Vector<f32, N>],
    beta_sums: &[Vector<f32, N>],
    gamma_grad: &mut [Vector<F, N>],
    beta_grad: &mut [Vector<F, N>],
    gamma_from: usize,
    beta_from: usize,
    gamma_to: usize,
    beta_to: usize,
    groups: usize,
    count: usize,
    #[comptime] lanes: usize,
    #[comptime] columns: usize,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(2 * lanes * columns));
    // Neighbouring threads have neighbouring columns.
    let column = ABSOLUTE_POS / comptime!(lanes * columns) * columns + ABSOLUTE_POS % columns;
    let lane = ABSOLUTE_POS / columns % lanes;
    let at = min(column, count - 1);
    let mut gamma = Vector::<f32, N>::new(0.0f32);
    let mut beta = Vector::<f32, N>::new(0.0f32);
    let mut group = lane;
    while group < groups {
        gamma += gamma_sums[gamma_from + group * count + at];
        beta += beta_sums[beta_from + group * count + at];
        group += lanes;
    }
    if comptime!(lanes > 1) {
        let unit = UNIT_POS as usize;
        let half = comptime!(lanes * columns);
        shared[unit] = gamma;
        shared[half + unit] = beta;
        sync_cube();
        #[unroll]
        for at in 0..comptime!(lanes.ilog2() as usize) {
            let step = comptime!(lanes >> (at + 1));
            if lane < step {
                let other = unit + comptime!(step * columns);
                shared[unit] = shared[unit] + shared[other];
                shared[half + unit] = shared[half + unit] + shared[half + other];
            }
            sync_cube();
        }
        gamma = shared[unit];
        beta = shared[half + unit];
    }
    if lane == 0 && column < count {
        gamma_grad[gamma_to + column] = narrowed(gamma, integers);
        beta_grad[beta_to + column] = narrowed(beta, integers);
    }
}
