//! *Gather*: the full parameter, as a function of this rank's shard.
//!
//! The forward value is a view of the gather buffer. The backward passes the full gradient to the
//! schedule; the last gradient of a call starts the unit's reduce-scatter.
//!
//! The parents are the shard's leaf and the unit's inputs. The inputs fix the position of the
//! operation in backward: Burn runs backward by depth, and the child of a leaf has depth 1. Without
//! the inputs every unit would be reduced at the very end.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};

use super::hooks::OpState;
use super::record::record_after;
use crate::backend::{Float, ModelBackend, StoredLeaf, Tracked};
use crate::error::raise;

#[derive(Debug)]
struct Gather;

#[derive(Debug)]
struct GatherState<B: ModelBackend> {
    state: OpState<B>,
    entry: usize,
}

impl<B: ModelBackend> Clone for GatherState<B> {
    fn clone(&self) -> Self {
        Self { state: self.state.clone(), entry: self.entry }
    }
}

impl<B: ModelBackend, const N: usize> Backward<B, N> for Gather {
    type State = GatherState<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let GatherState { state, entry } = ops.state;
        let gradient = grads.consume::<B>(&ops.node);
        if let Err(error) = state.hooks.add_gradient(state.call, entry, gradient) {
            raise(error);
        }
    }
}

/// Records the full parameter `value` as the child of its shard's leaf, ordered after
/// `ordering_inputs`.
pub(in crate::runtime) fn gather<B: ModelBackend>(
    state: OpState<B>,
    entry: usize,
    leaf: &StoredLeaf<B>,
    ordering_inputs: &[Tracked<B>],
    value: Float<B>,
) -> Tracked<B> {
    let state = GatherState { state, entry };
    record_after(Gather, leaf.node(), ordering_inputs, state, value)
}
