//! The first run of a recomputed unit's forward, which records no graph and saves the inputs.
//!
//! From `begin_recomputed_forward` to the `post_forward` of the call, every parameter is handed out without
//! its leaf. The units inside are gathered and resharded as usual, but leave no graph.

use std::ops::RangeInclusive;
use std::sync::Arc;

use burn::backend::{Autodiff, AutodiffBackend, TensorMetadata};
use burn::tensor::{DispatchTensor, Shape};

use super::super::autodiff::{self, OpState, tracked_on_device};
use super::super::recompute::{SavedCall, SavedInput};
use super::core::Schedule;
use super::state::State;
use super::unit_call::RecomputedForward;
use crate::backend::{FloatTensor, ModelBackend, Raw, ShardBackend, StoredLeaf, Tracked};
use crate::module::{CallId, ParamIndex, SavedForward};
use crate::param_group::Placement;
use crate::param_group::memory::{Counted, MemoryKind};

impl<B: ModelBackend> Schedule<B> {
    /// Begins the first run of a call, if the unit is recomputed in backward and the call would
    /// otherwise record a graph. Returns whether it did.
    pub(super) fn begin_recomputed_forward(&self, id: CallId, inputs: Vec<DispatchTensor>) -> bool {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(unit) = self.unit_to_recompute(state, id) else { return false };
        let mut parents = Vec::new();
        if !inputs.into_iter().any(is_tracked::<B>) {
            // The leaf of a parameter makes the outputs tracked in place of an input.
            let Some(leaf) = self.first_leaf(state, unit) else { return false };
            parents.push(leaf);
        }
        let Some(call) = state.calls.get_mut(&id) else { return false };
        call.recomputed = Some(RecomputedForward::new(parents));
        state.recompute.first_run = Some(id);
        true
    }

    /// Returns the unit of a call if it is recomputed in backward, and not inside another one that is.
    fn unit_to_recompute(&self, state: &State<B>, id: CallId) -> Option<usize> {
        let unit = state.calls.get(&id)?.unit;
        let recompute = &state.recompute;
        let is_inside = recompute.first_run.is_some() || recompute.second_run.is_some();
        (self.units[unit].recomputed && !is_inside).then_some(unit)
    }

    /// Returns the name and the type of the unit of a call that is recomputed in backward, if a
    /// parameter of it is trained.
    pub(super) fn recomputed_unit(&self, id: CallId) -> Option<(String, &'static str)> {
        let state = self.lock();
        let unit = self.unit_to_recompute(&state, id)?;
        self.first_leaf(&state, unit)?;
        Some((self.units[unit].name.to_string(), self.units[unit].ty))
    }

    /// Returns the range of a unit and all units inside it, in layout order.
    fn subtree(&self, unit: usize) -> RangeInclusive<usize> {
        let level = self.units[unit].level;
        let inside = self.units[unit + 1..].iter().take_while(|inner| inner.level > level).count();
        unit..=unit + inside
    }

    /// Returns the leaves that own the tied parameters of a unit and of all units inside it.
    fn tied_leaves(&self, state: &State<B>, unit: usize) -> Vec<(ParamIndex, StoredLeaf<B>)> {
        let leaf = |unit: usize, placement: &Placement| {
            let &Placement::TiedTo(entry) = placement else { return None };
            let shard = state.units[unit].shards[entry].as_ref()?;
            Some((ParamIndex { unit, param: entry }, shard.leaf.clone()?))
        };
        let leaves = self.subtree(unit).flat_map(|unit| {
            self.units[unit].params.iter().filter_map(move |entry| leaf(unit, &entry.placement))
        });
        leaves.collect()
    }

    /// Returns the leaf of the first trainable parameter in a unit or in a unit inside it.
    fn first_leaf(&self, state: &State<B>, unit: usize) -> Option<Tracked<B>> {
        let units = &state.units[self.subtree(unit)];
        let mut shards = units.iter().flat_map(|unit| &unit.shards).flatten();
        let leaf = shards.find_map(|shard| shard.leaf.as_ref())?;
        Some(tracked_on_device(leaf, &self.device))
    }

    /// Returns an input of a recomputed call without its graph, and saves the input's node.
    pub(super) fn detach_input(&self, id: CallId, input: DispatchTensor) -> DispatchTensor {
        let mut state = self.lock();
        let Some(forward) = recomputed_forward(&mut state, id) else { return input };
        match B::from_dispatch(input.clone()) {
            Some(FloatTensor::Autodiff(tensor, context)) => {
                let value = Autodiff::<B>::from_inner(tensor.primitive().clone());
                let node = tensor.is_tracked().then(|| tensor.id());
                forward.bytes += tensor.shape().num_elements() * tensor.dtype().size();
                forward.inputs.push(SavedInput { node, host: None });
                forward.parents.extend(node.map(|_| tensor));
                B::into_dispatch(FloatTensor::Autodiff(value, context))
            }
            _ => {
                forward.inputs.push(SavedInput { node: None, host: None });
                input
            }
        }
    }

    /// Offloads an input to the host if the options say so. Returns the tensor to keep on the
    /// device: the input itself, or one element after an offload. Inputs arrive in the order in
    /// which they were detached.
    pub(super) fn save_input(&self, id: CallId, input: DispatchTensor) -> DispatchTensor {
        if !self.settings.offload_activations {
            return input;
        }
        let mut state = self.lock();
        let Some(forward) = recomputed_forward(&mut state, id) else { return input };
        let at = forward.offloaded;
        forward.offloaded += 1;
        let Some(FloatTensor::Autodiff(tensor, context)) = B::from_dispatch(input.clone()) else {
            return input;
        };
        let (rank, dtype) = (tensor.shape().num_dims(), tensor.dtype());
        if Raw::<B>::IN_HOST_MEMORY {
            return input;
        }
        let buffers = self.lower_values(vec![tensor.into_primitive()]);
        forward.inputs[at].host = buffers.into_iter().next().map(Raw::<B>::to_data);
        let stand_in = B::float_zeros(Shape::from(vec![1; rank]), &self.device, dtype.into());
        B::into_dispatch(FloatTensor::Autodiff(Autodiff::<B>::from_inner(stand_in), context))
    }

    /// Saves a recomputed forward with its inputs, after the first run.
    pub(super) fn save_forward(&self, id: CallId, forward: SavedForward) {
        let mut guard = self.lock();
        let state = &mut *guard;
        let unit = state.calls.get(&id).map(|call| call.unit);
        if let Some(unit) = unit {
            let leaves = self.tied_leaves(state, unit);
            state.calls.entry(id).and_modify(|call| call.tied_leaves = leaves);
        }
        if let Some(first) = recomputed_forward(state, id) {
            let inputs = std::mem::take(&mut first.inputs);
            let on_host = inputs.iter().filter_map(|input| input.host.as_ref());
            let on_host = on_host.map(|data| data.num_elements() * data.dtype().size()).sum();
            let on_device = first.bytes - on_host;
            let counted =
                [(MemoryKind::Activations, on_device), (MemoryKind::OffloadedActivations, on_host)]
                    .map(|(kind, bytes)| Counted::new(&self.tracker, kind, bytes, unit));
            first.saved = Some(SavedCall::new(inputs, forward, counted));
        }
    }

    /// Returns the data that a recomputed call saved, and the parent of its outputs, which the
    /// first output records. Returns `None` if the call is not recomputed.
    pub(super) fn saved_call(&self, id: CallId) -> Option<(Arc<SavedCall<B>>, Tracked<B>)> {
        let hooks = self.this();
        let mut state = self.lock();
        let call = state.calls.get_mut(&id)?;
        let (alive, forward) = (call.open.clone()?, call.recomputed.as_mut()?);
        let saved = forward.saved.clone()?;
        if forward.parent.is_none() {
            let parents = std::mem::take(&mut forward.parents);
            let op_state = OpState { hooks, call: id, alive };
            forward.parent = autodiff::recompute(op_state, saved.clone(), parents);
        }
        Some((saved, forward.parent.clone()?))
    }
}

/// Returns whether a tensor is a tracked float tensor of the backend `B`.
pub(super) fn is_tracked<B: ModelBackend>(tensor: DispatchTensor) -> bool {
    matches!(B::from_dispatch(tensor), Some(FloatTensor::Autodiff(tensor, _)) if tensor.is_tracked())
}

/// Returns the first run of a call, if the call is recomputed.
fn recomputed_forward<B: ModelBackend>(
    state: &mut State<B>,
    id: CallId,
) -> Option<&mut RecomputedForward<B>> {
    state.calls.get_mut(&id)?.recomputed.as_mut()
}
