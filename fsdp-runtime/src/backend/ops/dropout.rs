//! Dropout as one operation. Backward generates the mask again, so no mask is stored.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::{Tensor, TensorData};
use fsdp_kernels::{Float, Kernels, MaskSource, Tracked};

use super::arguments::{apply, give, take};
use super::error::KernelError;
use crate::backend::model_backend::{ModelBackend, with_backend};
use crate::module::Mask;

/// Sets each element to zero with probability `source.prob` and multiplies the others by
/// `1 / (1 - source.prob)`.
///
/// The mask depends only on `source` and the element's index: equal arguments give equal bits on
/// every device.
///
/// # Shapes
///
/// - input and output: `[n]`
///
/// # Errors
///
/// - [`KernelError::Dtype`] for dtypes other than f32, bf16 and f16.
/// - [`KernelError::Device`] if the device has no kernels.
///
/// # Panics
///
/// For 2^32 elements or more on a CubeCL device.
pub fn dropout(tensor: Tensor<1>, source: &MaskSource) -> Result<Tensor<1>, KernelError> {
    with_backend!(tensor.device(), |B, _device| {
        Ok(give::<B>(drop_elements::<B>(take::<B>(tensor)?, &(*source).into())))
    })
}

/// Applies [`dropout`] to a tensor of any shape and records it for backward if the tensor is
/// tracked. On devices without kernels, and for other dtypes, the mask is generated on the host and
/// copied to the device.
pub(crate) fn dropout_tracked<const D: usize>(mask: &Mask, input: Tensor<D>) -> Tensor<D> {
    let (device, dtype) = (input.device(), input.dtype());
    let dropped: Result<Tensor<D>, KernelError> = with_backend!(device, |B, inner| {
        let plain = |value| drop_elements::<B>(value, mask);
        apply::<B, D>(&input, &inner, plain, |value| record::<B>(value, mask))
    });
    dropped.unwrap_or_else(|_| {
        let Mask { source, part } = mask;
        let mask = match part {
            Some(part) => source.mask_of(part),
            None => source.mask(input.shape().num_elements()),
        };
        let mask = TensorData::new(mask, input.shape());
        let mask = Tensor::<D>::from_data(mask, (&device.inner(), dtype));
        let zero = mask.clone().equal_elem(0.0);
        (input * mask).mask_fill(zero, 0.0)
    })
}

/// Returns the tensor multiplied by a dropout mask, without lowering it.
pub(super) fn drop_elements<B: ModelBackend>(tensor: Float<B>, mask: &Mask) -> Float<B> {
    let (dtype, Mask { source, part }) = (tensor.dtype(), *mask);
    B::defer_one(tensor, dtype, move |buffer| match &part {
        Some(part) => B::Raw::dropout_part(buffer, &source, part),
        None => B::Raw::dropout(buffer, &source),
    })
}

/// Applies dropout and records it as one autodiff operation, whose state is the mask.
fn record<B: ModelBackend>(input: Tracked<B>, mask: &Mask) -> Tracked<B> {
    let (value, node) = input.into_parts();
    let value = drop_elements::<B>(value, mask);
    let op = Backward::<B, 1>::prepare::<NoCheckpointing>(Dropout, [node]);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(*mask, value),
        OpsKind::UnTracked(op) => op.finish(value),
    }
}

/// Backward of dropout: applies the same mask to the gradient.
#[derive(Debug)]
struct Dropout;

impl<B: ModelBackend> Backward<B, 1> for Dropout {
    type State = Mask;

    fn backward(self, ops: Ops<Mask, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let drop = |grad: Float<B>| drop_elements::<B>(grad, &ops.state);
        unary::<B, _>(ops.parents, ops.node, grads, drop);
    }
}
