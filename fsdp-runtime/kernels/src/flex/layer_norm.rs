//! Layer normalization and its gradients, in one pass over memory each.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::TensorData;
use multiversion::multiversion;

use super::float::slice;
use super::loops::indexed;
use super::new_tensor::{Uninit, new_tensor_in_parts};
use super::rows::{pair_sum_of, row_len, row_sum, row_sum_of, task_len};

/// Implements [`Kernels::layer_norm`](crate::Kernels::layer_norm), for f32.
pub(super) fn forward(
    x: &FlexTensor,
    gamma: &FlexTensor,
    beta: Option<&FlexTensor>,
    epsilon: f32,
) -> FlexTensor {
    let (x, gamma, beta) =
        (x.to_contiguous(), gamma.to_contiguous(), beta.map(FlexTensor::to_contiguous));
    let (input, gamma, beta) = (slice(&x), slice(&gamma), beta.as_ref().map(slice));
    new_tensor_in_parts(x.shape(), task_len(row_len(&x)), |at, output| {
        (forward_rows(&input[at..], gamma, beta, output, epsilon), ())
    })
    .0
}

/// Implements
/// [`Kernels::layer_norm_backward`](crate::Kernels::layer_norm_backward), for f32.
///
/// The gradients of `gamma` and `beta` are sums over rows. Each task adds its rows in order, and the
/// tasks' sums are added in order.
pub(super) fn backward(
    x: &FlexTensor,
    gamma: &FlexTensor,
    grad: &FlexTensor,
    epsilon: f32,
) -> [FlexTensor; 3] {
    let (x, gamma, grad) = (x.to_contiguous(), gamma.to_contiguous(), grad.to_contiguous());
    let (input, weight, grads, len) = (slice(&x), slice(&gamma), slice(&grad), row_len(&x));
    let (dx, mut sums) = new_tensor_in_parts(x.shape(), task_len(len), |at, output| {
        let mut sums = [vec![0f32; len], vec![0f32; len]];
        let output =
            backward_rows([&input[at..], &grads[at..]], weight, output, &mut sums, epsilon);
        (output, sums)
    });
    let mut total = sums.remove(0);
    for sums in sums {
        for (total, sums) in total.iter_mut().zip(sums) {
            total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
        }
    }
    let [dgamma, dbeta] =
        total.map(|sums| FlexTensor::from_data(TensorData::new(sums, gamma.shape())));
    [dx, dgamma, dbeta]
}

/// Returns a row's mean, and 1 / √(variance + epsilon).
#[inline(always)]
fn moments(row: &[f32], epsilon: f32) -> (f32, f32) {
    let len = row.len() as f32;
    let mean = row_sum(row) / len;
    let squares = row_sum_of(row, |x| (x - mean) * (x - mean));
    (mean, 1.0 / (squares / len + epsilon).sqrt())
}

/// Normalises the rows at the start of `input`, as many as `output` has.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn forward_rows<'a>(
    input: &[f32],
    gamma: &[f32],
    beta: Option<&[f32]>,
    output: &'a mut Uninit<f32>,
    epsilon: f32,
) -> &'a mut [f32] {
    let len = gamma.len();
    for (x, y) in input.chunks_exact(len).zip(output.chunks_exact_mut(len)) {
        let (mean, scale) = moments(x, epsilon);
        match beta {
            None => indexed(x, y, |at, x| (x - mean) * scale * gamma[at]),
            Some(beta) => {
                let beta = &beta[..len];
                indexed(x, y, |at, x| (x - mean) * scale * gamma[at] + beta[at])
            }
        };
    }
    // SAFETY: `indexed` wrote every element of each row, and `output` consists of rows.
    unsafe { output.assume_init_mut() }
}

/// Writes the gradients of the rows at the start of `input`, as many as `output` has, and adds the
/// rows' terms to the sums for `gamma` and `beta`.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn backward_rows<'a>(
    [input, grads]: [&[f32]; 2],
    gamma: &[f32],
    output: &'a mut Uninit<f32>,
    [gamma_sums, beta_sums]: &mut [Vec<f32>; 2],
    epsilon: f32,
) -> &'a mut [f32] {
    let len = gamma.len();
    let (gamma_sums, beta_sums) = (&mut gamma_sums[..len], &mut beta_sums[..len]);
    let rows = input.chunks_exact(len).zip(grads.chunks_exact(len));
    for ((x, grad), output) in rows.zip(output.chunks_exact_mut(len)) {
        let (mean, scale) = moments(x, epsilon);
        let scaled = indexed(grad, output, |at, grad| grad * gamma[at]);
        let mean_grad = row_sum(scaled) / len as f32;
        let slope = pair_sum_of(scaled, x, |grad, x| grad * ((x - mean) * scale)) / len as f32;
        for at in 0..len {
            let normal = (x[at] - mean) * scale;
            scaled[at] = scale * (scaled[at] - mean_grad - normal * slope);
            gamma_sums[at] += grad[at] * normal;
            beta_sums[at] += grad[at];
        }
    }
    // SAFETY: `indexed` wrote every element of each row, and `output` consists of rows.
    unsafe { output.assume_init_mut() }
}
