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

#[cfg(feature = "cube")]
pub(crate) mod cube;
mod dropout;
mod error;
#[cfg(feature = "flex")]
pub(crate) mod flex;
mod mask;

use std::ops::Range;

use burn::backend::{Backend, DispatchDevice};
use burn::tensor::{DType, Device, FloatDType, Shape, Tensor};

pub use self::dropout::dropout;
pub(crate) use self::dropout::dropout_tracked;
pub use self::error::KernelError;
pub use self::mask::MaskSource;
use crate::backend::{Float, ShardBackend, Value, with_backend};
use crate::norm::Norm;
use crate::optim::{AdamStep, SgdStep};

/// The kernels of one backend. Launchers check lengths and panic where a caller inside this crate
/// has miscounted; dtypes are f32, bf16 and f16.
pub(crate) trait Kernels: Backend {
    /// The tensors' elements, each from its offset in the buffer on, rounded to the buffer's dtype.
    /// The rest of the buffer stays as it is. In the buffer's own memory where nothing shares it.
    fn pack(parts: Vec<(Float<Self>, usize)>, buffer: Float<Self>) -> Float<Self>;

    /// Tensors of their own of the given shapes, each from its offset in the buffer on: divided by
    /// `divisor` in f32 if given, rounded to `dtype`.
    fn unpack(
        buffer: Float<Self>,
        parts: Vec<(usize, Shape)>,
        dtype: DType,
        divisor: Option<f32>,
    ) -> Vec<Float<Self>>;

    /// The tensor's elements, divided by `divisor` in f32 if given, rounded to `dtype`.
    fn cast(tensor: Float<Self>, dtype: DType, divisor: Option<f32>) -> Float<Self>;

    /// The mean over `parts` of `range` of each flattened part, in f32: added in f32 in their order,
    /// then divided by `divisor`. All parts have one dtype.
    fn rank_mean(
        parts: &[Float<Self>],
        range: Range<usize>,
        divisor: usize,
        shape: Shape,
    ) -> Float<Self>;

    /// What each range of its flattened tensor adds to a norm.
    fn sums(parts: &[(Float<Self>, Range<usize>)], norm: Norm) -> Vec<Sums>;

    /// Multiplies the tensors by `factor`, in their own memory where nothing shares it, and tells what
    /// each adds to a norm then.
    fn unscale(tensors: Vec<Float<Self>>, factor: f32, norm: Norm)
    -> (Vec<Float<Self>>, Vec<Sums>);

    /// The tensor's elements times those of a dropout mask, which is in no memory.
    fn dropout(tensor: Float<Self>, source: &MaskSource) -> Float<Self>;

    /// Zeros in f32, in memory of their own.
    fn zeros(device: &Self::Device, shape: Shape) -> Float<Self> {
        Self::float_zeros(shape, device, DType::F32.into())
    }

    /// One step of Adam or AdamW on f32 tensors of one shape, each updated in its own memory where
    /// nothing shares it: if `later`, possibly only when the
    /// [`foreach::scope`](crate::optim::foreach::scope) around ends, until when nothing may look at
    /// them.
    fn adam(
        step: &AdamStep,
        grad: Float<Self>,
        tensors: AdamTensors<Float<Self>>,
        later: bool,
    ) -> AdamTensors<Float<Self>>;

    /// One step of SGD on f32 tensors of one shape, with momentum where there is a velocity, each
    /// updated in its own memory where nothing shares it; `later` as for [`adam`](Self::adam).
    fn sgd(
        step: &SgdStep,
        grad: Float<Self>,
        param: Float<Self>,
        velocity: Option<Float<Self>>,
        later: bool,
    ) -> (Float<Self>, Option<Float<Self>>);
}

/// What a step of Adam updates.
pub(crate) struct AdamTensors<T> {
    pub(crate) param: T,
    pub(crate) moment_1: T,
    pub(crate) moment_2: T,
    /// With AMSGrad, the largest second moments so far.
    pub(crate) max: Option<T>,
}

impl<T> AdamTensors<T> {
    /// The same of other tensors.
    pub(crate) fn map<U>(self, mut f: impl FnMut(T) -> U) -> AdamTensors<U> {
        AdamTensors {
            param: f(self.param),
            moment_1: f(self.moment_1),
            moment_2: f(self.moment_2),
            max: self.max.map(f),
        }
    }
}

/// What the elements of one tensor add to a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sums {
    /// The sum of the norm's terms; 0 for the infinity norm.
    pub sum: f64,
    /// The largest magnitude; NaN where an element is NaN.
    pub largest: f32,
}

impl Sums {
    /// What is added to the norm.
    pub fn term(&self, norm: Norm) -> f64 {
        match norm {
            Norm::Inf => f64::from(self.largest),
            _ => self.sum,
        }
    }

    /// Whether no element is infinite or NaN, whatever their sum.
    pub fn is_finite(&self) -> bool {
        self.largest.is_finite()
    }
}

/// Whether the device has kernels.
pub(crate) fn has_kernels(device: &Device) -> bool {
    match device.as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => true,
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => true,
        #[allow(unreachable_patterns)]
        _ => false,
    }
}

/// Whether kernels take elements of this type.
pub(crate) fn takes(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

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

/// Whether Burn computes the dtype on the device: what the device says, and for bf16 on CubeCL's CPU
/// device whether the processor has AVX512-BF16, without which that compiler's rounding fails. These
/// kernels take bf16 there all the same.
pub fn computes(device: &Device, dtype: FloatDType) -> bool {
    #[cfg(feature = "cpu")]
    if dtype == FloatDType::BF16 && [Device::cpu(), Device::cpu().autodiff()].contains(device) {
        return cube::cpu_rounds_to_bf16();
    }
    device.supports_dtype(dtype)
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
