//! Layer normalization in one kernel, and its gradients in two.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::device::{on_cpu, rounds_in_integers};
use super::layer_norm_kernels::{
    RowsLaunch, column_sums_kernel, layer_norm_backward_kernel, layer_norm_kernel,
};
use super::rows::Team;
use super::span::{grid, row_span};
use super::tensors::{contiguous, element, empty};

/// Largest number of groups of rows, on a CPU and on other devices. A group is processed by one thread
/// or team, and the column sums add the sums of all groups.
const MAX_GROUPS: [usize; 2] = [64, 512];
/// Threads that share a column in the column sums, and columns of a cube, on devices other than CPUs.
const COLUMN_SUMS: (usize, usize) = (16, 16);

/// Implements [`Kernels::layer_norm`](crate::Kernels::layer_norm).
pub(super) fn forward(
    tensor: CubeTensor,
    gamma: CubeTensor,
    beta: Option<CubeTensor>,
    epsilon: f32,
) -> CubeTensor {
    let tensor = contiguous(tensor);
    let params: Vec<_> = std::iter::once(gamma).chain(beta).map(contiguous).collect();
    let target = empty(&tensor, tensor.shape(), tensor.dtype);
    let client = tensor.client.clone();
    let slices = [&tensor, &target].map(BufferSlice::of);
    let params: Vec<_> = params.iter().map(BufferSlice::of).collect();
    let (numel, len) = (tensor.shape().num_elements(), tensor.shape()[tensor.rank() - 1]);
    let parameters: Vec<_> = params.iter().collect();
    let span = row_span(&client, &slices.each_ref(), &parameters, numel, len);
    let (team, rows) = (Team::new(&client, len, span.width), numel / len);
    let (count, dim) = team.grid(&client, rows);
    let [(read, from), (write, to)] = slices.each_ref().map(|slice| span.argument(slice));
    let params = params.iter().map(|param| span.argument(param));
    let (params, firsts): (Vec<_>, Vec<_>) = params.unzip();
    // SAFETY: `row_span` checked that the buffers hold the rows and the parameters; the kernel
    // accesses only these.
    unsafe {
        layer_norm_kernel::launch_unchecked(
            &client,
            count,
            dim,
            span.width,
            read,
            params.into_iter().collect(),
            write,
            from,
            firsts.into_iter().collect(),
            to,
            RowsLaunch::new(rows, len / span.width, len as f32, epsilon),
            team,
            rounds_in_integers(&client, tensor.dtype),
            element(tensor.dtype),
        );
    }
    target
}

/// Implements
/// [`Kernels::layer_norm_backward`](crate::Kernels::layer_norm_backward).
pub(super) fn backward(
    tensor: CubeTensor,
    gamma: CubeTensor,
    grad: CubeTensor,
    epsilon: f32,
) -> [CubeTensor; 3] {
    let (tensor, gamma, grad) = (contiguous(tensor), contiguous(gamma), contiguous(grad));
    let (client, dtype) = (tensor.client.clone(), tensor.dtype);
    let (numel, len) = (tensor.shape().num_elements(), tensor.shape()[tensor.rank() - 1]);
    let rows = numel / len;
    let max_groups = MAX_GROUPS[usize::from(!on_cpu(&client))];
    let group_rows = rows.div_ceil(max_groups);
    let groups = rows.div_ceil(group_rows);

    let target = empty(&tensor, tensor.shape(), dtype);
    let [gamma_sums, beta_sums] =
        [(); 2].map(|()| empty(&tensor, Shape::from([groups, len]), DType::F32));
    let slices = [&tensor, &grad, &target].map(BufferSlice::of);
    let sums = [&gamma_sums, &beta_sums].map(BufferSlice::of);
    let weight = BufferSlice::of(&gamma);
    let small = [&weight, &sums[0], &sums[1]];
    let span = row_span(&client, &slices.each_ref(), &small, numel, len);
    let team = Team::new(&client, len, span.width);
    let (count, dim) = team.grid(&client, groups);
    let [(read, from), (grads, grads_from), (write, to)] =
        slices.each_ref().map(|slice| span.argument(slice));
    let [(gamma_arg, gamma_from), (gamma_sums_arg, sums_to), (beta_sums_arg, _)] =
        small.map(|slice| span.argument(slice));
    // SAFETY: `row_span` checked that the buffers hold the rows and gamma, and the sums have a row for
    // each group; the kernel accesses only these. New tensors begin at element 0.
    unsafe {
        layer_norm_backward_kernel::launch_unchecked(
            &client,
            count,
            dim,
            span.width,
            read,
            grads,
            gamma_arg,
            write,
            gamma_sums_arg,
            beta_sums_arg,
            from,
            grads_from,
            gamma_from,
            to,
            sums_to,
            groups,
            group_rows,
            RowsLaunch::new(rows, len / span.width, len as f32, epsilon),
            team,
            rounds_in_integers(&client, dtype),
            element(dtype),
        );
    }
    let [dgamma, dbeta] = column_sums(&client, &sums, &gamma, groups);
    [target, dgamma, dbeta]
}

/// Returns the sums of the columns of two f32 matrices with `groups` rows, as two tensors like `gamma`.
fn column_sums(
    client: &Client,
    sums: &[BufferSlice; 2],
    gamma: &CubeTensor,
    groups: usize,
) -> [CubeTensor; 2] {
    let (shape, dtype) = (gamma.shape(), gamma.dtype);
    let len = shape.num_elements();
    let targets = [(); 2].map(|()| empty(gamma, shape.clone(), dtype));
    let slices = targets.each_ref().map(BufferSlice::of);
    let span = row_span(client, &sums.each_ref(), &slices.each_ref(), groups * len, len);
    let columns_of_launch = len / span.width;
    let (lanes, columns) = if on_cpu(client) { (1, 1) } else { COLUMN_SUMS };
    let (count, dim) = if lanes == 1 {
        grid(client, columns_of_launch)
    } else {
        let dim = CubeDim::new_1d((lanes * columns) as u32);
        let threads = columns_of_launch.next_multiple_of(columns) * lanes;
        (cubecl::calculate_cube_count_elemwise(client, threads, dim), dim)
    };
    let [(gamma_sums, gamma_from), (beta_sums, beta_from)] =
        sums.each_ref().map(|slice| span.argument(slice));
    let [(gamma_grad, gamma_to), (beta_grad, beta_to)] =
        slices.each_ref().map(|slice| span.argument(slice));
    // SAFETY: `row_span` checked that the buffers hold the matrices and the sums; the kernel accesses
    // only these.
    unsafe {
        column_sums_kernel::launch_unchecked(
            client,
            count,
            dim,
            span.width,
            gamma_sums,
            beta_sums,
            gamma_grad,
            beta_grad,
            gamma_from,
            beta_from,
            gamma_to,
            beta_to,
            groups,
            columns_of_launch,
            lanes,
            columns,
            rounds_in_integers(client, dtype),
            element(dtype),
        );
    }
    targets
}
