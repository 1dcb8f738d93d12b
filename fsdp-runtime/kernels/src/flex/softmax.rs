//! The softmax of rows and its gradient, in one pass over memory each.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use multiversion::multiversion;

use super::exp::{LEAST, exp_of_negative};
use super::float::slice;
use super::loops::{each, indexed};
use super::new_tensor::{Uninit, new_tensor_in_parts};
use super::rows::{pair_sum_of, row_len, row_max, row_sum, task_len};

/// Implements [`Kernels::softmax`](crate::Kernels::softmax), for f32.
pub(super) fn forward(x: &FlexTensor) -> FlexTensor {
    let x = x.to_contiguous();
    let (input, len) = (slice::<f32>(&x), row_len(&x));
    new_tensor_in_parts(x.shape(), task_len(len), |at, output| {
        (forward_rows(&input[at..], output, len), ())
    })
    .0
}

/// Implements [`Kernels::softmax_backward`](crate::Kernels::softmax_backward), for
/// f32.
pub(super) fn backward(y: &FlexTensor, grad: &FlexTensor) -> FlexTensor {
    let (y, grad) = (y.to_contiguous(), grad.to_contiguous());
    let (result, len) = (slice::<f32>(&y), row_len(&y));
    let grad = slice::<f32>(&grad);
    new_tensor_in_parts(y.shape(), task_len(len), |at, output| {
        (backward_rows(&result[at..], &grad[at..], output, len), ())
    })
    .0
}

/// Writes the softmax of the rows at the start of `input`, as many as `output` has.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn forward_rows<'a>(input: &[f32], output: &'a mut Uninit<f32>, len: usize) -> &'a mut [f32] {
    for (x, y) in input.chunks_exact(len).zip(output.chunks_exact_mut(len)) {
        let top = row_max(x);
        let y = each(x, y, |x| exp_or_zero(x - top));
        let scale = 1.0 / row_sum(y);
        y.iter_mut().for_each(|y| *y *= scale);
    }
    // SAFETY: `each` wrote every element of each row, and `output` consists of rows.
    unsafe { output.assume_init_mut() }
}

/// Writes the gradients of the rows at the start of `result`, as many as `output` has.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn backward_rows<'a>(
    result: &[f32],
    grad: &[f32],
    output: &'a mut Uninit<f32>,
    len: usize,
) -> &'a mut [f32] {
    let rows = result.chunks_exact(len).zip(grad.chunks_exact(len));
    for ((y, grad), output) in rows.zip(output.chunks_exact_mut(len)) {
        let mean = pair_sum_of(y, grad, |y, grad| y * grad);
        indexed(y, output, |at, y| y * (grad[at] - mean));
    }
    // SAFETY: `indexed` wrote every element of each row, and `output` consists of rows.
    unsafe { output.assume_init_mut() }
}

/// Returns eˣ for x ≤ 0, and exactly 0 where it is below the normal numbers.
#[inline(always)]
fn exp_or_zero(x: f32) -> f32 {
    let power = exp_of_negative(x);
    if x < LEAST { 0.0 } else { power }
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;

    use super::*;

    fn softmax(x: &[f32]) -> Vec<f32> {
        let mut y = vec![MaybeUninit::uninit(); x.len()];
        forward_rows(x, &mut y, x.len()).to_vec()
    }

    #[test]
    fn masked_elements_are_exactly_zero() {
        for masked in [f32::NEG_INFINITY, -1e9, f32::MIN, -88.0] {
            assert_eq!(softmax(&[0.0, masked, 0.0, masked]), [0.5, 0.0, 0.5, 0.0]);
        }
    }

    #[test]
    fn a_row_without_a_softmax_is_nan() {
        let infinite = [f32::NEG_INFINITY; 20];
        let mut one_nan = [1.0; 20];
        one_nan[17] = f32::NAN;
        let mut one_infinite = [1.0; 20];
        one_infinite[3] = f32::INFINITY;
        for row in [infinite, one_nan, one_infinite] {
            assert!(softmax(&row).iter().all(|y| y.is_nan()), "{row:?}");
        }
    }
}
