//! The autodiff operations of a recomputed unit, whose first forward recorded no graph.
//!
//! *Output* is the identity on each output of the unit. The backward saves the gradient for
//! *Recompute*, the parent of all outputs, which therefore runs when the last of the gradients has
//! arrived. *Recompute* has the schedule recompute the forward on a separate graph, and registers
//! the gradients of the inputs. The separate graph has new leaves, made from the inputs and the
//! shards, and shares no node with the outer graph, because Burn locks the outer graph during its
//! backward.
//!
//! The inputs are ancestors of *Recompute*, so that it runs backward before any operation that the
//! inputs depend on. *Join* connects two inputs; as many as needed form a chain. If a unit has no
//! tracked input, the leaf of one of its parameters takes that place.
//!
//! *Seed* ends the graph of the recomputed forward: its backward gives each output the gradient
//! that was saved for it.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::tensor::{DType, Shape};

use super::super::recompute::SavedCall;
use super::hooks::OpState;
use super::record::record;
use crate::backend::{Float, ModelBackend, StoredLeaf, Tracked};
use crate::error::raise;

#[derive(Debug)]
struct Join;

impl<B: ModelBackend, const N: usize> Backward<B, N> for Join {
    type State = ();

    /// Does nothing: a `Join` only orders operations, and `Recompute` registers the gradients of
    /// the inputs.
    fn backward(self, _: Ops<(), N>, _: &mut Gradients, _: &mut Checkpointer) {}
}

#[derive(Debug)]
struct Recompute;

#[derive(Debug)]
struct RecomputeState<B: ModelBackend> {
    state: OpState<B>,
    saved: Arc<SavedCall<B>>,
}

impl<B: ModelBackend> Clone for RecomputeState<B> {
    fn clone(&self) -> Self {
        Self { state: self.state.clone(), saved: self.saved.clone() }
    }
}

impl<B: ModelBackend> Backward<B, 1> for Recompute {
    type State = RecomputeState<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let RecomputeState { state, saved } = ops.state;
        match state.hooks.recompute(&state, ops.node.order, &saved) {
            Ok(gradients) => {
                for (input, gradient) in gradients {
                    grads.register::<B>(input, gradient);
                }
            }
            Err(error) => raise(error),
        }
    }
}

/// Records the parent of a recomputed unit's outputs. `parents` are the unit's tracked inputs, or a
/// leaf in their place. Returns `None` if there are none.
pub(in crate::runtime) fn recompute<B: ModelBackend>(
    state: OpState<B>,
    saved: Arc<SavedCall<B>>,
    parents: Vec<Tracked<B>>,
) -> Option<Tracked<B>> {
    let parent = parents.into_iter().reduce(|first, second| {
        let value = placeholder::<B>(&second);
        let op = Backward::<B, 2>::prepare::<NoCheckpointing>(Join, [first.node(), second.node()]);
        op.compute_bound().stateless(value)
    })?;
    let value = placeholder::<B>(&parent);
    Some(record(Recompute, [parent.node()], RecomputeState { state, saved }, value))
}

/// Returns a parameter's leaf. If the leaf is on another device, returns a child of it on `device`.
pub(in crate::runtime) fn tracked_on_device<B: ModelBackend>(
    leaf: &StoredLeaf<B>,
    device: &B::Device,
) -> Tracked<B> {
    if let StoredLeaf::Device(leaf) = leaf {
        return leaf.clone();
    }
    let value = B::float_zeros(Shape::from([1]), device, DType::F32.into());
    let op = Backward::<B, 1>::prepare::<NoCheckpointing>(Join, [leaf.node()]);
    op.compute_bound().stateless(value)
}

/// Returns a tensor of one element, for an operation without a result, on the device and in the
/// dtype of `like`.
fn placeholder<B: ModelBackend>(like: &Tracked<B>) -> Float<B> {
    B::float_zeros(Shape::from([1]), &like.device(), like.dtype().into())
}

#[derive(Debug)]
struct Output;

#[derive(Debug)]
struct OutputState<B: ModelBackend> {
    saved: Arc<SavedCall<B>>,
    index: usize,
}

impl<B: ModelBackend> Clone for OutputState<B> {
    fn clone(&self) -> Self {
        Self { saved: self.saved.clone(), index: self.index }
    }
}

impl<B: ModelBackend> Backward<B, 1> for Output {
    type State = OutputState<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let OutputState { saved, index } = ops.state;
        saved.set_gradient(index, grads.consume::<B>(&ops.node));
    }
}

/// Records the next output of a recomputed unit, as a child of the result of [`recompute`].
pub(in crate::runtime) fn output<B: ModelBackend>(
    saved: &Arc<SavedCall<B>>,
    parent: &Tracked<B>,
    value: Float<B>,
) -> Tracked<B> {
    let index = saved.add_output(&value);
    record(Output, [parent.node()], OutputState { saved: saved.clone(), index }, value)
}

#[derive(Debug)]
struct Seed;

#[derive(Debug)]
struct SeedState<B: ModelBackend>(Float<B>);

impl<B: ModelBackend> Clone for SeedState<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: ModelBackend, const N: usize> Backward<B, N> for Seed {
    type State = SeedState<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        if let Some(output) = &ops.parents[0] {
            grads.register::<B>(output.id, ops.state.0);
        }
    }
}

/// Records a tensor of one element whose backward gives each output the paired gradient. Returns
/// `None` if there are no outputs.
pub(in crate::runtime) fn seed<B: ModelBackend>(
    outputs: impl IntoIterator<Item = (Tracked<B>, Float<B>)>,
) -> Option<Tracked<B>> {
    let mut root: Option<Tracked<B>> = None;
    for (output, gradient) in outputs {
        let (value, state) = (placeholder::<B>(&output), SeedState(gradient));
        root = Some(match &root {
            None => record(Seed, [output.node()], state, value),
            Some(root) => record(Seed, [output.node(), root.node()], state, value),
        });
    }
    root
}
