//! The autodiff ops of a checkpointed unit, whose forward recorded nothing.
//!
//! *Output* is the identity on each output of the unit. Its backward puts the gradient aside for
//! *Recompute*, the parent of all outputs, which therefore runs when the last of their gradients has
//! arrived. It has the schedule run the forward again, on a graph of its own, and gives the inputs
//! their gradients. That graph shares no node with the outer one, whose lock is held meanwhile: its
//! leaves are made anew from the inputs and shards.
//!
//! The inputs are the ancestors of *Recompute*, so that it runs before anything above them, through
//! as many *Join*s as it takes. A unit without a tracked input has the leaf of a parameter there.
//!
//! *Seed* ends the graph of the recomputed forward: its backward gives an output the gradient that
//! was put aside.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::{DType, Shape};

use super::kept::{Arrived, KeptCall};
use crate::backend::{Float, ShardBackend, StoredLeaf, Tracked};
use crate::error::raise;
use crate::runtime::autodiff::State;

#[derive(Debug)]
struct Join;

impl<B: ShardBackend, const N: usize> Backward<B, N> for Join {
    type State = ();

    /// Only an order: gradients go from `Recompute` to the inputs.
    fn backward(self, _: Ops<(), N>, _: &mut Gradients, _: &mut Checkpointer) {}
}

#[derive(Debug)]
struct Recompute;

#[derive(Debug)]
struct RecomputeState<B: ShardBackend> {
    state: State<B>,
    kept: Arc<KeptCall<B>>,
}

impl<B: ShardBackend> Clone for RecomputeState<B> {
    fn clone(&self) -> Self {
        Self { state: self.state.clone(), kept: self.kept.clone() }
    }
}

impl<B: ShardBackend> Backward<B, 1> for Recompute {
    type State = RecomputeState<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let RecomputeState { state, kept } = ops.state;
        match state.hooks.recompute(&state, ops.node.order, &kept) {
            Ok(gradients) => {
                for (input, gradient) in gradients {
                    grads.register::<B>(input, gradient);
                }
            }
            Err(error) => raise(error),
        }
    }
}

/// The parent of a checkpointed unit's outputs; `parents` are its tracked inputs, or what else there
/// is to make them tracked. `None` where there is nothing.
pub(crate) fn recompute<B: ShardBackend>(
    state: State<B>,
    kept: Arc<KeptCall<B>>,
    parents: Vec<Tracked<B>>,
) -> Option<Tracked<B>> {
    let parent = parents.into_iter().reduce(|first, second| {
        let value = nothing::<B>(&second);
        let op = Backward::<B, 2>::prepare::<NoCheckpointing>(Join, [first.node(), second.node()]);
        op.compute_bound().stateless(value)
    })?;
    let value = nothing::<B>(&parent);
    let op = Backward::<B, 1>::prepare::<NoCheckpointing>(Recompute, [parent.node()]);
    Some(match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(RecomputeState { state, kept }, value),
        OpsKind::UnTracked(op) => op.finish(value),
    })
}

/// A parameter's leaf, or, where that rests elsewhere, what comes from it on the device.
pub(crate) fn descend<B: ShardBackend>(leaf: &StoredLeaf<B>, device: &B::Device) -> Tracked<B> {
    if let StoredLeaf::Device(leaf) = leaf {
        return leaf.clone();
    }
    let value = B::float_zeros(Shape::from([1]), device, DType::F32.into());
    let op = Backward::<B, 1>::prepare::<NoCheckpointing>(Join, [leaf.node()]);
    op.compute_bound().stateless(value)
}

/// The value of an op that has none: one element.
fn nothing<B: ShardBackend>(beside: &Tracked<B>) -> Float<B> {
    B::float_zeros(Shape::from([1]), &beside.device(), beside.dtype().into())
}

#[derive(Debug)]
struct Output;

#[derive(Debug)]
struct OutputState<B: ShardBackend> {
    kept: Arc<KeptCall<B>>,
    index: usize,
}

impl<B: ShardBackend> Clone for OutputState<B> {
    fn clone(&self) -> Self {
        Self { kept: self.kept.clone(), index: self.index }
    }
}

impl<B: ShardBackend> Backward<B, 1> for Output {
    type State = OutputState<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let OutputState { kept, index } = ops.state;
        let gradient = grads.consume::<B>(&ops.node);
        if let Some(output) = kept.lock().outputs.get_mut(index) {
            output.gradient = Some(gradient);
        }
    }
}

/// The next output of a checkpointed unit, as the child of [`recompute`]'s op.
pub(crate) fn output<B: ShardBackend>(
    kept: &Arc<KeptCall<B>>,
    parent: &Tracked<B>,
    value: Float<B>,
) -> Tracked<B> {
    let index = {
        let outputs = &mut kept.lock().outputs;
        outputs.push(Arrived::new(&value));
        outputs.len() - 1
    };
    let op = Backward::<B, 1>::prepare::<NoCheckpointing>(Output, [parent.node()]);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(OutputState { kept: kept.clone(), index }, value),
        OpsKind::UnTracked(op) => op.finish(value),
    }
}

#[derive(Debug)]
struct Seed;

#[derive(Debug)]
struct SeedState<B: ShardBackend>(Float<B>);

impl<B: ShardBackend> Clone for SeedState<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: ShardBackend, const N: usize> Backward<B, N> for Seed {
    type State = SeedState<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        if let Some(output) = &ops.parents[0] {
            grads.register::<B>(output.id, ops.state.0);
        }
    }
}

/// One element whose backward gives each output its gradient; `None` where no output is tracked.
pub(crate) fn seed<B: ShardBackend>(
    outputs: impl IntoIterator<Item = (Tracked<B>, Float<B>)>,
) -> Option<Tracked<B>> {
    let mut root: Option<Tracked<B>> = None;
    for (output, gradient) in outputs {
        let (value, state) = (nothing::<B>(&output), SeedState(gradient));
        macro_rules! record {
            ($n:literal, $nodes:expr) => {{
                let op = Backward::<B, $n>::prepare::<NoCheckpointing>(Seed, $nodes);
                match op.compute_bound().stateful() {
                    OpsKind::Tracked(op) => op.finish(state, value),
                    OpsKind::UnTracked(op) => op.finish(value),
                }
            }};
        }
        root = Some(match &root {
            None => record!(1, [output.node()]),
            Some(root) => record!(2, [output.node(), root.node()]),
        });
    }
    root
}
