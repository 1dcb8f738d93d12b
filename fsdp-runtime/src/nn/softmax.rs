//! The softmax, with one kernel for forward and one for backward.

use burn::tensor::{AsIndex, Tensor};

use crate::backend::ops::softmax_tracked;

/// Applies the softmax `exp(xᵢ) / Σⱼ exp(xⱼ)` along a dimension. Negative dimensions count from the end.
///
/// Along the last dimension one kernel computes it, and one its gradient, for f32 tensors on Flex and for
/// f32, bf16 and f16 tensors on CubeCL devices. The kernels subtract the largest element first and add
/// in f32. Where `xᵢ` is 87 or more below the largest element, the result is exactly 0: masked elements
/// may be negative infinity or any large negative number. A row whose largest element is infinite, and a
/// row with a NaN, is all NaN, as with Burn's.
///
/// For other dimensions, dtypes and devices, and for tensors without elements, this function calls
/// [`burn::tensor::activation::softmax`], which makes its gradient of about ten operations.
///
/// # Shapes
///
/// - input and output: any shape
///
/// # Panics
///
/// If the tensor has no dimension `dim`.
pub fn softmax<const D: usize>(x: Tensor<D>, dim: impl AsIndex) -> Tensor<D> {
    let is_last = dim.try_dim_index(D).is_ok_and(|dim| dim + 1 == D);
    let softmax = if is_last { softmax_tracked(&x) } else { None };
    softmax.unwrap_or_else(|| burn::tensor::activation::softmax(x, dim))
}
