//! The autodiff ops that carry gradients back into shards.
//!
//! *Gather* makes the full parameter from the shard's leaf. Its backward stores the full gradient
//! with the call it belongs to; the call's last one starts the unit's reduce-scatter. Its other
//! parents are the unit's inputs, which set its place in the order: Burn runs backward by depth, a
//! leaf's child has depth 1, and without them every unit would reduce at the very end.
//!
//! *PreBackward* is the identity on a unit's output. Its backward runs before that of any op of the
//! unit, and unshards the unit. The unit's inputs are its parents as well: once the pass has come
//! down to their depth, all ops of the unit have run, whatever gradients have not arrived.

use std::fmt::Debug;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::{DType, Shape};

use super::hooks::{Depth, State, zero};
use crate::backend::{Float, ShardBackend, StoredLeaf, Tracked};
use crate::error::raise;

/// The most inputs of a unit that a [`Gather`] is ordered after.
pub(crate) const MAX_ORDERING_INPUTS: usize = 3;

#[derive(Debug)]
struct Gather;

#[derive(Debug)]
struct GatherState<B: ShardBackend> {
    state: State<B>,
    entry: usize,
}

impl<B: ShardBackend> Clone for GatherState<B> {
    fn clone(&self) -> Self {
        Self { state: self.state.clone(), entry: self.entry }
    }
}

impl<B: ShardBackend, const N: usize> Backward<B, N> for Gather {
    type State = GatherState<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let GatherState { state, entry } = ops.state;
        let gradient = grads.consume::<B>(&ops.node);
        if let Err(error) = state.hooks.arrived(state.call, entry, gradient) {
            raise(error);
        }
    }
}

#[derive(Debug)]
struct PreBackward;

#[derive(Debug)]
struct OutputState<B: ShardBackend> {
    state: State<B>,
    /// The inputs' shapes and types.
    ordering_inputs: Vec<(Shape, DType)>,
}

impl<B: ShardBackend> Clone for OutputState<B> {
    fn clone(&self) -> Self {
        Self { state: self.state.clone(), ordering_inputs: self.ordering_inputs.clone() }
    }
}

impl<B: ShardBackend, const N: usize> Backward<B, N> for PreBackward {
    type State = OutputState<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let OutputState { state, ordering_inputs } = ops.state;
        // There may be more inputs than parents: then the least depth is not known.
        let least = ops.parents[1..].iter().flatten().map(|parent| parent.order).min();
        let least = least.filter(|_| N <= MAX_ORDERING_INPUTS).unwrap_or(0);
        let depth = Depth { reached: ops.node.order, inputs: least };
        let inputs = ops.parents[1..].iter().map(|parent| parent.as_ref().map(|node| node.id));
        let inputs = inputs.collect();
        let gradient = grads.consume::<B>(&ops.node);
        match state.hooks.pre_backward(state.call, depth) {
            Ok(true) => {
                zeros::<B>(grads, inputs, ordering_inputs, &gradient.device());
            }
            Ok(false) => {}
            Err(error) => raise(error),
        }
        if let Some(parent) = &ops.parents[0] {
            grads.register::<B>(parent.id, gradient);
        }
    }
}

/// Burn expects a gradient at every parent. A unit's inputs have one from the unit's own ops, unless
/// the unit does not use an input at all; zeros, one element wide, serve both.
fn zeros<B: ShardBackend>(
    grads: &mut Gradients,
    inputs: Vec<Option<NodeId>>,
    ordering_inputs: Vec<(Shape, DType)>,
    device: &B::Device,
) {
    for (input, (shape, dtype)) in inputs.into_iter().zip(ordering_inputs) {
        let Some(input) = input else { continue };
        grads.register::<B>(input, zero::<B>(shape, device, dtype));
    }
}

/// The full parameter `value` as the child of its shard's leaf, ordered after `ordering_inputs`.
pub(crate) fn gather<B: ShardBackend>(
    state: State<B>,
    entry: usize,
    leaf: &StoredLeaf<B>,
    ordering_inputs: &[Tracked<B>],
    value: Float<B>,
) -> Tracked<B> {
    let state = GatherState { state, entry };
    macro_rules! record {
        ($n:literal, [$($ordering_input:ident),*]) => {{
            let nodes = [leaf.node() $(, $ordering_input.node())*];
            let op = Backward::<B, $n>::prepare::<NoCheckpointing>(Gather, nodes);
            match op.compute_bound().stateful() {
                OpsKind::Tracked(op) => op.finish(state, value),
                OpsKind::UnTracked(op) => op.finish(value),
            }
        }};
    }
    match ordering_inputs {
        [] => record!(1, []),
        [a] => record!(2, [a]),
        [a, b] => record!(3, [a, b]),
        [a, b, c, ..] => record!(4, [a, b, c]),
    }
}

/// A unit's output, whose gradient first unshards the unit. `detach` copies what looks into the
/// unit's buffer; `ordering_inputs` are the unit's inputs.
pub(crate) fn pre_backward<B: ShardBackend>(
    state: State<B>,
    output: Tracked<B>,
    ordering_inputs: &[Tracked<B>],
    detach: impl FnOnce(Float<B>) -> Float<B>,
) -> Tracked<B> {
    let (value, output) = output.into_parts();
    let value = detach(value);
    let shapes = ordering_inputs
        .iter()
        .map(|ordering_input| (ordering_input.shape(), ordering_input.dtype()))
        .collect();
    let state = OutputState { state, ordering_inputs: shapes };
    macro_rules! record {
        ($n:literal, [$($ordering_input:ident),*]) => {{
            let nodes = [output $(, $ordering_input.node())*];
            let op = Backward::<B, $n>::prepare::<NoCheckpointing>(PreBackward, nodes);
            match op.compute_bound().stateful() {
                OpsKind::Tracked(op) => op.finish(state, value),
                OpsKind::UnTracked(op) => op.finish(value),
            }
        }};
    }
    match ordering_inputs {
        [] => record!(1, []),
        [a] => record!(2, [a]),
        [a, b] => record!(3, [a, b]),
        [a, b, c, ..] => record!(4, [a, b, c]),
    }
}
