//! The exact GELU, with one kernel for forward and one for backward.

use burn::tensor::Tensor;

use crate::backend::ops::gelu_tracked;

/// Applies the Gaussian error linear unit `x · Φ(x)`, where Φ is the standard normal distribution.
///
/// One kernel computes it, and one its gradient, for f32 tensors on Flex and for f32, bf16 and f16
/// tensors on CubeCL devices. Their errors are below 3e-7 · max(1, |x|), not counting the rounding
/// to the dtype. With Burn's fusion on, both are made of Burn's operations, and share a kernel with
/// the operations before and after it. For other dtypes and devices this function calls
/// [`burn::tensor::activation::gelu`].
///
/// Burn's GELU calls the C library's `erf` for each element on Flex, which took a seventh of a
/// training step of a BERT on two cores. On CubeCL devices its gradient is that of the tanh
/// approximation.
///
/// # Shapes
///
/// - input and output: any shape
pub fn gelu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    gelu_tracked(&x).unwrap_or_else(|| burn::tensor::activation::gelu(x))
}
