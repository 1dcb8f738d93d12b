//! The softmax of rows as one operation, which saves its result for backward.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::Tensor;
use fsdp_kernels::{Float, Kernels, Tracked};

use super::arguments::{apply, has_row_kernels};
use super::error::KernelError;
use crate::backend::model_backend::{ModelBackend, with_backend};

/// Returns the softmax over the last dimension, and records it for backward if the tensor is tracked.
/// Returns `None` for devices without kernels, for dtypes that the kernels of the device do not take,
/// and for tensors without elements.
pub(crate) fn softmax_tracked<const D: usize>(input: &Tensor<D>) -> Option<Tensor<D>> {
    if !has_row_kernels(input) {
        return None;
    }
    let output: Result<Tensor<D>, KernelError> = with_backend!(input.device(), |B, inner| {
        apply::<B, D>(input, &inner, forward::<B>, record::<B>)
    });
    output.ok()
}

/// Computes the softmax without lowering the tensor.
fn forward<B: ModelBackend>(input: Float<B>) -> Float<B> {
    let dtype = input.dtype();
    B::defer_one(input, dtype, B::Raw::softmax)
}

/// Returns the gradient of the input, given the result and its gradient, without lowering them.
fn backward<B: ModelBackend>(result: Float<B>, grad: Float<B>) -> Float<B> {
    let output = (result.shape(), result.dtype());
    let mut gradients = B::defer(vec![result, grad], vec![output], |buffers| {
        let [result, grad] = <[_; 2]>::try_from(buffers).expect("both inputs");
        vec![B::Raw::softmax_backward(result, grad)]
    });
    gradients.pop().expect("`defer` returns one tensor for each output")
}

/// Computes the softmax and records it as one autodiff operation, whose state is the result.
fn record<B: ModelBackend>(input: Tracked<B>) -> Tracked<B> {
    let (value, node) = input.into_parts();
    let output = forward::<B>(value);
    let op = Backward::<B, 1>::prepare::<NoCheckpointing>(Softmax, [node]);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(output.clone(), output),
        OpsKind::UnTracked(op) => op.finish(output),
    }
}

/// Backward of the softmax.
#[derive(Debug)]
struct Softmax;

impl<B: ModelBackend> Backward<B, 1> for Softmax {
    type State = Float<B>;

    fn backward(self, ops: Ops<Float<B>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, grads, |grad| backward::<B>(ops.state, grad));
    }
}
