//! The activation of SwiGLU as one operation, which saves gate and up for backward.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;
use fsdp_kernels::{Float, Kernels, Tracked};

use super::arguments::{Taken, check_dtype, register_gradients, take_all};
use super::error::KernelError;
use crate::backend::model_backend::{FloatTensor, ModelBackend, with_backend};

/// Returns `gate · σ(gate) · up`, and records it for backward if a tensor is tracked.
///
/// Returns `None` for devices without kernels, for dtypes that the kernels of the device do not take, and
/// if the tensors do not agree in device and dtype. Their shapes must be equal.
pub(crate) fn swiglu_tracked<const D: usize>(
    gate: &Tensor<D>,
    up: &Tensor<D>,
) -> Option<Tensor<D>> {
    let (device, dtype) = (gate.device(), gate.dtype());
    if (up.device(), up.dtype()) != (device.clone(), dtype) {
        return None;
    }
    let output: Result<Tensor<D>, KernelError> = with_backend!(device, |B, inner| {
        check_dtype::<B>(&inner, dtype).and_then(|()| {
            let tensors = [gate, up].map(|tensor| tensor.clone().into_dispatch());
            let output = take_all::<B>(tensors).and_then(apply::<B>);
            let other = || KernelError::OtherDevice { device: format!("{device:?}") };
            Ok(Tensor::from_dispatch(<B as ModelBackend>::into_dispatch(output.ok_or_else(other)?)))
        })
    });
    output.ok()
}

/// Applies the activation to two tensors.
fn apply<B: ModelBackend>(tensors: Taken<B>) -> Option<FloatTensor<B>> {
    Some(match tensors {
        Taken::Plain(tensors) => FloatTensor::Plain(forward::<B>(tensors.try_into().ok()?)),
        Taken::Autodiff(tensors, context) => {
            FloatTensor::Autodiff(record::<B>(tensors.try_into().ok()?), context)
        }
    })
}

/// Applies the activation without lowering the tensors.
fn forward<B: ModelBackend>(inputs: [Float<B>; 2]) -> Float<B> {
    let output = (inputs[0].shape(), inputs[0].dtype());
    let mut outputs = B::defer(inputs.into(), vec![output], |buffers| {
        let [gate, up] = <[_; 2]>::try_from(buffers).expect("gate and up");
        vec![B::Raw::swiglu(gate, up)]
    });
    outputs.pop().expect("`defer` returns one tensor for each output")
}

/// Returns the gradients of gate and up, given that of the result. Nothing is lowered.
fn backward<B: ModelBackend>([gate, up]: [Float<B>; 2], grad: Float<B>) -> Vec<Float<B>> {
    let output = (gate.shape(), gate.dtype());
    B::defer(vec![gate, up, grad], vec![output; 2], |buffers| {
        let [gate, up, grad] = <[_; 3]>::try_from(buffers).expect("three inputs");
        B::Raw::swiglu_backward(gate, up, grad).into()
    })
}

/// Applies the activation and records it as one autodiff operation.
fn record<B: ModelBackend>(tensors: [Tracked<B>; 2]) -> Tracked<B> {
    let nodes = tensors.each_ref().map(|tensor| tensor.node());
    let inputs = tensors.map(Tracked::<B>::into_primitive);
    let output = forward::<B>(inputs.clone());
    let op = Backward::<B, 2>::prepare::<NoCheckpointing>(SwiGlu, nodes);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(inputs, output),
        OpsKind::UnTracked(op) => op.finish(output),
    }
}

/// Backward of the activation. The parents are gate and up.
#[derive(Debug)]
struct SwiGlu;

impl<B: ModelBackend> Backward<B, 2> for SwiGlu {
    type State = [Float<B>; 2];

    fn backward(self, ops: Ops<[Float<B>; 2], 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        register_gradients::<B, _, _, 2>(ops, grads, |inputs, grad| {
            backward::<B>(inputs, grad).into_iter().map(Some)
        });
    }
}
