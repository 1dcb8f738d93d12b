//! Layer norm, RMS norm and their gradients, in one pass over memory each, with or without a residual.
//!
//! Rows are converted to f32 one at a time. RMS norm is layer norm with the mean 0.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::TensorData;
use multiversion::multiversion;

use super::float::{KernelFloat, slice, with_float_type};
use super::loops::indexed;
use super::new_tensor::{Uninit, new_tensor_in_parts, new_tensors_in_parts};
use super::rows::{pair_sum_of, row_len, row_sum, row_sum_of, task_len};
use crate::normalization::{
    NormalizationGrads, NormalizationRule, NormalizationTensors, Normalized,
};

/// Implements [`Kernels::normalize`](crate::Kernels::normalize).
pub(super) fn forward(
    tensors: &NormalizationTensors<FlexTensor>,
    rule: &NormalizationRule,
) -> Normalized<FlexTensor> {
    with_float_type!(tensors.input.dtype(), |E| forward_of::<E>(tensors, rule))
}

/// Implements [`Kernels::normalize_backward`](crate::Kernels::normalize_backward).
///
/// The gradients of `gamma` and `beta` are sums over rows. Each task adds its rows in order, and the
/// tasks' sums are added in order.
pub(super) fn backward(
    tensors: &NormalizationGrads<FlexTensor>,
    rule: &NormalizationRule,
) -> Vec<FlexTensor> {
    with_float_type!(tensors.input.dtype(), |E| backward_of::<E>(tensors, rule))
}

fn forward_of<E: KernelFloat>(
    tensors: &NormalizationTensors<FlexTensor>,
    rule: &NormalizationRule,
) -> Normalized<FlexTensor> {
    let x = tensors.input.to_contiguous();
    let gamma = wide_row::<E>(&tensors.gamma);
    let beta = tensors.beta.as_ref().map(wide_row::<E>);
    let (input, shape, part_len) = (slice::<E>(&x), x.shape(), task_len(gamma.len()));
    let beta = beta.as_deref();
    let Some(residual) = tensors.residual.as_ref().map(FlexTensor::to_contiguous) else {
        let (output, _) = new_tensor_in_parts(shape, part_len, |at, output| {
            (forward_rows(&input[at..], &gamma, beta, output, rule), ())
        });
        return Normalized { output, sum: None };
    };
    let residual = slice::<E>(&residual);
    let ([output, sum], _) = new_tensors_in_parts(shape, part_len, |at, [output, sum]| {
        let range = at..at + sum.len();
        let sum = add(&input[range.clone()], &residual[range], sum);
        let output = forward_rows(sum, &gamma, beta, output, rule);
        ([output, sum], ())
    });
    Normalized { output, sum: Some(sum) }
}

fn backward_of<E: KernelFloat>(
    tensors: &NormalizationGrads<FlexTensor>,
    rule: &NormalizationRule,
) -> Vec<FlexTensor> {
    let (x, grad) = (tensors.input.to_contiguous(), tensors.grad.to_contiguous());
    let sum_grad = tensors.sum_grad.as_ref().map(FlexTensor::to_contiguous);
    let (input, grads) = (slice::<E>(&x), slice::<E>(&grad));
    let sum_grads = sum_grad.as_ref().map(slice::<E>);
    let (gamma, len) = (wide_row::<E>(&tensors.gamma), row_len(&x));
    let (dx, mut sums) = new_tensor_in_parts(x.shape(), task_len(len), |at, output| {
        let rows = GradRows {
            input: &input[at..],
            grads: &grads[at..],
            sum_grads: sum_grads.map(|grads| &grads[at..]),
            gamma: &gamma,
        };
        let mut sums = vec![vec![0f32; len]; if rule.centered { 2 } else { 1 }];
        (backward_rows(&rows, output, &mut sums, rule), sums)
    });
    let mut total = sums.remove(0);
    for sums in sums {
        for (total, sums) in total.iter_mut().zip(sums) {
            total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
        }
    }
    let of_param = |sums: Vec<f32>| {
        let sums: Vec<E> = sums.into_iter().map(E::narrow).collect();
        FlexTensor::from_data(TensorData::new(sums, tensors.gamma.shape()))
    };
    std::iter::once(dx).chain(total.into_iter().map(of_param)).collect()
}

/// Returns the elements of a parameter in f32.
fn wide_row<E: KernelFloat>(tensor: &FlexTensor) -> Vec<f32> {
    slice::<E>(&tensor.to_contiguous()).iter().map(|x| x.wide()).collect()
}

/// Returns a row's mean, or 0 if rows are not centered, and 1 / √(variance + epsilon).
#[inline(always)]
fn moments(row: &[f32], rule: &NormalizationRule) -> (f32, f32) {
    let len = row.len() as f32;
    let mean = if rule.centered { row_sum(row) / len } else { 0.0 };
    let squares = row_sum_of(row, |x| (x - mean) * (x - mean));
    (mean, 1.0 / (squares / len + rule.epsilon).sqrt())
}

/// Adds elements in f32 and rounds the sums.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn add<'a, E: KernelFloat>(a: &[E], b: &[E], sum: &'a mut Uninit<E>) -> &'a mut [E] {
    let b = &b[..a.len()];
    indexed(a, sum, |at, a| E::narrow(a.wide() + b[at].wide()))
}

/// Normalizes the rows at the start of `input`, as many as `output` has.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn forward_rows<'a, E: KernelFloat>(
    input: &[E],
    gamma: &[f32],
    beta: Option<&[f32]>,
    output: &'a mut Uninit<E>,
    rule: &NormalizationRule,
) -> &'a mut [E] {
    let len = gamma.len();
    let mut scratch = vec![0f32; len];
    for (x, y) in input.chunks_exact(len).zip(output.chunks_exact_mut(len)) {
        let x = E::widened(x, &mut scratch);
        let (mean, scale) = moments(x, rule);
        match beta {
            None => indexed(x, y, |at, x| E::narrow((x - mean) * scale * gamma[at])),
            Some(beta) => {
                let beta = &beta[..len];
                indexed(x, y, |at, x| E::narrow((x - mean) * scale * gamma[at] + beta[at]))
            }
        };
    }
    // SAFETY: `indexed` wrote every element of each row, and `output` consists of rows.
    unsafe { output.assume_init_mut() }
}

/// Rows from which gradients are computed, from the first row of a task on, and gamma.
struct GradRows<'a, E> {
    input: &'a [E],
    grads: &'a [E],
    sum_grads: Option<&'a [E]>,
    gamma: &'a [f32],
}

/// Writes the gradients of the rows at the start of the input, as many as `output` has, and adds the
/// rows' terms to the sums for gamma and, if there are some, for beta.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn backward_rows<'a, E: KernelFloat>(
    rows: &GradRows<'_, E>,
    output: &'a mut Uninit<E>,
    sums: &mut [Vec<f32>],
    rule: &NormalizationRule,
) -> &'a mut [E] {
    let len = rows.gamma.len();
    let mut scratch = vec![0f32; 3 * len];
    let (x_scratch, scratch) = scratch.split_at_mut(len);
    let (grad_scratch, scaled) = scratch.split_at_mut(len);
    for (row, output) in output.chunks_exact_mut(len).enumerate() {
        let range = row * len..(row + 1) * len;
        let x = &E::widened(&rows.input[range.clone()], x_scratch)[..len];
        let grad = &E::widened(&rows.grads[range.clone()], grad_scratch)[..len];
        let (mean, scale) = moments(x, rule);
        for at in 0..len {
            scaled[at] = grad[at] * rows.gamma[at];
        }
        let mean_grad = if rule.centered { row_sum(scaled) / len as f32 } else { 0.0 };
        let slope = pair_sum_of(scaled, x, |grad, x| grad * ((x - mean) * scale)) / len as f32;
        let gradient =
            |at: usize, grad: f32| scale * (grad - mean_grad - (x[at] - mean) * scale * slope);
        match rows.sum_grads {
            None => indexed(scaled, output, |at, grad| E::narrow(gradient(at, grad))),
            Some(more) => {
                let more = &more[range][..len];
                indexed(scaled, output, |at, grad| E::narrow(gradient(at, grad) + more[at].wide()))
            }
        };
        add_products(&mut sums[0], grad, |at| (x[at] - mean) * scale);
        if let Some(beta_sums) = sums.get_mut(1) {
            add_products(beta_sums, grad, |_| 1.0);
        }
    }
    // SAFETY: `indexed` wrote every element of each row, and `output` consists of rows.
    unsafe { output.assume_init_mut() }
}

/// Adds the products of elements and factors to sums.
#[inline(always)]
fn add_products(sums: &mut [f32], elements: &[f32], factor: impl Fn(usize) -> f32) {
    let len = elements.len();
    let sums = &mut sums[..len];
    for at in 0..len {
        sums[at] += elements[at] * factor(at);
    }
}
