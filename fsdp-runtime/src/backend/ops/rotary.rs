//! Rotary position encoding as one operation, which saves only the positions for backward.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::Tensor;
use fsdp_kernels::{Float, Kernels, RotaryRule, RotaryTensors, Tracked};

use super::arguments::check_dtype;
use super::error::KernelError;
use crate::backend::model_backend::{FloatTensor, ModelBackend, with_backend};

/// Rotates the rows of `input`, `[batch, heads, length, width]`, and records it for backward if the input is
/// tracked. `table` and `positions` are constants with the shapes of [`RotaryTensors`], in f32.
///
/// Returns `None` for devices without kernels, for dtypes that the kernels of the device do not take,
/// for an input without elements, and if the tensors are on several devices.
pub(crate) fn rotate_tracked(
    input: &Tensor<4>,
    table: &Tensor<2>,
    positions: Option<&Tensor<2>>,
    rule: RotaryRule,
) -> Option<Tensor<4>> {
    let (device, dtype) = (input.device(), input.dtype());
    let inner = device.clone().inner();
    let elsewhere = |constant: &Tensor<2>| constant.device().inner() != inner;
    if input.shape().num_elements() == 0
        || [Some(table), positions].into_iter().flatten().any(elsewhere)
    {
        return None;
    }
    let output: Result<Tensor<4>, KernelError> = with_backend!(device, |B, inner| {
        check_dtype::<B>(&inner, dtype).and_then(|()| {
            let other = || KernelError::OtherDevice { device: format!("{device:?}") };
            let take = |tensor: &Tensor<2>| {
                let tensor = <B as ModelBackend>::from_dispatch(tensor.clone().into_dispatch());
                tensor.map(FloatTensor::into_inner).ok_or_else(other)
            };
            let constants = Constants {
                table: take(table)?,
                positions: positions.map(take).transpose()?,
                rule,
            };
            let input = <B as ModelBackend>::from_dispatch(input.clone().into_dispatch());
            let output = match input.ok_or_else(other)? {
                FloatTensor::Plain(input) => FloatTensor::Plain(rotate::<B>(input, constants)),
                FloatTensor::Autodiff(input, context) => {
                    FloatTensor::Autodiff(record::<B>(input, constants), context)
                }
            };
            Ok(Tensor::from_dispatch(<B as ModelBackend>::into_dispatch(output)))
        })
    });
    output.ok()
}

/// What a rotation depends on beside its input.
#[derive(Clone, Debug)]
struct Constants<B: ModelBackend> {
    table: Float<B>,
    positions: Option<Float<B>>,
    rule: RotaryRule,
}

/// Rotates without lowering the tensors.
fn rotate<B: ModelBackend>(input: Float<B>, constants: Constants<B>) -> Float<B> {
    let Constants { table, positions, rule } = constants;
    let output = (input.shape(), input.dtype());
    let tensors = RotaryTensors { input, table, positions }.into_vec();
    let mut outputs = B::defer(tensors, vec![output], move |buffers| {
        let tensors = RotaryTensors::from_vec(buffers).expect("an input and a table");
        vec![B::Raw::rotate(tensors, &rule)]
    });
    outputs.pop().expect("`defer` returns one tensor for each output")
}

/// Rotates and records it as one autodiff operation.
fn record<B: ModelBackend>(input: Tracked<B>, constants: Constants<B>) -> Tracked<B> {
    let (value, node) = input.into_parts();
    let output = rotate::<B>(value, constants.clone());
    let op = Backward::<B, 1>::prepare::<NoCheckpointing>(Rotate, [node]);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(constants, output),
        OpsKind::UnTracked(op) => op.finish(output),
    }
}

/// Backward of a rotation: the rotation by the negative angles.
#[derive(Debug)]
struct Rotate;

impl<B: ModelBackend> Backward<B, 1> for Rotate {
    type State = Constants<B>;

    fn backward(self, ops: Ops<Constants<B>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Constants { table, positions, rule } = ops.state;
        let rule = RotaryRule { inverse: !rule.inverse, ..rule };
        let constants = Constants { table, positions, rule };
        unary::<B, _>(ops.parents, ops.node, grads, |grad| rotate::<B>(grad, constants));
    }
}
