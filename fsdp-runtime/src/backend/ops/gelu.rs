//! The exact GELU as one operation, which saves its input for backward.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::{DType, Tensor};

use super::arguments::check_dtype;
use super::error::KernelError;
use crate::backend::kernels::Kernels;
use crate::backend::model_backend::{FloatTensor, ModelBackend, is_flex, with_backend};
use crate::backend::tensor::{Float, Tracked};

/// Applies the exact GELU, and records it for backward if the tensor is tracked. Returns `None` for
/// devices without kernels, and for dtypes that the kernels of the device do not take.
pub(crate) fn gelu_tracked<const D: usize>(input: &Tensor<D>) -> Option<Tensor<D>> {
    let (device, dtype) = (input.device(), input.dtype());
    if is_flex(&device) && dtype != DType::F32 {
        return None;
    }
    let output: Result<Tensor<D>, KernelError> = with_backend!(device, |B, inner| {
        check_dtype::<B>(&inner, dtype).and_then(|()| {
            let value = B::from_dispatch(input.clone().into_dispatch());
            let other = || KernelError::OtherDevice { device: format!("{device:?}") };
            let value = match value.ok_or_else(other)? {
                FloatTensor::Plain(value) => FloatTensor::Plain(forward::<B>(value)),
                FloatTensor::Autodiff(value, context) => {
                    FloatTensor::Autodiff(record::<B>(value), context)
                }
            };
            Ok(Tensor::from_dispatch(B::into_dispatch(value)))
        })
    });
    output.ok()
}

/// Applies the GELU without lowering the tensor.
fn forward<B: ModelBackend>(input: Float<B>) -> Float<B> {
    let dtype = input.dtype();
    B::defer_one(input, dtype, B::Raw::gelu)
}

/// Applies the GELU and records it as one autodiff operation, whose state is the input.
fn record<B: ModelBackend>(input: Tracked<B>) -> Tracked<B> {
    let (value, node) = input.into_parts();
    let output = forward::<B>(value.clone());
    let op = Backward::<B, 1>::prepare::<NoCheckpointing>(Gelu, [node]);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(value, output),
        OpsKind::UnTracked(op) => op.finish(output),
    }
}

/// Backward of the GELU.
#[derive(Debug)]
struct Gelu;

impl<B: ModelBackend> Backward<B, 1> for Gelu {
    type State = Float<B>;

    fn backward(self, ops: Ops<Float<B>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let outputs = vec![(grad.shape(), grad.dtype())];
            let slope = |buffers: Vec<Float<B::Raw>>| {
                let [input, grad] = <[_; 2]>::try_from(buffers).expect("both inputs");
                vec![B::Raw::gelu_backward(input, grad)]
            };
            let mut gradients = B::defer(vec![ops.state, grad], outputs, slope);
            gradients.pop().expect("`defer` returns one tensor for each output")
        });
    }
}
