//! The cross-entropy of a linear layer's output as one operation, which computes its gradients in
//! forward.
//!
//! Backward follows forward directly, since the loss is a model's last operation. The gradient of the
//! weight, which backward has to return, is then the only tensor of its size in either case. Computing
//! the logits again in backward would take a fourth product over all rows and classes.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::{DType, Shape, Tensor};
use fsdp_kernels::{Float, Kernels, LossResults, LossRule, LossTensors, Tracked, wide};

use super::arguments::{Taken, register_gradients, take_all};
use super::error::KernelError;
use super::saved::Saved;
use crate::backend::model_backend::{FloatTensor, ModelBackend, with_backend};

/// Tensors of a loss, as [`LossTensors`] describes them.
#[derive(Debug)]
pub(crate) struct LossInputs {
    pub(crate) hidden: Tensor<2>,
    pub(crate) weight: Tensor<2>,
    pub(crate) bias: Option<Tensor<1>>,
    pub(crate) targets: Tensor<1>,
}

/// Returns the loss, `[1]`, in f32 or in f64, and records it for backward if a tensor is tracked. Sets
/// the gradients of the rule.
///
/// Returns `None` for devices without kernels, for dtypes that the device does not support, for tensors
/// without elements, and if the tensors do not agree in device and dtype.
pub(crate) fn linear_cross_entropy_tracked(
    inputs: &LossInputs,
    rule: LossRule,
) -> Option<Tensor<1>> {
    let LossInputs { hidden, weight, bias, targets } = inputs;
    let (device, dtype) = (hidden.device(), hidden.dtype());
    let agrees = (weight.device(), weight.dtype()) == (device.clone(), dtype)
        && bias.iter().all(|bias| (bias.device(), bias.dtype()) == (device.clone(), dtype));
    let has_elements = [hidden, weight].iter().all(|tensor| tensor.shape().num_elements() > 0);
    if !agrees || !has_elements {
        return None;
    }
    let loss: Result<Tensor<1>, KernelError> = with_backend!(device, |B, inner| {
        let refused = || KernelError::Dtype { dtype, device: format!("{device:?}") };
        let supported = <B as burn::backend::Backend>::supports_dtype(&inner, dtype);
        supported.then_some(()).ok_or_else(refused).and_then(|()| {
            let bias = bias.clone().map(Tensor::into_dispatch);
            let parents = [hidden, weight].map(|tensor| tensor.clone().into_dispatch());
            let parents = take_all::<B>(parents.into_iter().chain(bias));
            let targets = <B as ModelBackend>::from_dispatch(targets.clone().into_dispatch());
            let targets = targets.ok_or_else(refused)?.into_inner();
            let loss = parents.and_then(|parents| apply::<B>(parents, targets, rule));
            Ok(Tensor::from_dispatch(B::into_dispatch(loss.ok_or_else(refused)?)))
        })
    });
    loss.ok()
}

/// A loss and its gradients, which the caller of [`with_gradients`] computes.
pub(crate) struct ComputedLoss {
    /// `[1]`
    pub(crate) loss: Tensor<1>,
    /// Factor of all gradients, `[1]`.
    pub(crate) factor: Tensor<1>,
    /// The gradients that were asked for, in the order of the tensors, each less the factor, in the dtype of the
    /// loss.
    pub(crate) gradients: Vec<Tensor<2>>,
}

/// Returns a loss of hidden values and weight, recorded for backward with the gradients that `compute` returns.
///
/// `compute` gets both tensors on the device without autodiff, and which of them need gradients.
///
/// # Panics
///
/// If the tensors are on a device that no model is sharded on.
pub(crate) fn with_gradients(
    [hidden, weight]: [&Tensor<2>; 2],
    compute: impl FnOnce([Tensor<2>; 2], [bool; 2]) -> ComputedLoss,
) -> Tensor<1> {
    let device = hidden.device();
    let loss: Result<Tensor<1>, KernelError> = with_backend!(device, |B, _inner| {
        let parents = [hidden, weight].map(|tensor| tensor.clone().into_dispatch());
        let loss =
            take_all::<B>(parents).and_then(|parents| record_computed::<B>(parents, compute));
        let other = || KernelError::OtherDevice { device: format!("{device:?}") };
        loss.map(|loss| Tensor::from_dispatch(B::into_dispatch(loss))).ok_or_else(other)
    });
    loss.expect("a sharded model is on a device that this crate knows")
}

/// Computes a loss, and records it if the tensors are of an autodiff device.
fn record_computed<B: ModelBackend>(
    parents: Taken<B>,
    compute: impl FnOnce([Tensor<2>; 2], [bool; 2]) -> ComputedLoss,
) -> Option<FloatTensor<B>> {
    let give = |tensor: Float<B>| -> Tensor<2> {
        Tensor::from_dispatch(B::into_dispatch(FloatTensor::Plain(tensor)))
    };
    let take = |tensor| Some(B::from_dispatch(tensor)?.into_inner());
    let (tensors, context) = match parents {
        Taken::Plain(tensors) => {
            let tensors = <[_; 2]>::try_from(tensors).ok()?.map(give);
            let loss = compute(tensors, [false; 2]).loss;
            return Some(FloatTensor::Plain(take(loss.into_dispatch())?));
        }
        Taken::Autodiff(tensors, context) => (<[Tracked<B>; 2]>::try_from(tensors).ok()?, context),
    };
    let [of_hidden, of_weight] = tensors.each_ref().map(|tensor| tensor.is_tracked());
    let primitives = tensors.clone().map(Tracked::<B>::into_primitive);
    let dtype = primitives[0].dtype();
    let computed = compute(primitives.map(give), [of_hidden, of_weight]);
    let gradients = computed.gradients.into_iter().map(|tensor| take(tensor.into_dispatch()));
    let results = LossResults {
        loss: take(computed.loss.into_dispatch())?,
        factor: take(computed.factor.into_dispatch())?,
        gradients: gradients.collect::<Option<_>>()?,
    };
    let needed = [of_hidden, of_weight, false];
    Some(FloatTensor::Autodiff(finish::<B, 2>(&tensors, results, needed, dtype), context))
}

/// Computes the loss. The tensors are the hidden values, the weight, and the bias if there is one.
fn apply<B: ModelBackend>(
    tensors: Taken<B>,
    targets: Float<B>,
    rule: LossRule,
) -> Option<FloatTensor<B>> {
    let (tensors, context) = match tensors {
        Taken::Plain(tensors) => {
            let rule = LossRule { gradients: [false; 3], ..rule };
            let results = forward::<B>(tensors, targets, rule);
            return Some(FloatTensor::Plain(results.loss));
        }
        Taken::Autodiff(tensors, context) => (tensors, context),
    };
    let loss = match <[_; 3]>::try_from(tensors) {
        Ok(tensors) => record::<B, 3>(tensors, targets, rule),
        Err(tensors) => record::<B, 2>(<[_; 2]>::try_from(tensors).ok()?, targets, rule),
    };
    Some(FloatTensor::Autodiff(loss, context))
}

/// Returns the loss and the gradients that the rule asks for, without lowering tensors.
fn forward<B: ModelBackend>(
    tensors: Vec<Float<B>>,
    targets: Float<B>,
    rule: LossRule,
) -> LossResults<Float<B>> {
    let dtype = wide(tensors[0].dtype());
    let scalar = Shape::from([1]);
    let shapes = tensors.iter().map(TensorMetadata::shape).zip(rule.gradients);
    let shapes = shapes.filter(|(_, wanted)| *wanted).map(|(shape, _)| shape);
    let shapes = [scalar.clone(), scalar].into_iter().chain(shapes);
    let outputs = shapes.map(|shape| (shape, dtype)).collect();
    let mut tensors = tensors.into_iter();
    let mut next = || tensors.next().expect("hidden values and weight");
    let (hidden, weight) = (next(), next());
    let tensors = LossTensors { hidden, weight, bias: tensors.next(), targets };
    LossResults::from_vec(B::defer(tensors.into_vec(), outputs, move |buffers| {
        B::Raw::linear_cross_entropy(&LossTensors::from_vec(buffers), &rule).into_vec()
    }))
}

/// Computes the loss and records it as one autodiff operation.
fn record<B: ModelBackend, const N: usize>(
    tensors: [Tracked<B>; N],
    targets: Float<B>,
    rule: LossRule,
) -> Tracked<B> {
    let mut gradients = [false; 3];
    for (wanted, tensor) in gradients.iter_mut().zip(&tensors) {
        *wanted = tensor.is_tracked();
    }
    let primitives = Vec::from(tensors.clone().map(Tracked::<B>::into_primitive));
    let dtype = primitives[0].dtype();
    let results = forward::<B>(primitives, targets, LossRule { gradients, ..rule });
    finish::<B, N>(&tensors, results, gradients, dtype)
}

/// Records a loss of `tensors` whose gradients are known.
fn finish<B: ModelBackend, const N: usize>(
    tensors: &[Tracked<B>; N],
    results: LossResults<Float<B>>,
    needed: [bool; 3],
    dtype: DType,
) -> Tracked<B> {
    let loss = results.loss.clone();
    let nodes = tensors.each_ref().map(|tensor| tensor.node());
    let op = Backward::<B, N>::prepare::<NoCheckpointing>(LinearCrossEntropy, nodes);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => {
            let saved = Saved::tensors::<B>(&results.gradients);
            op.finish(State { results, needed, dtype, saved }, loss)
        }
        OpsKind::UnTracked(op) => op.finish(loss),
    }
}

/// The gradients of a loss, and the dtype of the tensors that they belong to.
#[derive(Clone, Debug)]
struct State<B: ModelBackend> {
    results: LossResults<Float<B>>,
    /// Whether each tensor has a gradient in `results`.
    needed: [bool; 3],
    dtype: DType,
    saved: Saved,
}

/// Backward of the loss. The parents are the hidden values, the weight, and the bias if there is one.
#[derive(Debug)]
struct LinearCrossEntropy;

impl<B: ModelBackend, const N: usize> Backward<B, N> for LinearCrossEntropy {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        register_gradients::<B, _, _, N>(ops, grads, |state, grad| scaled::<B>(state, grad));
    }
}

/// Returns the gradient of each tensor that needs one, given that of the loss. Nothing is lowered.
fn scaled<B: ModelBackend>(
    state: State<B>,
    grad: Float<B>,
) -> impl Iterator<Item = Option<Float<B>>> {
    let State { results: LossResults { factor, gradients, .. }, needed, dtype, saved } = state;
    let factor = B::float_mul(factor, grad);
    let mut gradients = gradients.into_iter();
    needed.into_iter().map(move |needed| {
        let _until_the_last = &saved;
        let gradient = needed.then(|| gradients.next()).flatten()?;
        let output = (gradient.shape(), dtype);
        let mut scaled = B::defer(vec![gradient, factor.clone()], vec![output], move |buffers| {
            let [gradient, factor] = <[_; 2]>::try_from(buffers).expect("two buffers");
            vec![B::Raw::scale(gradient, factor, dtype)]
        });
        scaled.pop()
    })
}
