//! Checkpointed units: a forward that records nothing, and its second run in backward.
//!
//! From `checkpoint` to its `post_forward`, every parameter is handed out without its leaf, and the
//! units within are gathered and resharded as ever, but leave no graph. In backward, one op of the
//! outer graph does all: it unshards the unit, runs the forward on leaves made from the kept inputs
//! and from shards, and then the backward of that new graph, in which the unit and those within
//! it reduce their gradients as ever. The unit is gathered once for both; those within it are
//! gathered for the forward and again for the backward.
//!
//! Depths count from each graph's own leaves, so the calls of the outer graph that run backward are
//! set aside meanwhile.

use std::ops::RangeInclusive;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::{Autodiff, AutodiffBackend, TensorMetadata};
use burn::tensor::{DispatchTensor, Shape};

use super::{Pass, Running, Schedule, State, When};
use crate::backend::{Float, FloatTensor, ShardBackend, StoredLeaf, Tracked, cast, new_leaf};
use crate::error::{Error, ScheduleError};
use crate::module::KeptForward;
use crate::module::Playback;
use crate::module::{CallId, ParamIndex};
use crate::options::BackwardPrefetch;
use crate::param_group::Placement;
use crate::param_group::memory::{Counted, MemoryKind};
use crate::runtime::autodiff::{State as OpState, zero};
use crate::runtime::recompute::{Arrived, KeptCall, KeptInput, Taken, descend, recompute, seed};
use crate::runtime::state::Checkpoint;

impl<B: ShardBackend> Schedule<B> {
    /// Whether a call is checkpointed: its unit is, and something would be recorded otherwise.
    pub(super) fn begin_checkpoint(&self, id: CallId, inputs: Vec<DispatchTensor>) -> bool {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(unit) = state.calls.get(&id).map(|call| call.unit) else { return false };
        let recorded = state.unrecorded.is_none() && state.recomputing.is_none();
        if !self.units[unit].checkpointed || !recorded {
            return false;
        }
        let is_tracked = |input: DispatchTensor| matches!(B::from_dispatch(input), Some(FloatTensor::Autodiff(input, _)) if input.is_tracked());
        let mut parents = Vec::new();
        if !inputs.into_iter().any(is_tracked) {
            // Then a parameter makes the outputs tracked.
            let Some(leaf) = self.first_leaf(state, unit) else { return false };
            parents.push(leaf);
        }
        let Some(call) = state.calls.get_mut(&id) else { return false };
        call.checkpoint = Some(Checkpoint::new(parents));
        state.unrecorded = Some(id);
        true
    }

    /// A unit and those within it.
    fn subtree(&self, unit: usize) -> RangeInclusive<usize> {
        let level = self.units[unit].level;
        let within = self.units[unit + 1..].iter().take_while(|inner| inner.level > level).count();
        unit..=unit + within
    }

    /// The leaves that tied places in a unit and in those within it take theirs from.
    fn tied_leaves(&self, state: &State<B>, unit: usize) -> Vec<(ParamIndex, StoredLeaf<B>)> {
        let leaf = |unit: usize, held: &Placement| {
            let &Placement::TiedTo(entry) = held else { return None };
            let shard = state.units[unit].shards[entry].as_ref()?;
            Some((ParamIndex { unit, entry }, shard.leaf.clone()?))
        };
        let places = self.subtree(unit).flat_map(|unit| {
            self.units[unit].entries.iter().filter_map(move |entry| leaf(unit, &entry.held))
        });
        places.collect()
    }

    /// The leaf of a trainable parameter in a unit, or in one within it.
    fn first_leaf(&self, state: &State<B>, unit: usize) -> Option<Tracked<B>> {
        let units = &state.units[self.subtree(unit)];
        let mut shards = units.iter().flat_map(|unit| &unit.shards).flatten();
        let leaf = shards.find_map(|shard| shard.leaf.as_ref())?;
        Some(descend(leaf, &self.device))
    }

    /// An input of a checkpointed call without its graph.
    pub(super) fn without_graph(&self, id: CallId, input: DispatchTensor) -> DispatchTensor {
        let mut state = self.lock();
        let Some(checkpoint) = checkpoint(&mut state, id) else { return input };
        match B::from_dispatch(input.clone()) {
            Some(FloatTensor::Autodiff(tensor, context)) => {
                let value = Autodiff::<B>::from_inner(tensor.primitive().clone());
                let node = tensor.is_tracked().then(|| tensor.id());
                checkpoint.bytes += tensor.shape().num_elements() * tensor.dtype().size();
                checkpoint.inputs.push(KeptInput { node, host: None });
                checkpoint.parents.extend(node.map(|_| tensor));
                B::into_dispatch(FloatTensor::Autodiff(value, context))
            }
            _ => {
                checkpoint.inputs.push(KeptInput { node: None, host: None });
                input
            }
        }
    }

    /// What of an input is kept where it lies: all of it, or one element, where the rest goes to the
    /// host. Inputs come here in the order in which they were detached.
    pub(super) fn stow(&self, id: CallId, input: DispatchTensor) -> DispatchTensor {
        if !self.settings.offload_activations {
            return input;
        }
        let mut state = self.lock();
        let Some(checkpoint) = checkpoint(&mut state, id) else { return input };
        let at = checkpoint.stowed;
        checkpoint.stowed += 1;
        let Some(FloatTensor::Autodiff(tensor, context)) = B::from_dispatch(input.clone()) else {
            return input;
        };
        let (rank, dtype) = (tensor.shape().num_dims(), tensor.dtype());
        let Some(data) = B::to_host(tensor.into_primitive()) else { return input };
        checkpoint.inputs[at].host = Some(data);
        let stand_in = B::float_zeros(Shape::from(vec![1; rank]), &self.device, dtype.into());
        B::into_dispatch(FloatTensor::Autodiff(Autodiff::<B>::from_inner(stand_in), context))
    }

    /// The forward of a checkpointed call has run; it is kept with its inputs.
    pub(super) fn end_checkpoint(&self, id: CallId, forward: KeptForward) {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some(unit) = state.calls.get(&id).map(|call| call.unit) {
            let tied = self.tied_leaves(state, unit);
            state.calls.entry(id).and_modify(|call| call.tied = tied);
        }
        if let Some(checkpoint) = checkpoint(state, id) {
            let inputs = std::mem::take(&mut checkpoint.inputs);
            let on_host = inputs.iter().filter_map(|input| input.host.as_ref());
            let on_host = on_host.map(|data| data.num_elements() * data.dtype().size()).sum();
            let here = checkpoint.bytes - on_host;
            let counted = [(MemoryKind::Activations, here), (MemoryKind::Stowed, on_host)]
                .map(|(kind, bytes)| Counted::new(&self.tracker, kind, bytes));
            checkpoint.kept = Some(KeptCall::new(inputs, forward, counted));
        }
    }

    /// What a checkpointed call keeps, and the parent of its outputs, made for the first of them.
    pub(super) fn kept(&self, id: CallId) -> Option<(Arc<KeptCall<B>>, Tracked<B>)> {
        let hooks = self.this();
        let mut state = self.lock();
        let call = state.calls.get_mut(&id)?;
        let (alive, checkpoint) = (call.open.clone()?, call.checkpoint.as_mut()?);
        let kept = checkpoint.kept.clone()?;
        if checkpoint.parent.is_none() {
            let parents = std::mem::take(&mut checkpoint.parents);
            let op_state = OpState { hooks, call: id, alive };
            checkpoint.parent = recompute(op_state, kept.clone(), parents);
        }
        Some((kept, checkpoint.parent.clone()?))
    }

    /// Runs a checkpointed forward again, and its backward with the gradients of its outputs.
    /// Returns what to register for its inputs.
    pub(super) fn run_again(
        &self,
        op: &OpState<B>,
        reached: usize,
        kept: &KeptCall<B>,
    ) -> Result<Vec<(NodeId, Float<B>)>, Error> {
        let Some(taken) = kept.take() else { return Ok(Vec::new()) };
        let Taken { forward, inputs, outputs, counted: _counted } = taken;
        let mut again = Again::begin(self, op, reached)?;
        let mut inputs = inputs.into_iter();
        let mut leaves = Vec::new();
        let mut leaf = |tensor: DispatchTensor| {
            let input = inputs.next().unwrap_or(KeptInput { node: None, host: None });
            let Some(FloatTensor::Autodiff(value, context)) = B::from_dispatch(tensor.clone())
            else {
                return tensor;
            };
            let value = match input.host {
                Some(data) => B::float_from_data(data, &self.device),
                None => value.into_primitive(),
            };
            let value = match input.node {
                Some(node) => {
                    let leaf = new_leaf::<B>(value);
                    leaves.push((node, leaf.clone()));
                    leaf
                }
                None => Autodiff::<B>::from_inner(value),
            };
            B::into_dispatch(FloatTensor::Autodiff(value, context))
        };
        let found = {
            let _draws = Playback::start(forward.draws);
            (forward.run)(&mut leaf)
        };
        again.end_forward();
        let root = self.seeds(again.unit, found, outputs)?;
        let mut gradients = root.map(|root| root.backward());
        again.end()?;
        let mut registered = Vec::new();
        for (node, leaf) in leaves {
            // As other units do, for an input that is not used.
            registered.push((node, zero::<B>(leaf.shape(), &self.device, leaf.dtype())));
            let gradient = gradients.as_mut().and_then(|gradients| leaf.grad_remove(gradients));
            registered.extend(gradient.map(|gradient| (node, gradient)));
        }
        Ok(registered)
    }

    /// The end of a recomputed graph: gives each output the gradient that arrived for it.
    fn seeds(
        &self,
        unit: usize,
        found: Vec<DispatchTensor>,
        expected: Vec<Arrived<B>>,
    ) -> Result<Option<Tracked<B>>, Error> {
        let tensor = |output| match B::from_dispatch(output)? {
            FloatTensor::Autodiff(output, _) => Some(output),
            FloatTensor::Plain(_) => None,
        };
        let found: Vec<Tracked<B>> = found.into_iter().filter_map(tensor).collect();
        let shapes = found.iter().map(TensorMetadata::shape);
        let name = || self.units[unit].name.to_string();
        if !shapes.clone().eq(expected.iter().map(|arrived| arrived.shape.clone())) {
            return Err(ScheduleError::OtherOutputs {
                unit: name(),
                expected: expected.iter().map(|arrived| arrived.shape.to_vec()).collect(),
                found: shapes.map(|shape| shape.to_vec()).collect(),
            }
            .into());
        }
        let mut pairs = found.iter().zip(&expected);
        if !pairs.all(|(found, arrived)| arrived.is_again(found.primitive())) {
            return Err(ScheduleError::OtherValues { unit: name() }.into());
        }
        let outputs = found.into_iter().zip(expected).filter(|(output, _)| output.is_tracked());
        // It may have been cast when it left.
        let gradient = |(output, arrived): (Tracked<B>, Arrived<B>)| {
            let gradient = cast::<B>(arrived.gradient?, output.dtype());
            Some((output, gradient))
        };
        Ok(seed(outputs.filter_map(gradient)))
    }
}

fn checkpoint<B: ShardBackend>(state: &mut State<B>, id: CallId) -> Option<&mut Checkpoint<B>> {
    state.calls.get_mut(&id)?.checkpoint.as_mut()
}

/// How far a recomputation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Begun,
    Forward,
    Backward,
    Ended,
}

/// A recomputation under way; dropped before its end, it was left by an error.
struct Again<'a, B: ShardBackend> {
    schedule: &'a Schedule<B>,
    call: CallId,
    unit: usize,
    stage: Stage,
    /// The calls of the outer graph that run backward.
    outer: Vec<Running>,
}

impl<'a, B: ShardBackend> Again<'a, B> {
    /// Unshards the unit, for its forward and its backward.
    fn begin(schedule: &'a Schedule<B>, op: &OpState<B>, reached: usize) -> Result<Self, Error> {
        let id = op.call;
        let mut again =
            Self { schedule, call: id, unit: 0, stage: Stage::Ended, outer: Vec::new() };
        let mut guard = schedule.lock();
        let state = &mut *guard;
        schedule.end_calls(state, reached)?;
        let call = state.calls.get_mut(&id).expect("a call lives as long as its ops");
        let unit = call.unit;
        let name = &schedule.units[unit].name;
        let _span =
            tracing::trace_span!(target: "fsdp", "fsdp::pre_backward", unit = %name).entered();
        call.entered = true;
        call.open = Some(op.alive.clone());
        for (place, leaf) in std::mem::take(&mut call.tied) {
            if let Some(shard) = &mut state.units[place.unit].shards[place.entry] {
                shard.leaf = Some(leaf);
            }
        }
        state.units[unit].backwards += 1;
        again.unit = unit;
        again.outer = std::mem::take(&mut state.running);
        again.stage = Stage::Begun;
        schedule.unshard(state, unit, Pass::Backward, When::Now)?;
        schedule.wait_for_unshard(state, unit)?;
        if schedule.settings.backward_prefetch == BackwardPrefetch::Pre {
            schedule.prefetch_previous(state, unit)?;
        }
        tracing::trace!(target: "fsdp", unit = %name, "fsdp::recompute");
        state.units[unit].forwards.push(id);
        state.open += 1;
        state.recomputing = Some(id);
        again.stage = Stage::Forward;
        drop(guard);
        Ok(again)
    }

    /// The forward has run again.
    fn end_forward(&mut self) {
        let mut guard = self.schedule.lock();
        let state = &mut *guard;
        self.schedule.close(state, self.unit);
        self.stage = Stage::Backward;
        let Some(call) = state.calls.get_mut(&self.call) else { return };
        call.open = None;
        let (call, unit, reads_frozen) = (self.call, self.unit, call.reads_frozen);
        // Ends with the whole graph.
        state.running.push(Running { call, unit, inputs: 0, reads_frozen });
    }

    /// The backward has run.
    fn end(mut self) -> Result<(), Error> {
        let mut guard = self.schedule.lock();
        let state = &mut *guard;
        self.schedule.end_calls(state, 0)?;
        self.schedule.end_arrived(state, |call| call.part_of == Some(self.call))?;
        state.calls.retain(|_, call| call.part_of != Some(self.call));
        state.running = std::mem::take(&mut self.outer);
        state.recomputing = None;
        self.stage = Stage::Ended;
        Ok(())
    }
}

impl<B: ShardBackend> Drop for Again<'_, B> {
    fn drop(&mut self) {
        if self.stage == Stage::Ended {
            return;
        }
        let mut guard = self.schedule.lock();
        let state = &mut *guard;
        if self.stage == Stage::Forward {
            self.schedule.close(state, self.unit);
        }
        let left = state.running.iter().filter(|left| left.call != self.call);
        let left: Vec<usize> = left.map(|left| left.unit).collect();
        for unit in left.into_iter().chain([self.unit]) {
            let backwards = &mut state.units[unit].backwards;
            *backwards = backwards.saturating_sub(1);
        }
        state.calls.retain(|id, call| *id != self.call && call.part_of != Some(self.call));
        state.running = std::mem::take(&mut self.outer);
        state.recomputing = None;
    }
}
