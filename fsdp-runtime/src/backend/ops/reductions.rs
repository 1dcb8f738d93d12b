//! Means of several tensors, and partial sums of norms.

use std::ops::Range;

use burn::tensor::{DType, Shape, Tensor};
use fsdp_kernels::{Kernels, Norm, RankMean, Sums};

use super::arguments::{check_device, check_range, give, give_one, take};
use super::error::KernelError;
use crate::backend::model_backend::{ModelBackend, Raw, with_backend};

/// Returns the elementwise mean of elements `range` of all parts, in f32.
///
/// The elements are added in f32 in the order of `parts`; the sum is divided by `divisor`, usually
/// the number of parts.
///
/// # Shapes
///
/// - parts: `[n_i]`, with `range.end <= n_i`, of one dtype
/// - output: `[range.len()]`, f32
///
/// # Errors
///
/// - [`KernelError::NoParts`] if there are no parts.
/// - [`KernelError::Range`] if the range exceeds a part.
/// - [`KernelError::SeveralDtypes`] if the parts differ in dtype.
/// - [`KernelError::OtherDevice`] if the parts are on several devices.
/// - [`KernelError::Dtype`] for dtypes other than f32, bf16 and f16.
/// - [`KernelError::Device`] if the device has no kernels.
pub fn mean(
    parts: &[Tensor<1>],
    range: Range<usize>,
    divisor: usize,
) -> Result<Tensor<1>, KernelError> {
    let first = parts.first().ok_or(KernelError::NoParts)?;
    for part in parts {
        check_range(&range, part.shape().num_elements())?;
        if part.dtype() != first.dtype() {
            return Err(KernelError::SeveralDtypes { first: first.dtype(), other: part.dtype() });
        }
    }
    check_device(&first.device(), parts)?;
    with_backend!(first.device(), |B, _device| {
        let parts = parts.iter().cloned().map(take::<B>).collect::<Result<Vec<_>, _>>()?;
        let shape = Shape::from([range.len()]);
        let output = (shape.clone(), DType::F32);
        let mean = move |parts: Vec<_>| {
            let parts = parts.into_iter().map(|part| (part, range.start)).collect();
            Raw::<B>::rank_means(vec![RankMean { parts, divisor, shape }])
        };
        Ok(give_one::<B>(B::defer(parts, vec![output], mean)))
    })
}

/// Returns for each tensor its partial sum for `norm` and its largest magnitude.
///
/// The norm over all tensors follows from the [`Sums::term`]s. No tensors give no sums.
///
/// # Shapes
///
/// - tensors: `[n_i]`
///
/// # Errors
///
/// - [`KernelError::OtherDevice`] if the tensors are on several devices.
/// - [`KernelError::Dtype`] for dtypes other than f32, bf16 and f16.
/// - [`KernelError::Device`] if the device has no kernels.
pub fn norm_sums(tensors: &[Tensor<1>], norm: Norm) -> Result<Vec<Sums>, KernelError> {
    let Some(first) = tensors.first() else { return Ok(Vec::new()) };
    check_device(&first.device(), tensors)?;
    with_backend!(first.device(), |B, _device| {
        let ranges = tensors.iter().map(|tensor| 0..tensor.shape().num_elements());
        let parts = tensors.iter().cloned().map(take::<B>).collect::<Result<Vec<_>, _>>()?;
        let parts: Vec<_> = B::lower(parts).into_iter().zip(ranges).collect();
        Ok(Raw::<B>::sums(&parts, norm))
    })
}

/// Multiplies tensors by `factor` and returns them with the [`norm_sums`] of the products, in one
/// pass.
///
/// Gradients of a scaled loss are unscaled, checked for infinite and NaN elements, and measured for
/// clipping by one call. Each tensor is multiplied in its own memory if no other tensor shares that
/// memory, else in a copy.
///
/// # Shapes
///
/// - tensors and outputs: `[n_i]`
///
/// # Errors
///
/// - [`KernelError::OtherDevice`] if the tensors are on several devices.
/// - [`KernelError::Dtype`] for dtypes other than f32, bf16 and f16.
/// - [`KernelError::Device`] if the device has no kernels.
pub fn unscale(
    tensors: Vec<Tensor<1>>,
    factor: f32,
    norm: Norm,
) -> Result<(Vec<Tensor<1>>, Vec<Sums>), KernelError> {
    let Some(first) = tensors.first() else { return Ok((tensors, Vec::new())) };
    check_device(&first.device(), &tensors)?;
    with_backend!(first.device(), |B, _device| {
        let tensors = tensors.into_iter().map(take::<B>).collect::<Result<Vec<_>, _>>()?;
        let (buffers, sums) = Raw::<B>::unscale(B::lower(tensors), factor, norm);
        Ok((buffers.into_iter().map(B::raise).map(give::<B>).collect(), sums))
    })
}
