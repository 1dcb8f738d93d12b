//! The softmax of rows and its gradient, in one kernel each. Computed in f32.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::device::rounds_in_integers;
use super::rounding::narrowed;
use super::rows::{Team, own_lane, own_team, power, team_max, team_sum};
use super::span::row_span;
use super::tensors::{contiguous, element, empty};

/// Writes the softmax of `rows` rows of `count` vectors.
#[cube(launch_unchecked)]
fn softmax_kernel<F: Float, N: Size>(
    source: &[Vector<F, N>],
    target: &mut [Vector<F, N>],
    from: usize,
    to: usize,
    rows: usize,
    count: usize,
    #[comptime] team: Team,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(team.threads);
    let row = own_team(team);
    // Surplus teams process the last row as well, as all threads of a cube must meet. They do not write.
    let first = min(row, rows - 1) * count;
    let (lane, step) = (own_lane(team), comptime!(team.lanes));

    let mut top = Vector::<f32, N>::new(f32::MIN);
    let mut index = lane;
    while index < count {
        top = max(top, Vector::cast_from(source[from + first + index]));
        index += step;
    }
    let top = Vector::<f32, N>::new(team_max(top, &mut shared, team));

    let mut sum = Vector::<f32, N>::new(0.0f32);
    index = lane;
    while index < count {
        sum += power(Vector::<f32, N>::cast_from(source[from + first + index]) - top);
        index += step;
    }
    let scale = Vector::<f32, N>::new(1.0f32 / team_sum(sum, &mut shared, team));

    if row < rows {
        index = lane;
        while index < count {
            let x = Vector::<f32, N>::cast_from(source[from + first + index]);
            target[to + first + index] = narrowed(power(x - top) * scale, integers);
            index += step;
        }
    }
}

/// Writes the gradient of `rows` rows of `count` vectors, given their softmax and its gradient.
#[cube(launch_unchecked)]
fn softmax_backward_kernel<F: Float, N: Size>(
    results: &[Vector<F, N>],
    grads: &[Vector<F, N>],
    target: &mut [Vector<F, N>],
    from: usize,
    grads_from: usize,
    to: usize,
    rows: usize,
    count: usize,
    #[comptime] team: Team,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(team.threads);
    let row = own_team(team);
    let first = min(row, rows - 1) * count;
    let (lane, step) = (own_lane(team), comptime!(team.lanes));

    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut index = lane;
    while index < count {
        let y = Vector::<f32, N>::cast_from(results[from + first + index]);
        sum += y * Vector::cast_from(grads[grads_from + first + index]);
        index += step;
    }
    let mean = Vector::<f32, N>::new(team_sum(sum, &mut shared, team));

    if row < rows {
        index = lane;
        while index < count {
            let y = Vector::<f32, N>::cast_from(results[from + first + index]);
            let grad = Vector::<f32, N>::cast_from(grads[grads_from + first + index]);
            target[to + first + index] = narrowed(y * (grad - mean), integers);
            index += step;
        }
    }
}

/// Implements [`Kernels::softmax`](crate::Kernels::softmax).
pub(super) fn forward(tensor: CubeTensor) -> CubeTensor {
    let tensor = contiguous(tensor);
    let target = empty(&tensor, tensor.shape(), tensor.dtype);
    let client = tensor.client.clone();
    let slices = [&tensor, &target].map(BufferSlice::of);
    let (numel, len) = (tensor.shape().num_elements(), tensor.shape()[tensor.rank() - 1]);
    let span = row_span(&client, &slices.each_ref(), &[], numel, len);
    let (team, rows) = (Team::new(&client, len, span.width), numel / len);
    let (count, dim) = team.grid(&client, rows);
    let [(read, from), (write, to)] = slices.each_ref().map(|slice| span.argument(slice));
    // SAFETY: `row_span` checked that both buffers hold the rows; the kernel accesses only these.
    unsafe {
        softmax_kernel::launch_unchecked(
            &client,
            count,
            dim,
            span.width,
            read,
            write,
            from,
            to,
            rows,
            len / span.width,
            team,
            rounds_in_integers(&client, tensor.dtype),
            element(tensor.dtype),
        );
    }
    target
}

/// Implements [`Kernels::softmax_backward`](crate::Kernels::softmax_backward).
pub(super) fn backward(result: CubeTensor, grad: CubeTensor) -> CubeTensor {
    let (result, grad) = (contiguous(result), contiguous(grad));
    let target = empty(&result, result.shape(), result.dtype);
    let client = result.client.clone();
    let slices = [&result, &grad, &target].map(BufferSlice::of);
    let (numel, len) = (result.shape().num_elements(), result.shape()[result.rank() - 1]);
    let span = row_span(&client, &slices.each_ref(), &[], numel, len);
    let (team, rows) = (Team::new(&client, len, span.width), numel / len);
    let (count, dim) = team.grid(&client, rows);
    let [(read, from), (grads, grads_from), (write, to)] =
        slices.each_ref().map(|slice| span.argument(slice));
    // SAFETY: `row_span` checked that the buffers hold the rows; the kernel accesses only these.
    unsafe {
        softmax_backward_kernel::launch_unchecked(
            &client,
            count,
            dim,
            span.width,
            read,
            grads,
            write,
            from,
            grads_from,
            to,
            rows,
            len / span.width,
            team,
            rounds_in_integers(&client, result.dtype),
            element(result.dtype),
        );
    }
    target
}
