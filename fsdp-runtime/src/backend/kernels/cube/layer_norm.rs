//! Layer normalization in one kernel, and its gradients in two. Computed in f32.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::device::{on_cpu, rounds_in_integers};
use super::rounding::narrowed;
use super::rows::{lanes, own_lane, own_row, row_grid, row_sum};
use super::span::{Span, row_span};
use super::tensors::{contiguous, element, empty};
use crate::backend::kernels::contract::SavedLayerNorm;

/// Threads of a cube that sum columns: `columns` neighbouring threads take one vector each of a row,
/// and `rows` such groups take every `rows`-th row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ColumnTile {
    columns: usize,
    rows: usize,
}

/// Normalizes one row for each group of `lanes` threads.
#[cube(launch_unchecked)]
fn layer_norm_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    gamma: &[Vector<F, N>],
    beta: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    stats: &mut [f32],
    x_from: usize,
    gamma_from: usize,
    beta_from: usize,
    y_from: usize,
    rows: usize,
    vectors: usize,
    features: f32,
    epsilon: f32,
    #[comptime] has_beta: bool,
    #[comptime] lanes: usize,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let row = own_row(rows, lanes);
    let lane = own_lane(lanes);
    let first = x_from + row * vectors;
    let mut part = Vector::<f32, N>::new(0.0f32);
    let mut at = lane;
    while at < vectors {
        part += Vector::<f32, N>::cast_from(x[first + at]);
        at += lanes;
    }
    let mean = row_sum(part, lanes) / features;

    let mut squares = Vector::<f32, N>::new(0.0f32);
    at = lane;
    while at < vectors {
        let apart = Vector::<f32, N>::cast_from(x[first + at]) - Vector::new(mean);
        squares += apart * apart;
        at += lanes;
    }
    let scale = 1.0f32 / f32::sqrt(row_sum(squares, lanes) / features + epsilon);

    at = lane;
    while at < vectors {
        let apart = Vector::<f32, N>::cast_from(x[first + at]) - Vector::new(mean);
        let weight = Vector::<f32, N>::cast_from(gamma[gamma_from + at]);
        let mut value = apart * Vector::new(scale) * weight;
        if comptime!(has_beta) {
            value += Vector::<f32, N>::cast_from(beta[beta_from + at]);
        }
        y[y_from + row * vectors + at] = narrowed::<F, N>(value, integers);
        at += lanes;
    }
    if lane == 0 {
        stats[row * 2] = mean;
        stats[row * 2 + 1] = scale;
    }
}

/// Computes the gradient of one row of the input for each group of `lanes` threads.
#[cube(launch_unchecked)]
fn layer_norm_backward_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    gamma: &[Vector<F, N>],
    grads: &[Vector<F, N>],
    x_grads: &mut [Vector<F, N>],
    stats: &[f32],
    x_from: usize,
    gamma_from: usize,
    grads_from: usize,
    x_grads_from: usize,
    rows: usize,
    vectors: usize,
    features: f32,
    #[comptime] lanes: usize,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let row = own_row(rows, lanes);
    let lane = own_lane(lanes);
    let mean = stats[row * 2];
    let scale = stats[row * 2 + 1];
    let mut along = Vector::<f32, N>::new(0.0f32);
    let mut constant = Vector::<f32, N>::new(0.0f32);
    let mut at = lane;
    while at < vectors {
        let apart = Vector::<f32, N>::cast_from(x[x_from + row * vectors + at]) - Vector::new(mean);
        let grad = Vector::<f32, N>::cast_from(grads[grads_from + row * vectors + at])
            * Vector::<f32, N>::cast_from(gamma[gamma_from + at]);
        along += grad * (apart * Vector::new(scale));
        constant += grad;
        at += lanes;
    }
    let along = row_sum(along, lanes) / features;
    let constant = row_sum(constant, lanes) / features;

    at = lane;
    while at < vectors {
        let apart = Vector::<f32, N>::cast_from(x[x_from + row * vectors + at]) - Vector::new(mean);
        let grad = Vector::<f32, N>::cast_from(grads[grads_from + row * vectors + at])
            * Vector::<f32, N>::cast_from(gamma[gamma_from + at]);
        let normalized = apart * Vector::new(scale);
        let value =
            (grad - Vector::new(constant) - normalized * Vector::new(along)) * Vector::new(scale);
        x_grads[x_grads_from + row * vectors + at] = narrowed::<F, N>(value, integers);
        at += lanes;
    }
}

/// Sums the gradients of the weight and of the bias over all rows.
#[cube(launch_unchecked)]
fn layer_norm_params_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    grads: &[Vector<F, N>],
    stats: &[f32],
    gamma_grads: &mut [Vector<F, N>],
    beta_grads: &mut [Vector<F, N>],
    x_from: usize,
    grads_from: usize,
    gamma_grads_from: usize,
    beta_grads_from: usize,
    rows: usize,
    vectors: usize,
    #[comptime] tile: ColumnTile,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let thread = ABSOLUTE_POS;
    let in_cube = thread % comptime!(tile.columns * tile.rows);
    let cube = thread / comptime!(tile.columns * tile.rows);
    let column = cube * comptime!(tile.columns) + in_cube % comptime!(tile.columns);
    let read = min(column, vectors - 1);
    let mut gamma_sum = Vector::<f32, N>::new(0.0f32);
    let mut beta_sum = Vector::<f32, N>::new(0.0f32);
    let mut row = in_cube / comptime!(tile.columns);
    while row < rows {
        let x = Vector::<f32, N>::cast_from(x[x_from + row * vectors + read]);
        let grad = Vector::<f32, N>::cast_from(grads[grads_from + row * vectors + read]);
        let normalized = (x - Vector::new(stats[row * 2])) * Vector::new(stats[row * 2 + 1]);
        gamma_sum += grad * normalized;
        beta_sum += grad;
        row += comptime!(tile.rows);
    }
    if comptime!(tile.rows > 1) {
        let mut gamma_sums = Shared::<[Vector<f32, N>]>::new_slice(tile.columns * tile.rows);
        let mut beta_sums = Shared::<[Vector<f32, N>]>::new_slice(tile.columns * tile.rows);
        gamma_sums[in_cube] = gamma_sum;
        beta_sums[in_cube] = beta_sum;
        sync_cube();
        if in_cube < comptime!(tile.columns) {
            let mut other = in_cube + comptime!(tile.columns);
            while other < comptime!(tile.columns * tile.rows) {
                gamma_sum += gamma_sums[other];
                beta_sum += beta_sums[other];
                other += comptime!(tile.columns);
            }
        }
    }
    if in_cube < comptime!(tile.columns) && column < vectors {
        gamma_grads[gamma_grads_from + column] = narrowed::<F, N>(gamma_sum, integers);
        beta_grads[beta_grads_from + column] = narrowed::<F, N>(beta_sum, integers);
    }
}

/// Implements [`Kernels::layer_norm`](crate::backend::kernels::Kernels::layer_norm).
pub(super) fn forward(
    x: CubeTensor,
    gamma: CubeTensor,
    beta: Option<CubeTensor>,
    epsilon: f32,
) -> [CubeTensor; 2] {
    let (x, gamma, beta) = (contiguous(x), contiguous(gamma), beta.map(contiguous));
    let (numel, features) = (x.shape().num_elements(), gamma.shape().num_elements());
    let rows = numel / features;
    let y = empty(&x, x.shape(), x.dtype);
    let stats = empty(&x, Shape::from([rows, 2]), DType::F32);
    let (client, dtype) = (x.client.clone(), element(x.dtype));
    let has_beta = beta.is_some();
    let matrices = [&x, &y].map(BufferSlice::of);
    // Without a bias the kernel has an argument that it does not read.
    let columns = [&gamma, beta.as_ref().unwrap_or(&gamma)].map(BufferSlice::of);
    let span = common_span(&client, &matrices, &columns, [numel, features]);
    let vectors = features / span.width;
    let lanes = lanes(&client, vectors);
    let (count, dim) = row_grid(&client, rows, lanes);
    let [(x, x_from), (y_arg, y_from)] = matrices.each_ref().map(|slice| span.argument(slice));
    let [(gamma, gamma_from), (beta, beta_from)] =
        columns.each_ref().map(|slice| span.argument(slice));
    let integers = rounds_in_integers(&client, y.dtype);
    // SAFETY: `common_span` checked that the buffers hold the elements, and `stats` has two for each
    // row; the kernel accesses only these.
    unsafe {
        layer_norm_kernel::launch_unchecked(
            &client,
            count,
            dim,
            span.width,
            x,
            gamma,
            beta,
            y_arg,
            BufferSlice::of(&stats).buffer_arg(),
            x_from,
            gamma_from,
            beta_from,
            y_from,
            rows,
            vectors,
            features as f32,
            epsilon,
            has_beta,
            lanes,
            integers,
            dtype,
        );
    }
    [y, stats]
}

/// Returns all elements of the matrices, as vectors that both matrices and columns can be read in.
fn common_span(
    client: &Client,
    matrices: &[BufferSlice],
    columns: &[BufferSlice],
    [numel, features]: [usize; 2],
) -> Span {
    let all: Vec<&BufferSlice> = matrices.iter().chain(columns).collect();
    let width = row_span(client, &all, features, features).width;
    let matrices: Vec<&BufferSlice> = matrices.iter().collect();
    row_span(client, &matrices, numel, width)
}

/// Implements
/// [`Kernels::layer_norm_backward`](crate::backend::kernels::Kernels::layer_norm_backward).
pub(super) fn backward(saved: SavedLayerNorm<CubeTensor>, grad: CubeTensor) -> [CubeTensor; 3] {
    let SavedLayerNorm { x, gamma, stats } = saved;
    let [x, gamma, stats, grad] = [x, gamma, stats, grad].map(contiguous);
    let x_grad = x_gradient(&x, &gamma, &stats, &grad);
    let [gamma_grad, beta_grad] = param_gradients(&x, &stats, &grad, gamma.shape());
    [x_grad, gamma_grad, beta_grad]
}

/// Returns the gradient of the input.
fn x_gradient(
    x: &CubeTensor,
    gamma: &CubeTensor,
    stats: &CubeTensor,
    grad: &CubeTensor,
) -> CubeTensor {
    let (numel, features) = (x.shape().num_elements(), gamma.shape().num_elements());
    let rows = numel / features;
    let target = empty(x, x.shape(), x.dtype);
    let (client, dtype) = (x.client.clone(), element(x.dtype));
    let matrices = [x, grad, &target].map(BufferSlice::of);
    let columns = [BufferSlice::of(gamma)];
    let span = common_span(&client, &matrices, &columns, [numel, features]);
    let vectors = features / span.width;
    let lanes = lanes(&client, vectors);
    let (count, dim) = row_grid(&client, rows, lanes);
    let [(x, x_from), (grads, grads_from), (write, to)] =
        matrices.each_ref().map(|slice| span.argument(slice));
    let [(gamma, gamma_from)] = columns.each_ref().map(|slice| span.argument(slice));
    // SAFETY: as in `forward`.
    unsafe {
        layer_norm_backward_kernel::launch_unchecked(
            &client,
            count,
            dim,
            span.width,
            x,
            gamma,
            grads,
            write,
            BufferSlice::of(stats).buffer_arg(),
            x_from,
            gamma_from,
            grads_from,
            to,
            rows,
            vectors,
            features as f32,
            lanes,
            rounds_in_integers(&client, target.dtype),
            dtype,
        );
    }
    target
}

/// Returns the gradients of the weight and of the bias.
fn param_gradients(
    x: &CubeTensor,
    stats: &CubeTensor,
    grad: &CubeTensor,
    shape: Shape,
) -> [CubeTensor; 2] {
    let (numel, features) = (x.shape().num_elements(), shape.num_elements());
    let rows = numel / features;
    let targets = [empty(x, shape.clone(), x.dtype), empty(x, shape, x.dtype)];
    let (client, dtype) = (x.client.clone(), element(x.dtype));
    let (matrices, columns) =
        ([x, grad].map(BufferSlice::of), targets.each_ref().map(BufferSlice::of));
    let (span, tile) = if on_cpu(&client) {
        let span = common_span(&client, &matrices, &columns, [numel, features]);
        (span, ColumnTile { columns: 1, rows: 1 })
    } else {
        // Single elements: a row has few vectors, and many cubes run at a time.
        let matrices: Vec<&BufferSlice> = matrices.iter().collect();
        (row_span(&client, &matrices, numel, 1), ColumnTile { columns: 32, rows: 8 })
    };
    let vectors = features / span.width;
    let threads = vectors.div_ceil(tile.columns) * tile.columns * tile.rows;
    let dim = CubeDim::new_1d((tile.columns * tile.rows) as u32);
    let count = cubecl::calculate_cube_count_elemwise(&client, threads, dim);
    let [(x, x_from), (grads, grads_from)] = matrices.each_ref().map(|slice| span.argument(slice));
    let [(gamma, gamma_from), (beta, beta_from)] =
        columns.each_ref().map(|slice| span.argument(slice));
    let integers = rounds_in_integers(&client, targets[0].dtype);
    // SAFETY: as in `forward`.
    unsafe {
        layer_norm_params_kernel::launch_unchecked(
            &client,
            count,
            dim,
            span.width,
            x,
            grads,
            BufferSlice::of(stats).buffer_arg(),
            gamma,
            beta,
            x_from,
            grads_from,
            gamma_from,
            beta_from,
            rows,
            vectors,
            tile,
            integers,
            dtype,
        );
    }
    targets
}
