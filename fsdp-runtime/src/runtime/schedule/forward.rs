//! The forward half: `pre_forward`, the values parameters take, `post_forward`.

use std::sync::Arc;

use burn::backend::{Autodiff, AutodiffBackend, TensorMetadata};
use burn::tensor::{DType, DispatchTensor, Shape};

use super::{Pass, Reshard, Schedule, State, When, count};
use crate::backend::{
    AutodiffContext, Float, FloatTensor, ShardBackend, StorageDevice, StoredLeaf, StoredTensor,
    Tracked, cast,
};
use crate::collectives::{Op, ProcessGroup};
use crate::error::raise;
use crate::error::{Error, ScheduleError};
use crate::module::KeptForward;
use crate::module::{CallId, ParamIndex, Runtime};
use crate::param_group::Placement;
use crate::param_group::memory::MemoryKind;
use crate::runtime::autodiff::{self, MAX_ORDERING_INPUTS, State as OpState};
use crate::runtime::recompute;
use crate::runtime::state::{Call, LocalShard, ShardState};

impl<B: ShardBackend> Runtime for Schedule<B> {
    fn is_open(&self) -> bool {
        self.lock().open > 0
    }

    fn is_field_unit(&self, unit: usize) -> bool {
        self.units[unit].field
    }

    fn collect(&self, place: ParamIndex, base: DispatchTensor) {
        let Some((value, leaf, _)) = StoredTensor::from_dispatch(base, self.settings.rest) else {
            return;
        };
        let shard = LocalShard::new(value, leaf);
        self.lock().units[place.unit].shards[place.entry] = Some(shard);
    }

    fn pre_forward(
        &self,
        unit: usize,
        inputs: Vec<DispatchTensor>,
    ) -> Result<Option<CallId>, Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if !state.units[unit].forwards.is_empty() {
            return Ok(None);
        }
        let _span = tracing::trace_span!(target: "fsdp", "fsdp::pre_forward", unit = %self.units[unit].name).entered();
        if state.open == 0 {
            self.begin(state)?;
        }
        let at = state.order.len();
        // A recomputation repeats part of the order.
        if state.recomputing.is_none() {
            state.order.push(unit);
        }
        let call = self.open_call(state, unit, ordering_inputs::<B>(inputs));
        while let Some(other) = self.beside(state, call) {
            self.add_slots(state, unit, other)?;
        }
        self.unshard(state, unit, Pass::Forward, When::Now)?;
        self.wait_for_unshard(state, unit)?;
        state.units[unit].forwards.push(call);
        state.open += 1;
        // From here on the unit's slot is in use, and no prefetch takes it.
        if self.settings.forward_prefetch
            && let Some(next) = self.next_forward(state, at, unit)
        {
            self.unshard(state, next, Pass::Forward, When::Ahead)?;
        }
        Ok(Some(call))
    }

    fn map_input(&self, unit: usize, input: DispatchTensor) -> DispatchTensor {
        let Some(dtype) = self.units[unit].precision.input else { return input };
        match B::from_dispatch(input.clone()) {
            Some(value) if value.dtype() != dtype => B::into_dispatch(value.cast(Some(dtype))),
            _ => input,
        }
    }

    fn checkpoint(&self, id: CallId, inputs: Vec<DispatchTensor>) -> bool {
        self.begin_checkpoint(id, inputs)
    }

    fn detach_input(&self, id: CallId, input: DispatchTensor) -> DispatchTensor {
        self.without_graph(id, input)
    }

    fn keep_input(&self, id: CallId, input: DispatchTensor) -> DispatchTensor {
        self.stow(id, input)
    }

    fn keep_forward(&self, id: CallId, forward: KeptForward) {
        self.end_checkpoint(id, forward);
    }

    fn hook_output(self: Arc<Self>, id: CallId, output: DispatchTensor) -> DispatchTensor {
        let kept = self.kept(id);
        let (slots, alive, ordering_inputs, dtype) = {
            let state = self.lock();
            let Some(call) = state.calls.get(&id) else { return output };
            let slots = state.slots_of[call.unit].iter();
            let slots: Vec<_> = slots.map(|&slot| state.slots[slot].clone()).collect();
            let dtype = self.units[call.unit].precision.output;
            (slots, call.open.clone(), call.ordering_inputs.clone(), dtype)
        };
        let detach = |value: Float<B>| slots.iter().fold(value, |value, slot| slot.detach(value));
        // Outputs on another backend, or of another kind, cannot look into the slots.
        match B::from_dispatch(output.clone()).map(|value| value.cast(dtype)) {
            None => output,
            Some(FloatTensor::Plain(value)) => B::into_dispatch(FloatTensor::Plain(detach(value))),
            Some(FloatTensor::Autodiff(value, context)) => {
                let value = match (kept, alive.filter(|_| value.is_tracked())) {
                    (Some(_), Some(_)) => {
                        let unit = self.name_of(id);
                        raise(ScheduleError::TrackedFromElsewhere { unit }.into())
                    }
                    (Some((kept, parent)), None) => {
                        recompute::output(&kept, &parent, detach(value.into_primitive()))
                    }
                    (None, Some(alive)) => {
                        let state = OpState { hooks: self.clone(), call: id, alive };
                        autodiff::pre_backward(state, value, &ordering_inputs, detach)
                    }
                    (None, None) => Autodiff::<B>::from_inner(detach(value.into_primitive())),
                };
                if value.is_tracked()
                    && let Some(call) = self.lock().calls.get_mut(&id)
                {
                    call.tracked = true;
                    let first = call.span.1.unwrap_or(u64::MAX);
                    call.span.1 = Some(first.min(value.id().value));
                }
                B::into_dispatch(FloatTensor::Autodiff(value, context))
            }
        }
    }

    fn post_forward(&self, id: CallId) -> Result<(), Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(call) = state.calls.get_mut(&id) else { return Ok(()) };
        let unit = call.unit;
        let _span = tracing::trace_span!(target: "fsdp", "fsdp::post_forward", unit = %self.units[unit].name).entered();
        call.ordering_inputs.clear();
        call.open = None;
        call.checkpoint = None;
        let tracked = call.tracked || call.pending > 0;
        if !tracked {
            state.calls.remove(&id);
        }
        self.close(state, unit);
        state.unrecorded.take_if(|checkpointed| *checkpointed == id);
        // The backward of the outermost unit and of the last one comes before any other's.
        let at = state.order.iter().rposition(|&index| index == unit).unwrap_or(0);
        let next = self.units[unit].level == 0 || self.next_forward(state, at, unit).is_none();
        // What is copied and not gathered is in no other unit's way, and in the graph until backward.
        let copied = !self.units[unit].gathers;
        let stays = next || copied || matches!(self.settings.reshard, Reshard::Never);
        if !(tracked && stays) {
            if tracked {
                self.keep_part(state, unit);
            }
            self.reshard(state, unit);
        }
        if state.open == 0 && state.calls.is_empty() {
            self.forget_shards(state);
        }
        Ok(())
    }

    fn abandon(&self, id: CallId) {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some(call) = state.calls.remove(&id) {
            self.close(state, call.unit);
            self.reshard(state, call.unit);
        }
        state.unrecorded.take_if(|checkpointed| *checkpointed == id);
    }

    fn materialize(
        self: Arc<Self>,
        place: ParamIndex,
        base: DispatchTensor,
    ) -> Result<DispatchTensor, Error> {
        let (unit, entry) = self.place(place);
        let Some((value, leaf, context)) =
            StoredTensor::from_dispatch(base.clone(), self.settings.rest)
        else {
            return Ok(base);
        };
        let base = LocalShard::new(value, leaf);
        let mut guard = self.lock();
        let state = &mut *guard;
        let holder = unit.holder(place.entry);
        let held_at = ParamIndex { entry: holder, ..place };
        if state.unloaded.contains(&held_at) {
            return Err(self.not_loaded(held_at));
        }
        // A tied entry takes both from the place that owns the weight.
        let LocalShard { value, leaf, on_device } = match &entry.held {
            Placement::TiedTo(_) => match &state.units[place.unit].shards[holder] {
                Some(shard) => shard.clone(),
                None => {
                    let unit = unit.name.to_string();
                    return Err(ScheduleError::NotRead { unit, path: entry.path.clone() }.into());
                }
            },
            // Its unit has brought it to the device, for its own forward.
            Placement::Replicated if !state.units[place.unit].forwards.is_empty() => {
                match &state.units[place.unit].shards[place.entry] {
                    Some(shard) => LocalShard { on_device: shard.on_device.clone(), ..base },
                    None => base,
                }
            }
            _ => base,
        };
        let call = state.units[place.unit].forwards.last().copied();
        // A recomputed graph has leaves of its own.
        let leaf = match (leaf, state.unrecorded, state.recomputing) {
            (Some(_), Some(_), _) => None,
            (Some(leaf), None, Some(_)) => Some(leaf.with_new_node()),
            (leaf, ..) => leaf,
        };
        if leaf.is_none()
            && state.unrecorded.is_none()
            && let Some(call) = call.and_then(|call| state.calls.get_mut(&call))
        {
            call.reads_frozen |= unit.gathers && context.is_some();
        }
        // What reads a parameter outside any forward sees it as the optimizer does.
        let dtype = if state.open > 0 { unit.entries[holder].dtype } else { DType::F32 };
        let value = match &unit.entries[holder].held {
            Placement::Shard(_) if call.is_some() => {
                debug_assert!(
                    matches!(state.units[place.unit].shard_state, ShardState::Unsharded),
                    "{}: {:?}",
                    unit.name,
                    state.units[place.unit].shard_state
                );
                let (range, at) = unit.gathered_at(holder);
                let slot = state.slots_of[place.unit][range];
                state.slots[slot].view(at, &entry.shape)
            }
            Placement::Shard(_) => {
                cast::<B>(self.gather_single(held_at, self.on_device(value))?, dtype)
            }
            _ => match on_device.get() {
                Some(there) if there.dtype() == dtype => there.clone(),
                _ => {
                    if self.settings.rest != StorageDevice::Device {
                        tracing::trace!(target: "fsdp", unit = %unit.name, "fsdp::copy_to_device");
                    }
                    value.on_device(&self.device, dtype, self.settings.rest)
                }
            },
        };
        let value = match (leaf, context) {
            (_, None) => FloatTensor::Plain(value),
            (None, Some(context)) => {
                FloatTensor::Autodiff(Autodiff::<B>::from_inner(value), context)
            }
            (Some(leaf), Some(context)) => {
                self.track(state, place, call, holder, &leaf, value, context)
            }
        };
        Ok(B::into_dispatch(value))
    }
}

impl<B: ShardBackend> Schedule<B> {
    /// What comes before the outermost forward: what an earlier one left is out of date.
    fn begin(&self, state: &mut State<B>) -> Result<(), Error> {
        if let Some(&place) = state.unloaded.first() {
            return Err(self.not_loaded(place));
        }
        let reduced = || state.units.iter().any(|unit| unit.reduced.iter().any(Option::is_some));
        if !state.accumulating {
            if !state.reductions.is_empty() || reduced() {
                return Err(ScheduleError::GradientsNotCollected.into());
            }
            self.tracker.give_back(MemoryKind::Reduced, std::mem::take(&mut state.reduced_bytes));
        }
        state.calls.retain(|_, call| call.alive.strong_count() > 0);
        for unit in 0..self.units.len() {
            if !state.units[unit].in_use() {
                self.evict(state, unit)?;
                state.units[unit].kept_part = false;
            }
        }
        if !state.order.is_empty() {
            state.last_order = std::mem::take(&mut state.order);
        }
        Ok(())
    }

    /// A unit that shares a buffer with that of `call`, whose graph is there and whose output no input
    /// of `call` can come from: the backward of both may run at once. Only for a unit without a graph
    /// of its own.
    ///
    /// What is not recorded has no graph. A recomputation runs from end to end between two ops of
    /// the outer graph: of the units there, only one that runs backward just now is in its way.
    fn beside(&self, state: &State<B>, call: CallId) -> Option<usize> {
        let new = &state.calls[&call];
        if state.unrecorded.is_some() {
            return None;
        }
        let slots = &state.slots_of[new.unit];
        let live = |id: &CallId, other: &Call<B>| {
            *id != call && other.open.is_none() && other.alive.strong_count() > 0
        };
        let mut others = state.calls.iter().filter(|(id, other)| live(id, other));
        if others.clone().any(|(_, other)| other.unit == new.unit) {
            return None;
        }
        let conflicts = |other: &Call<B>| {
            if !state.slots_of[other.unit].iter().any(|slot| slots.contains(slot)) {
                return false;
            }
            if other.part_of != new.part_of {
                return state.units[other.unit].backwards > 0;
            }
            other.span.1.is_some_and(|output| new.span.0.is_none_or(|input| input < output))
        };
        others.find(|(_, other)| conflicts(other)).map(|(_, other)| other.unit)
    }

    /// The unit whose forward came after that of `unit` the time before; `at` is its position now.
    /// In a recomputation, that of the same checkpointed unit.
    fn next_forward(&self, state: &State<B>, at: usize, unit: usize) -> Option<usize> {
        if state.recomputing.is_some() {
            let at = state.order.iter().rposition(|&index| index == unit)?;
            let next = self.following(state.order[at + 1..].iter(), unit);
            return next.filter(|&next| self.units[next].within == self.units[unit].within);
        }
        let last = &state.last_order;
        let at = match last.get(at) {
            Some(&there) if there == unit => at,
            _ => last.iter().position(|&index| index == unit)?,
        };
        self.following(last[at + 1..].iter(), unit)
    }

    fn open_call(
        &self,
        state: &mut State<B>,
        unit: usize,
        ordering_inputs: Vec<Tracked<B>>,
    ) -> CallId {
        let id = CallId(state.next_call);
        state.next_call += 1;
        let mut call = Call::new(unit, self.units[unit].entries.len(), ordering_inputs);
        call.part_of = state.recomputing;
        state.calls.insert(id, call);
        id
    }

    pub(super) fn close(&self, state: &mut State<B>, unit: usize) {
        state.units[unit].forwards.pop();
        state.open = state.open.saturating_sub(1);
    }

    /// Drops the references to the module's parameters, so that an optimizer can update in place.
    pub(super) fn forget_shards(&self, state: &mut State<B>) {
        for unit in &mut state.units {
            unit.shards.iter_mut().for_each(|shard| *shard = None);
        }
    }

    /// One parameter gathered into memory of its own: a `val()` outside its unit's forward.
    pub(super) fn gather_single(
        &self,
        place: ParamIndex,
        shard: Float<B>,
    ) -> Result<Float<B>, Error> {
        Ok(self.join(place, self.gather_parts(place, shard)?))
    }

    /// Every rank's part of one parameter, in order.
    pub(super) fn gather_parts(
        &self,
        place: ParamIndex,
        shard: Float<B>,
    ) -> Result<Vec<Option<Float<B>>>, Error> {
        let (_, entry) = self.place(place);
        tracing::trace!(target: "fsdp", path = %entry.path, "fsdp::unshard_single");
        count(&self.counters.single_gathers);
        let op = Op::new("all_gather", entry.path.as_str()).of(entry.numel());
        let len = entry.range().len();
        let mine = (len > 0).then(|| B::float_reshape(shard, Shape::from([len])));
        let (group, device) = (&self.settings.groups.shard, self.device.clone());
        let parts = self.comm.issue_on(group, move |group| {
            ProcessGroup::<B>::all_gather_one(group, &op, &device, mine)
        });
        Ok(parts.wait()?)
    }

    /// Records the gather of a tracked parameter, in its unit's call or in one of its own.
    #[allow(clippy::too_many_arguments, reason = "one caller, which has just taken these apart")]
    fn track(
        &self,
        state: &mut State<B>,
        place: ParamIndex,
        call: Option<CallId>,
        holder: usize,
        leaf: &StoredLeaf<B>,
        value: Float<B>,
        context: AutodiffContext,
    ) -> FloatTensor<B> {
        let alone = call.is_none();
        let id = call.unwrap_or_else(|| self.open_call(state, place.unit, Vec::new()));
        let call = state.calls.get_mut(&id).expect("opened above, or still open");
        call.pending += 1;
        let alive = call.open.clone().expect("a call stays open while its forward runs");
        let op_state = OpState { hooks: self.this(), call: id, alive };
        let value = autodiff::gather(op_state, holder, leaf, &call.ordering_inputs, value);
        if alone {
            call.open = None;
        }
        FloatTensor::Autodiff(value, context)
    }
}

/// The tracked inputs recorded last: the deepest ones, as a rule.
fn ordering_inputs<B: ShardBackend>(inputs: Vec<DispatchTensor>) -> Vec<Tracked<B>> {
    let tracked = |input| match B::from_dispatch(input)? {
        FloatTensor::Autodiff(tensor, _) => tensor.is_tracked().then_some(tensor),
        FloatTensor::Plain(_) => None,
    };
    let mut ordering_inputs: Vec<Tracked<B>> = inputs.into_iter().filter_map(tracked).collect();
    ordering_inputs.sort_by_key(|ordering_input| std::cmp::Reverse(ordering_input.id()));
    ordering_inputs.dedup_by_key(|ordering_input| ordering_input.id());
    ordering_inputs.truncate(MAX_ORDERING_INPUTS);
    ordering_inputs
}
