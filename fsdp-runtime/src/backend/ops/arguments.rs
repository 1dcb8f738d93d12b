//! Checks and conversions of the arguments of kernels.

use std::ops::Range;

use burn::backend::Backend;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::Ops;
use burn::tensor::{DType, Device, DispatchTensor, Tensor};
use fsdp_kernels::{Float, Tracked, takes};

use super::error::KernelError;
use crate::backend::model_backend::{AutodiffContext, FloatTensor, ModelBackend, is_flex};

/// Takes a flat tensor out of Burn's dispatch type, without its autodiff node.
pub(super) fn take<B: ModelBackend>(tensor: Tensor<1>) -> Result<Float<B>, KernelError> {
    let dtype = tensor.dtype();
    if !takes(dtype) {
        return Err(KernelError::Dtype { dtype, device: format!("{:?}", tensor.device()) });
    }
    let device = tensor.device();
    let value = B::from_dispatch(tensor.into_dispatch());
    let other = || KernelError::OtherDevice { device: format!("{device:?}") };
    Ok(value.ok_or_else(other)?.into_inner())
}

/// Puts a flat tensor into Burn's dispatch type.
pub(super) fn give<B: ModelBackend>(tensor: Float<B>) -> Tensor<1> {
    Tensor::from_dispatch(B::into_dispatch(FloatTensor::Plain(tensor)))
}

/// Puts the only result of a kernel into Burn's dispatch type.
pub(super) fn give_one<B: ModelBackend>(results: Vec<Float<B>>) -> Tensor<1> {
    give::<B>(results.into_iter().next().expect("the kernel has one result"))
}

/// Checks that kernels and the device support the dtype.
pub(super) fn check_dtype<B: Backend>(device: &B::Device, dtype: DType) -> Result<(), KernelError> {
    if takes(dtype) && B::supports_dtype(device, dtype) {
        return Ok(());
    }
    Err(KernelError::Dtype { dtype, device: format!("{device:?}") })
}

/// Checks that the tensors are on `device`.
pub(super) fn check_device<'a>(
    device: &Device,
    tensors: impl IntoIterator<Item = &'a Tensor<1>>,
) -> Result<(), KernelError> {
    let other = tensors.into_iter().map(Tensor::device).find(|other| other != device);
    other.map_or(Ok(()), |other| Err(KernelError::OtherDevice { device: format!("{other:?}") }))
}

/// Checks that a range is within a tensor of `len` elements.
pub(super) fn check_range(range: &Range<usize>, len: usize) -> Result<(), KernelError> {
    if range.start <= range.end && range.end <= len {
        return Ok(());
    }
    Err(KernelError::Range { range: range.clone(), len })
}

/// Returns whether kernels that Flex has for f32 only take the tensor, if there are kernels for its
/// device.
pub(super) fn has_f32_kernels<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.dtype() == DType::F32 || !is_flex(&tensor.device())
}

/// Returns whether the kernels on rows take the tensor, if there are kernels for its device: Flex has
/// them for f32 only, and an empty tensor has no rows.
pub(super) fn has_row_kernels<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.shape().num_elements() > 0 && has_f32_kernels(tensor)
}

/// Applies `plain` to a tensor of a device without autodiff, and `tracked` to one of an autodiff
/// device.
///
/// # Errors
///
/// - [`KernelError::Dtype`] for a dtype that kernels or the device `inner` do not support.
/// - [`KernelError::OtherDevice`] for a tensor of another backend.
pub(super) fn apply<B: ModelBackend, const D: usize>(
    input: &Tensor<D>,
    inner: &B::Device,
    plain: impl FnOnce(Float<B>) -> Float<B>,
    tracked: impl FnOnce(Tracked<B>) -> Tracked<B>,
) -> Result<Tensor<D>, KernelError> {
    check_dtype::<B>(inner, input.dtype())?;
    let value = B::from_dispatch(input.clone().into_dispatch());
    let other = || KernelError::OtherDevice { device: format!("{:?}", input.device()) };
    let value = match value.ok_or_else(other)? {
        FloatTensor::Plain(value) => FloatTensor::Plain(plain(value)),
        FloatTensor::Autodiff(value, context) => FloatTensor::Autodiff(tracked(value), context),
    };
    Ok(Tensor::from_dispatch(B::into_dispatch(value)))
}

/// Tensors of one device, taken out of Burn's dispatch type.
pub(super) enum Taken<B: ModelBackend> {
    /// Tensors of a device without autodiff.
    Plain(Vec<Float<B>>),
    /// Tensors of an autodiff device, tracked or not.
    Autodiff(Vec<Tracked<B>>, AutodiffContext),
}

/// Takes at least one tensor out of Burn's dispatch type. Returns `None` for tensors of another backend, and
/// if some are of an autodiff device and some are not.
pub(super) fn take_all<B: ModelBackend>(
    tensors: impl IntoIterator<Item = DispatchTensor>,
) -> Option<Taken<B>> {
    let (mut plain, mut autodiff, mut context) = (Vec::new(), Vec::new(), None);
    for tensor in tensors {
        match B::from_dispatch(tensor)? {
            FloatTensor::Plain(tensor) => plain.push(tensor),
            FloatTensor::Autodiff(tensor, of_tensor) => {
                context.get_or_insert(of_tensor);
                autodiff.push(tensor);
            }
        }
    }
    match context {
        None => Some(Taken::Plain(plain)),
        Some(context) => plain.is_empty().then_some(Taken::Autodiff(autodiff, context)),
    }
}

/// Registers the gradients of an operation's parents. `backward` computes them from the state and the
/// gradient of the result, in the order of the parents. A parent that is not tracked needs none.
pub(super) fn register_gradients<B: Backend, S, G, const N: usize>(
    ops: Ops<S, N>,
    grads: &mut Gradients,
    backward: impl FnOnce(S, Float<B>) -> G,
) where
    G: IntoIterator<Item = Option<Float<B>>>,
{
    let grad = grads.consume::<B>(&ops.node);
    for (parent, gradient) in ops.parents.into_iter().zip(backward(ops.state, grad)) {
        if let (Some(parent), Some(gradient)) = (parent, gradient) {
            grads.register::<B>(parent.id, gradient);
        }
    }
}
