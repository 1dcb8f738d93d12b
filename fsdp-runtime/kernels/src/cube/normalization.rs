//! Layer norm and RMS norm in one kernel, and their gradients in three: that of the input, sums for the
//! parameters over groups of rows, and the sums of these.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::device::{on_cpu, rounds_in_integers};
use super::normalization_kernels::{
    RowsLaunch, column_sums_kernel, normalize_backward_kernel, normalize_kernel, param_sums_kernel,
};
use super::rows::Team;
use super::span::{Span, grid, row_span};
use super::tensors::{contiguous, element, empty};
use crate::normalization::{
    NormalizationGrads, NormalizationRule, NormalizationTensors, Normalized,
};

/// Largest number of groups of rows, on a CPU and on other devices. A thread sums up a vector of columns in
/// a group, and the column sums add the sums of all groups.
const MAX_GROUPS: [usize; 2] = [64, 512];
/// Threads that share a column in the column sums, and columns of a cube, on devices other than CPUs.
const COLUMN_SUMS: (usize, usize) = (16, 16);

/// Returns slices as the arguments of a sequence, and the index of each one's first vector.
fn arguments<'a, S, I>(span: &Span, slices: impl IntoIterator<Item = &'a BufferSlice>) -> (S, I)
where
    S: FromIterator<BufferArg>,
    I: FromIterator<usize>,
{
    let (buffers, firsts): (Vec<_>, Vec<_>) =
        slices.into_iter().map(|slice| span.argument(slice)).unzip();
    (buffers.into_iter().collect(), firsts.into_iter().collect())
}

/// Returns the number of elements of a tensor, and that of its rows.
fn sizes(tensor: &CubeTensor) -> (usize, usize) {
    (tensor.shape().num_elements(), tensor.shape()[tensor.rank() - 1])
}

/// Returns the slices of tensors.
fn slices_of<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) -> Vec<BufferSlice> {
    tensors.into_iter().map(BufferSlice::of).collect()
}

/// Implements [`Kernels::normalize`](crate::Kernels::normalize).
pub(super) fn forward(
    tensors: NormalizationTensors<CubeTensor>,
    rule: &NormalizationRule,
) -> Normalized<CubeTensor> {
    let NormalizationTensors { input, residual, gamma, beta } = tensors;
    let (tensor, residual) = (contiguous(input), residual.map(contiguous));
    let params: Vec<_> = std::iter::once(gamma).chain(beta).map(contiguous).collect();
    let new = || empty(&tensor, tensor.shape(), tensor.dtype);
    let (target, sum) = (new(), residual.as_ref().map(|_| new()));
    let client = tensor.client.clone();
    let slices = [&tensor, &target].map(BufferSlice::of);
    let (residuals, sums) = (slices_of(&residual), slices_of(&sum));
    let params = slices_of(&params);
    let (numel, len) = sizes(&tensor);
    let wide: Vec<_> = slices.iter().chain(&residuals).chain(&sums).collect();
    let span = row_span(&client, &wide, &params.iter().collect::<Vec<_>>(), numel, len);
    let (team, rows) = (Team::new(&client, len, span.width), numel / len);
    let (count, dim) = team.grid(&client, rows);
    let [(read, from), (write, to)] = slices.each_ref().map(|slice| span.argument(slice));
    let (residuals, residual_firsts) = arguments(&span, &residuals);
    let (params, param_firsts) = arguments(&span, &params);
    let (sums, sum_firsts) = arguments(&span, &sums);
    // SAFETY: `row_span` checked that the buffers hold the rows and the parameters; the kernel
    // accesses only these.
    unsafe {
        normalize_kernel::launch_unchecked(
            &client,
            count,
            dim,
            span.width,
            read,
            residuals,
            params,
            write,
            sums,
            from,
            residual_firsts,
            param_firsts,
            to,
            sum_firsts,
            RowsLaunch::new(rows, len / span.width, len as f32, rule.epsilon, 0),
            rule.centered,
            team,
            rounds_in_integers(&client, tensor.dtype),
            element(tensor.dtype),
        );
    }
    Normalized { output: target, sum }
}

/// Implements [`Kernels::normalize_backward`](crate::Kernels::normalize_backward).
pub(super) fn backward(
    tensors: NormalizationGrads<CubeTensor>,
    rule: &NormalizationRule,
) -> Vec<CubeTensor> {
    let NormalizationGrads { input, gamma, grad, sum_grad } = tensors;
    let (tensor, gamma, grad) = (contiguous(input), contiguous(gamma), contiguous(grad));
    let sum_grad = sum_grad.map(contiguous);
    let (client, dtype) = (tensor.client.clone(), tensor.dtype);
    let (numel, len) = sizes(&tensor);
    let rows = numel / len;

    let target = empty(&tensor, tensor.shape(), dtype);
    let moments = empty(&tensor, Shape::from([2 * rows]), DType::F32);
    let slices = [&tensor, &grad, &target].map(BufferSlice::of);
    let (sum_grads, moments) = (slices_of(&sum_grad), BufferSlice::of(&moments));
    let weight = BufferSlice::of(&gamma);
    let wide: Vec<_> = slices.iter().chain(&sum_grads).collect();
    let span = row_span(&client, &wide, &[&weight], numel, len);
    let team = Team::new(&client, len, span.width);
    let (count, dim) = team.grid(&client, rows);
    let [(read, from), (grads, grads_from), (write, to)] =
        slices.each_ref().map(|slice| span.argument(slice));
    let (gamma_arg, gamma_from) = span.argument(&weight);
    let (sum_grads, sum_grad_firsts) = arguments(&span, &sum_grads);
    // SAFETY: `row_span` checked that the buffers hold the rows and gamma, and `moments` has two numbers
    // for each row; the kernel accesses only these.
    unsafe {
        normalize_backward_kernel::launch_unchecked(
            &client,
            count,
            dim,
            span.width,
            read,
            grads,
            sum_grads,
            gamma_arg,
            write,
            moments.buffer_arg(),
            from,
            grads_from,
            sum_grad_firsts,
            gamma_from,
            to,
            moments.start,
            RowsLaunch::new(rows, len / span.width, len as f32, rule.epsilon, 0),
            rule.centered,
            team,
            rounds_in_integers(&client, dtype),
            element(dtype),
        );
    }
    let [input, grad, _] = &slices;
    let of_params = param_gradients(&client, [input, grad, &moments], &gamma, rule);
    std::iter::once(target).chain(of_params).collect()
}

/// Returns the gradients of gamma and, if rows are centered, of beta, from the input's rows, the gradients
/// of the results, and the moments of the rows.
fn param_gradients(
    client: &Client,
    [source, grads, moments]: [&BufferSlice; 3],
    gamma: &CubeTensor,
    rule: &NormalizationRule,
) -> Vec<CubeTensor> {
    let (len, rows) = (gamma.shape().num_elements(), moments.len() / 2);
    let max_groups = MAX_GROUPS[usize::from(!on_cpu(client))];
    let group_rows = rows.div_ceil(max_groups);
    let groups = rows.div_ceil(group_rows);
    let params = if rule.centered { 2 } else { 1 };
    let sums: Vec<_> =
        (0..params).map(|_| empty(gamma, Shape::from([groups, len]), DType::F32)).collect();
    let sums = slices_of(&sums);
    let small: Vec<_> = sums.iter().collect();
    let span = row_span(client, &[source, grads], &small, rows * len, len);
    let count = len / span.width;
    let (cubes, dim) = grid(client, groups * count);
    let [(read, from), (grads_arg, grads_from)] = [source, grads].map(|it| span.argument(it));
    let (sums_arg, sums_firsts) = arguments(&span, &sums);
    // SAFETY: `row_span` checked that the buffers hold the rows, the sums have a row for each group, and
    // there are two moments for each row; the kernel accesses only these.
    unsafe {
        param_sums_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            span.width,
            read,
            grads_arg,
            moments.buffer_arg(),
            sums_arg,
            from,
            grads_from,
            moments.start,
            sums_firsts,
            groups,
            group_rows,
            RowsLaunch::new(rows, count, len as f32, rule.epsilon, 0),
            element(source.dtype),
        );
    }
    column_sums(client, &sums, gamma, groups)
}

/// Returns the sums of the columns of f32 matrices with `groups` rows, as tensors like `gamma`.
fn column_sums(
    client: &Client,
    sums: &[BufferSlice],
    gamma: &CubeTensor,
    groups: usize,
) -> Vec<CubeTensor> {
    let (shape, dtype) = (gamma.shape(), gamma.dtype);
    let len = shape.num_elements();
    let targets: Vec<_> = sums.iter().map(|_| empty(gamma, shape.clone(), dtype)).collect();
    let slices = slices_of(&targets);
    let wide: Vec<_> = sums.iter().collect();
    let span = row_span(client, &wide, &slices.iter().collect::<Vec<_>>(), groups * len, len);
    let columns_of_launch = len / span.width;
    let (lanes, columns) = if on_cpu(client) { (1, 1) } else { COLUMN_SUMS };
    let (count, dim) = if lanes == 1 {
        grid(client, columns_of_launch)
    } else {
        let dim = CubeDim::new_1d((lanes * columns) as u32);
        let threads = columns_of_launch.next_multiple_of(columns) * lanes;
        (cubecl::calculate_cube_count_elemwise(client, threads, dim), dim)
    };
    let (sums, sums_firsts) = arguments(&span, sums);
    let (grads, grads_firsts) = arguments(&span, &slices);
    // SAFETY: `row_span` checked that the buffers hold the matrices and the sums; the kernel accesses
    // only these.
    unsafe {
        column_sums_kernel::launch_unchecked(
            client,
            count,
            dim,
            span.width,
            sums,
            grads,
            sums_firsts,
            grads_firsts,
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
