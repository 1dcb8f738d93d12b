//! Casts, and copies into and out of flat buffers.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::tensor::{FloatDType, Shape, Tensor};
use fsdp_kernels::Kernels;

use super::arguments::{check_device, check_dtype, check_range, give, give_one, take};
use super::error::KernelError;
use crate::backend::model_backend::{ModelBackend, Raw, with_backend};

/// Copies tensors into `buffer`, rounded to the buffer's dtype, and returns the buffer.
///
/// A part is a tensor and the offset in the buffer of its first element. Elements of the buffer
/// that belong to no part are unchanged. The buffer is written in its own memory if no other tensor
/// shares that memory, else in a copy. On CubeCL devices up to 16 parts share a kernel launch.
///
/// # Shapes
///
/// - parts: `[n_i]`, with `offset_i + n_i <= n`
/// - buffer and output: `[n]`
///
/// # Errors
///
/// - [`KernelError::Range`] if a part exceeds the buffer.
/// - [`KernelError::Overlap`] if parts overlap in the buffer.
/// - [`KernelError::OtherDevice`] if a part is on another device than the buffer.
/// - [`KernelError::Dtype`] for dtypes other than f32, bf16 and f16.
/// - [`KernelError::Device`] if the device has no kernels.
pub fn pack(parts: Vec<(Tensor<1>, usize)>, buffer: Tensor<1>) -> Result<Tensor<1>, KernelError> {
    let len = buffer.shape().num_elements();
    let mut ranges = Vec::new();
    for (tensor, at) in &parts {
        let range = *at..at + tensor.shape().num_elements();
        check_range(&range, len)?;
        ranges.push(range);
    }
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| range.start);
    if let Some(pair) = ranges.windows(2).find(|pair| pair[0].end > pair[1].start) {
        return Err(KernelError::Overlap { first: pair[0].clone(), second: pair[1].clone() });
    }
    check_device(&buffer.device(), parts.iter().map(|(tensor, _)| tensor))?;
    with_backend!(buffer.device(), |B, _device| {
        let (tensors, offsets): (Vec<_>, Vec<usize>) = parts.into_iter().unzip();
        let buffer = take::<B>(buffer)?;
        let output = (buffer.shape(), buffer.dtype());
        let tensors = tensors.into_iter().map(take::<B>).chain([Ok(buffer)]);
        let tensors = tensors.collect::<Result<Vec<_>, KernelError>>()?;
        let pack = move |mut buffers: Vec<_>| {
            let buffer = buffers.pop().expect("the buffer is the last input");
            vec![Raw::<B>::pack(buffers.into_iter().zip(offsets).collect(), buffer)]
        };
        Ok(give_one::<B>(B::defer(tensors, vec![output], pack)))
    })
}

/// Copies ranges of `buffer` to new tensors of dtype `dtype`.
///
/// If there is a `divisor`, each element is divided by it in f32; then it is rounded to `dtype`. On
/// CubeCL devices up to 16 ranges share a kernel launch.
///
/// # Shapes
///
/// - buffer: `[n]`
/// - outputs: `[ranges[i].len()]`
///
/// # Errors
///
/// - [`KernelError::Range`] if a range exceeds the buffer.
/// - [`KernelError::Dtype`] if the buffer's dtype is none of f32, bf16 and f16, or the device does
///   not support `dtype`.
/// - [`KernelError::Device`] if the device has no kernels.
pub fn unpack(
    buffer: Tensor<1>,
    ranges: &[Range<usize>],
    dtype: FloatDType,
    divisor: Option<f32>,
) -> Result<Vec<Tensor<1>>, KernelError> {
    let len = buffer.shape().num_elements();
    ranges.iter().try_for_each(|range| check_range(range, len))?;
    let part = |range: &Range<usize>| (range.start, Shape::from([range.len()]));
    let parts: Vec<(usize, Shape)> = ranges.iter().map(part).collect();
    with_backend!(buffer.device(), |B, device| {
        check_dtype::<B>(&device, dtype.into())?;
        let outputs = parts.iter().map(|(_, shape)| (shape.clone(), dtype.into())).collect();
        let unpack = move |buffers: Vec<_>| {
            let buffer = buffers.into_iter().next().expect("there is one input");
            Raw::<B>::unpack(buffer, parts, dtype.into(), divisor)
        };
        let parts = B::defer(vec![take::<B>(buffer)?], outputs, unpack);
        Ok(parts.into_iter().map(give::<B>).collect())
    })
}

/// Copies a tensor to dtype `dtype`.
///
/// If there is a `divisor`, each element is divided by it in f32; then it is rounded to `dtype`, to
/// the nearest value, ties to even.
///
/// # Shapes
///
/// - input and output: `[n]`
///
/// # Errors
///
/// - [`KernelError::Dtype`] if the tensor's dtype is none of f32, bf16 and f16, or the device does
///   not support `dtype`.
/// - [`KernelError::Device`] if the device has no kernels.
pub fn cast(
    tensor: Tensor<1>,
    dtype: FloatDType,
    divisor: Option<f32>,
) -> Result<Tensor<1>, KernelError> {
    with_backend!(tensor.device(), |B, device| {
        check_dtype::<B>(&device, dtype.into())?;
        let cast = move |buffer| Raw::<B>::cast(buffer, dtype.into(), divisor);
        Ok(give::<B>(B::defer_one(take::<B>(tensor)?, dtype.into(), cast)))
    })
}
