//! The exact GELU as one operation, which saves its input for backward.

use std::f32::consts::FRAC_1_SQRT_2;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::{DType, Tensor};
use burn_std::Scalar;
use fsdp_kernels::{Float, Kernels, Tracked};

use super::arguments::{apply, has_f32_kernels};
use super::error::KernelError;
use crate::backend::model_backend::{ModelBackend, cast_model, with_backend};

/// Applies the exact GELU, and records it for backward if the tensor is tracked. Returns `None` for
/// devices without kernels, and for dtypes that the kernels of the device do not take.
pub(crate) fn gelu_tracked<const D: usize>(input: &Tensor<D>) -> Option<Tensor<D>> {
    if !has_f32_kernels(input) {
        return None;
    }
    let output: Result<Tensor<D>, KernelError> = with_backend!(input.device(), |B, inner| {
        apply::<B, D>(input, &inner, forward::<B>, record::<B>)
    });
    output.ok()
}

/// Applies the GELU without lowering the tensor. Where operations are recorded, it is made of
/// Burn's, so that it shares a kernel with its neighbours.
fn forward<B: ModelBackend>(input: Float<B>) -> Float<B> {
    let dtype = input.dtype();
    if B::RECORDS {
        let x = cast_model::<B>(input, DType::F32);
        let y = B::float_mul(distribution::<B>(x.clone()), x);
        return cast_model::<B>(y, dtype);
    }
    B::defer_one(input, dtype, B::Raw::gelu)
}

/// Returns the gradient of the GELU's input, given that of its output, without lowering tensors, as
/// [`forward`] does.
fn backward<B: ModelBackend>(input: Float<B>, grad: Float<B>) -> Float<B> {
    let (shape, dtype) = (grad.shape(), grad.dtype());
    if B::RECORDS {
        let x = cast_model::<B>(input, DType::F32);
        let bell = B::float_mul_scalar(B::float_mul(x.clone(), x.clone()), Scalar::from(-0.5f32));
        let density = B::float_mul_scalar(B::float_exp(bell), Scalar::from(0.398_942_3f32));
        let rise = B::float_mul(x.clone(), density);
        let slope = B::float_add(distribution::<B>(x), rise);
        let grad = cast_model::<B>(grad, DType::F32);
        return cast_model::<B>(B::float_mul(grad, slope), dtype);
    }
    let slope = |buffers: Vec<Float<B::Raw>>| {
        let [input, grad] = <[_; 2]>::try_from(buffers).expect("both inputs");
        vec![B::Raw::gelu_backward(input, grad)]
    };
    let mut gradients = B::defer(vec![input, grad], vec![(shape, dtype)], slope);
    gradients.pop().expect("`defer` returns one tensor for each output")
}

/// Returns the standard normal distribution function Φ(x) of f32 elements, by Burn's operations.
fn distribution<B: ModelBackend>(x: Float<B>) -> Float<B> {
    let erf = B::float_erf(B::float_mul_scalar(x, Scalar::from(FRAC_1_SQRT_2)));
    B::float_mul_scalar(B::float_add_scalar(erf, Scalar::from(1.0f32)), Scalar::from(0.5f32))
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
        unary::<B, _>(ops.parents, ops.node, grads, |grad| backward::<B>(ops.state, grad));
    }
}
