//! The exact GELU and its gradient, in one loop each.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use multiversion::multiversion;

use super::exp::exp_of_negative;
use super::float::slice;
use super::loops::{each, indexed};
use super::new_tensor::{Uninit, new_tensor};

/// Implements [`Kernels::gelu`](crate::Kernels::gelu), for f32.
pub(super) fn forward(x: &FlexTensor) -> FlexTensor {
    let x = x.to_contiguous();
    let input = slice::<f32>(&x);
    new_tensor(x.shape(), |at, output| forward_slice(&input[at..][..output.len()], output))
}

/// Implements [`Kernels::gelu_backward`](crate::Kernels::gelu_backward), for f32.
pub(super) fn backward(x: &FlexTensor, grad: &FlexTensor) -> FlexTensor {
    let (x, grad) = (x.to_contiguous(), grad.to_contiguous());
    let input = slice::<f32>(&x);
    let grad = slice::<f32>(&grad);
    new_tensor(x.shape(), |at, output| {
        let range = at..at + output.len();
        backward_slice(&input[range.clone()], &grad[range], output)
    })
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn forward_slice<'a>(input: &[f32], output: &'a mut Uninit<f32>) -> &'a mut [f32] {
    each(input, output, |x| x * normal(x).0)
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn backward_slice<'a>(input: &[f32], grad: &[f32], output: &'a mut Uninit<f32>) -> &'a mut [f32] {
    let grad = &grad[..input.len()];
    indexed(input, output, |at, x| {
        let (distribution, density) = normal(x);
        grad[at] * (distribution + x * density)
    })
}

/// Returns the distribution function Φ(x) and the density φ(x) of the standard normal distribution.
///
/// The approximation of erf has an error of at most 1.5e-7. Source: Abramowitz and Stegun,
/// *Handbook of Mathematical Functions*, formula 7.1.26.
#[inline(always)]
pub(super) fn normal(x: f32) -> (f32, f32) {
    let bell = exp_of_negative(-0.5 * x * x);
    let t = 1.0 / (1.0 + 0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2 * x.abs());
    let polynomial = -1.453_152 + t * 1.061_405_4;
    let polynomial = -0.284_496_74 + t * (1.421_413_8 + t * polynomial);
    let tail = 0.5 * t * (0.254_829_6 + t * polynomial) * bell;
    let distribution = if x < 0.0 { tail } else { 1.0 - tail };
    (distribution, 0.398_942_3 * bell)
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;

    use super::*;

    #[test]
    fn an_elements_value_does_not_depend_on_its_position() {
        let points: Vec<f32> = (-3000..=3000).map(|i| i as f32 * 0.005).collect();
        let mut whole = Vec::with_capacity(points.len());
        let whole = forward_slice(&points, &mut whole.spare_capacity_mut()[..points.len()]);
        for (index, &x) in points.iter().enumerate() {
            let mut one = [MaybeUninit::uninit()];
            let one = forward_slice(&[x], &mut one);
            assert_eq!(one[0].to_bits(), whole[index].to_bits());
        }
    }
}
