//! The kernels of sharded training: casts into and out of flat buffers, means of ranks' gradients,
//! norms, dropout masks and optimizer steps, each one pass over memory.
//!
//! Each exists twice, behind one signature: as a CubeCL kernel for CubeCL devices (`cube`), and as
//! vectorised loops over all threads for Flex (`flex`), its twin. What is made of integers, copied or
//! rounded once is the same on both to the bit, and so is what is made of sums and products rounded
//! one by one, on devices whose division and square root round correctly; sums of many elements are
//! within 1e-5 of the exact ones.
//!
//! The functions here take flat Burn tensors of any float dtype of [f32, bf16, f16], on any device
//! sharding works on, and check what they are given. The optimizers' kernels are behind
//! [`optim`](crate::optim), the masks' behind [`nn::Dropout`](crate::nn::Dropout).

mod dropout;
mod error;

use std::ops::Range;

use burn::backend::Backend;
use burn::tensor::{DType, Device, FloatDType, Shape, Tensor};

pub use self::dropout::dropout;
pub(crate) use self::dropout::dropout_tracked;
pub use self::error::KernelError;
pub use super::Norm;
use super::kernels::{Kernels, takes};
pub use super::kernels::{MaskSource, Sums, computes};
use super::{Float, ShardBackend, Value, with_backend};

/// A flat tensor taken apart for backend `B`, without autodiff.
fn take<B: ShardBackend>(tensor: Tensor<1>) -> Result<Float<B>, KernelError> {
    let dtype = tensor.dtype();
    if !takes(dtype) {
        return Err(KernelError::Dtype { dtype, device: format!("{:?}", tensor.device()) });
    }
    let device = tensor.device();
    let value = B::from_dispatch(tensor.into_dispatch());
    let other = || KernelError::OtherDevice { device: format!("{device:?}") };
    Ok(value.ok_or_else(other)?.into_inner())
}

fn give<B: ShardBackend>(tensor: Float<B>) -> Tensor<1> {
    Tensor::from_dispatch(B::into_dispatch(Value::Plain(tensor)))
}

/// That the device stores and computes the dtype.
fn check_dtype<B: Backend>(device: &B::Device, dtype: DType) -> Result<(), KernelError> {
    if takes(dtype) && B::supports_dtype(device, dtype) {
        return Ok(());
    }
    Err(KernelError::Dtype { dtype, device: format!("{device:?}") })
}

/// That tensors lie on one device.
fn check_device<'a>(
    device: &Device,
    tensors: impl IntoIterator<Item = &'a Tensor<1>>,
) -> Result<(), KernelError> {
    let other = tensors.into_iter().map(Tensor::device).find(|other| other != device);
    other.map_or(Ok(()), |other| Err(KernelError::OtherDevice { device: format!("{other:?}") }))
}

/// That a range lies within a tensor.
fn check_range(range: &Range<usize>, len: usize) -> Result<(), KernelError> {
    if range.start <= range.end && range.end <= len {
        return Ok(());
    }
    Err(KernelError::Range { range: range.clone(), len })
}

/// Copies `parts` into `buffer`, each from its offset in elements on, rounded to the buffer's dtype.
/// The rest of the buffer stays as it is. It is written in its own memory where no other tensor
/// shares it. Parts share launches.
///
/// # Errors
///
/// [`KernelError`] for parts that overlap or reach beyond the buffer, on another device, or of a dtype
/// other than f32, bf16 and f16.
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
        let parts = parts.into_iter().map(|(tensor, at)| Ok((take::<B>(tensor)?, at)));
        let parts = parts.collect::<Result<_, KernelError>>()?;
        Ok(give::<B>(B::pack(parts, take::<B>(buffer)?)))
    })
}

/// Copies ranges of `buffer`, in elements, to tensors of their own, divided by `divisor` in f32 if
/// given, rounded to `dtype`. Parts share launches.
///
/// # Errors
///
/// [`KernelError`] for ranges that reach beyond the buffer and dtypes the device does not compute.
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
        let parts = B::unpack(take::<B>(buffer)?, parts, dtype.into(), divisor);
        Ok(parts.into_iter().map(give::<B>).collect())
    })
}

/// A copy of the tensor, divided by `divisor` in f32 if given, rounded to `dtype`.
///
/// # Errors
///
/// [`KernelError`] for dtypes the device does not compute.
pub fn cast(
    tensor: Tensor<1>,
    dtype: FloatDType,
    divisor: Option<f32>,
) -> Result<Tensor<1>, KernelError> {
    with_backend!(tensor.device(), |B, device| {
        check_dtype::<B>(&device, dtype.into())?;
        Ok(give::<B>(B::cast(take::<B>(tensor)?, dtype.into(), divisor)))
    })
}

/// The mean over `parts`, which have one dtype, of `range` of each: added in f32 in their order, then
/// divided by `divisor`. In f32.
///
/// # Errors
///
/// [`KernelError`] for no parts, parts of several dtypes and a range beyond one.
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
        Ok(give::<B>(B::rank_mean(&parts, range, divisor, shape)))
    })
}

/// What each tensor adds to a norm, and its largest magnitude.
///
/// # Errors
///
/// [`KernelError`] for tensors on several devices.
pub fn norm_sums(tensors: &[Tensor<1>], norm: Norm) -> Result<Vec<Sums>, KernelError> {
    let Some(first) = tensors.first() else { return Ok(Vec::new()) };
    check_device(&first.device(), tensors)?;
    with_backend!(first.device(), |B, _device| {
        let part = |tensor: &Tensor<1>| {
            let range = 0..tensor.shape().num_elements();
            Ok((take::<B>(tensor.clone())?, range))
        };
        let parts = tensors.iter().map(part).collect::<Result<Vec<_>, KernelError>>()?;
        Ok(B::sums(&parts, norm))
    })
}

/// Multiplies the tensors by `factor`, each in its own memory where no other tensor shares it, and
/// tells what each adds to a norm then: a step's gradients are unscaled, checked and measured in one
/// pass.
///
/// # Errors
///
/// [`KernelError`] for tensors on several devices.
pub fn unscale(
    tensors: Vec<Tensor<1>>,
    factor: f32,
    norm: Norm,
) -> Result<(Vec<Tensor<1>>, Vec<Sums>), KernelError> {
    let Some(first) = tensors.first() else { return Ok((tensors, Vec::new())) };
    check_device(&first.device(), &tensors)?;
    with_backend!(first.device(), |B, _device| {
        let tensors = tensors.into_iter().map(take::<B>).collect::<Result<Vec<_>, _>>()?;
        let (tensors, sums) = B::unscale(tensors, factor, norm);
        Ok((tensors.into_iter().map(give::<B>).collect(), sums))
    })
}
