//! A function of tensors as one operation, which saves its inputs and runs the function again in
//! backward.
//!
//! The second run has a graph of its own, from new leaves, because Burn locks the outer graph during
//! its backward.

use std::fmt;
use std::sync::{Arc, Mutex};

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Autodiff, AutodiffBackend, TensorMetadata};
use burn::tensor::{DType, DispatchTensor, Shape, Tensor};
use fsdp_kernels::{Float, Tracked};

use super::saved::{self, Saved, SavedCounter};
use crate::backend::model_backend::{AutodiffContext, FloatTensor, ModelBackend, with_backend};
use crate::backend::shard_backend::bytes;
use crate::backend::stored_tensor::new_leaf;
use crate::error::{IgnorePoison, ScheduleError, ShardError, raise};
use crate::module::{Draw, Playback, UnitValue, capture_draws};

/// Function whose result is recomputed: it maps its saved inputs, and returns what it computes from
/// them.
type Run = dyn Fn(&mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> DispatchTensor + Send;

/// Applies `f` without a graph, and records it as one operation if an input is tracked. On a device
/// that models cannot be sharded on, applies `f` as it is.
///
/// # Panics
///
/// Unwinds with [`ScheduleError::RecomputedCapture`] if the result is tracked by another tensor than the
/// inputs.
pub(crate) fn recompute_tracked<I, const D: usize>(
    inputs: I,
    f: impl Fn(I) -> Tensor<D> + Send + 'static,
) -> Tensor<D>
where
    I: UnitValue + Clone + Send + 'static,
{
    let mut tensors = Vec::new();
    inputs.visit_tensors(&mut |tensor| tensors.push(tensor));
    let Some(first) = tensors.first() else { return f(inputs) };
    let device = Tensor::<1>::from_dispatch(first.clone()).device();
    let mut call = Some((inputs, f));
    let recorded: Result<Option<Tensor<D>>, ShardError> = with_backend!(device, |B, _inner| {
        let is_recorded = tensors.into_iter().any(is_tracked::<B>);
        let call = is_recorded.then(|| call.take()).flatten();
        Ok(call.map(|(inputs, f)| record::<B, I, D>(inputs, f)))
    });
    match (recorded, call) {
        (_, Some((inputs, f))) => f(inputs),
        (Ok(Some(output)), None) => output,
        _ => unreachable!("a call that was taken has an output"),
    }
}

/// Returns whether a tensor is a tracked float tensor of the backend `B`.
fn is_tracked<B: ModelBackend>(tensor: DispatchTensor) -> bool {
    matches!(B::from_dispatch(tensor), Some(FloatTensor::Autodiff(tensor, _)) if tensor.is_tracked())
}

/// Applies `f` and records it. At least one input is tracked.
fn record<B: ModelBackend, I, const D: usize>(
    inputs: I,
    f: impl Fn(I) -> Tensor<D> + Send + 'static,
) -> Tensor<D>
where
    I: UnitValue + Clone + Send + 'static,
{
    let (mut parents, mut nodes, mut saved_bytes) = (Vec::new(), Vec::new(), 0);
    let detached = inputs.map_tensors(&mut |tensor| {
        let Some(FloatTensor::Autodiff(tensor, context)) = B::from_dispatch(tensor.clone()) else {
            nodes.push(None);
            return tensor;
        };
        saved_bytes += bytes::<B>(tensor.primitive());
        let value = Autodiff::<B>::from_inner(tensor.primitive().clone());
        nodes.push(tensor.is_tracked().then(|| tensor.id()));
        if tensor.is_tracked() {
            parents.push(tensor);
        }
        B::into_dispatch(FloatTensor::Autodiff(value, context))
    });
    let parent = parents.into_iter().reduce(join::<B>).expect("at least one input is tracked");
    let saved = detached.clone();
    let (output, draws) = capture_draws(|| f(detached));
    let output = output.into_dispatch();
    let Some(FloatTensor::Autodiff(value, context)) = B::from_dispatch(output.clone()) else {
        // A constant of a device without autodiff.
        return Tensor::from_dispatch(output);
    };
    if value.is_tracked() {
        raise(ScheduleError::RecomputedCapture.into());
    }
    let run = move |map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor| {
        f(saved.clone().map_tensors(map)).into_dispatch()
    };
    let (run, saved) = (Arc::new(Mutex::new(Box::new(run) as _)), Saved::bytes(saved_bytes));
    let state = State { run, nodes, draws, context, saved, counter: saved::current() };
    let op = Backward::<B, 1>::prepare::<NoCheckpointing>(Recompute, [parent.node()]);
    let value = value.into_primitive();
    let output = match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(state, value),
        OpsKind::UnTracked(op) => op.finish(value),
    };
    Tensor::from_dispatch(B::into_dispatch(FloatTensor::Autodiff(output, context)))
}

/// Returns a tensor of one element that depends on two others, so that the backward of its children
/// comes before theirs.
fn join<B: ModelBackend>(first: Tracked<B>, second: Tracked<B>) -> Tracked<B> {
    let value = B::float_zeros(Shape::from([1]), &first.device(), DType::F32.into());
    let op = Backward::<B, 2>::prepare::<NoCheckpointing>(Join, [first.node(), second.node()]);
    op.compute_bound().stateless(value)
}

/// What the second run needs.
#[derive(Clone)]
struct State {
    run: Arc<Mutex<Box<Run>>>,
    /// Nodes of the inputs in the outer graph, in order, for those that are tracked.
    nodes: Vec<Option<NodeId>>,
    /// Random draws of the first run.
    draws: Vec<Draw>,
    /// Context of the output.
    context: AutodiffContext,
    saved: Saved,
    /// Counter of the forward that the first run was part of.
    counter: Option<Arc<dyn SavedCounter>>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

impl State {
    /// Runs the function again, and returns the gradient of each tracked input, given that of the
    /// result.
    fn gradients<B: ModelBackend>(self, grad: Float<B>) -> Vec<(NodeId, Float<B>)> {
        let Self { run, nodes, draws, context, saved: _saved, counter } = self;
        let (mut nodes, mut leaves) = (nodes.into_iter(), Vec::new());
        let output = {
            let _draws = Playback::start(draws);
            let run = run.lock().ignore_poison();
            let mut restore = |tensor: DispatchTensor| {
                let Some(node) = nodes.next().flatten() else { return tensor };
                let Some(value) = B::from_dispatch(tensor) else {
                    unreachable!("a tracked input is of this backend")
                };
                let leaf = new_leaf::<B>(value.into_inner());
                leaves.push((node, leaf.clone()));
                B::into_dispatch(FloatTensor::Autodiff(leaf, context))
            };
            saved::counted_by(counter, || run(&mut restore))
        };
        let Some(FloatTensor::Autodiff(output, _)) = B::from_dispatch(output) else {
            return Vec::new();
        };
        assert_eq!(output.shape(), grad.shape(), "the closure of `recompute` returns one shape");
        if !output.is_tracked() {
            return Vec::new();
        }
        // The gradient of this sum is `grad`, to the bit.
        let weighted = Autodiff::<B>::float_mul(output, Autodiff::<B>::from_inner(grad));
        let mut gradients = Autodiff::<B>::float_sum(weighted).backward();
        let gradient =
            |(node, leaf): (NodeId, Tracked<B>)| Some((node, leaf.grad_remove(&mut gradients)?));
        leaves.into_iter().filter_map(gradient).collect()
    }
}

/// Backward of a recomputed function. The parent is the tracked input, or joins several.
#[derive(Debug)]
struct Recompute;

impl<B: ModelBackend> Backward<B, 1> for Recompute {
    type State = State;

    fn backward(self, ops: Ops<State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        for (node, gradient) in ops.state.gradients::<B>(grad) {
            grads.register::<B>(node, gradient);
        }
    }
}

/// Orders operations. [`Recompute`] registers the gradients of the inputs.
#[derive(Debug)]
struct Join;

impl<B: ModelBackend> Backward<B, 2> for Join {
    type State = ();

    fn backward(self, _: Ops<(), 2>, _: &mut Gradients, _: &mut Checkpointer) {}
}
