//! The forward pass: the gather before a unit's forward, the hooks on its outputs, and the end of
//! the forward.

use std::sync::Arc;

use burn::backend::{Autodiff, AutodiffBackend, TensorMetadata};
use burn::tensor::DispatchTensor;

use super::super::autodiff::{self, MAX_ORDERING_INPUTS, OpState};
use super::core::Schedule;
use super::decide::{Pass, When};
use super::state::State;
use crate::backend::{Float, FloatTensor, ModelBackend, Tracked};
use crate::error::{Error, ScheduleError, raise};
use crate::module::CallId;

impl<B: ModelBackend> Schedule<B> {
    /// Gathers a unit for its forward and prefetches the next one. Returns `None` if a forward of
    /// the unit is already running. `params` are the parameters of the module that runs, which is a part
    /// of a unit of several fields.
    pub(super) fn pre_forward(
        &self,
        unit: usize,
        params: &[usize],
        inputs: Vec<DispatchTensor>,
    ) -> Result<Option<CallId>, Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if !state.units[unit].forwards.is_empty() {
            return Ok(None);
        }
        self.check_memory_limit()?;
        let span = tracing::trace_span!(target: "fsdp", "fsdp::pre_forward", unit = %self.units[unit].name).entered();
        if state.open_forwards == 0 {
            self.begin_forward_pass(state)?;
        }
        // A recomputation repeats a part of the order.
        let at = match state.recompute.second_run {
            None => state.order.enter(unit, state.units[unit].open_group.is_some()),
            Some(_) => state.order.current.len(),
        };
        let call = self.call_of(state, unit, params, ordering_inputs::<B>(inputs));
        while let Some(other) = self.conflicting_live_unit(state, call) {
            self.separate_buffers(state, unit, other)?;
        }
        self.unshard(state, unit, Pass::Forward, When::Now)?;
        self.wait_for_unshard(state, unit)?;
        self.cast_replicated(state, unit);
        state.units[unit].forwards.push(call);
        state.open_forwards += 1;
        self.count_saved_of(unit);
        // The unit is in use from here on, so a prefetch does not take its gather buffers.
        self.prefetch_next(state, at, unit)?;
        drop(span);
        tracing::trace!(target: "fsdp::trace", unit = %self.units[unit].name, "fsdp::begin_forward");
        self.tracker.mark_forward(unit);
        Ok(Some(call))
    }

    /// Returns an input in the compute dtype of a unit.
    pub(super) fn map_input(&self, unit: usize, input: DispatchTensor) -> DispatchTensor {
        let Some(dtype) = self.units[unit].precision.input else { return input };
        match B::from_dispatch(input.clone()) {
            Some(value) if value.dtype() != dtype => B::into_dispatch(value.cast(Some(dtype))),
            _ => input,
        }
    }

    /// Returns whether an input has another dtype than the compute dtype of a unit.
    pub(super) fn casts_input(&self, unit: usize, input: DispatchTensor) -> bool {
        let Some(dtype) = self.units[unit].precision.input else { return false };
        B::from_dispatch(input).is_some_and(|value| value.dtype() != dtype)
    }

    /// Returns an output of a unit in the unit's output dtype, outside of the gather buffers, with
    /// a hook on its gradient. The hook gathers the unit for backward, or recomputes its forward.
    pub(super) fn hook_output(
        self: Arc<Self>,
        id: CallId,
        output: DispatchTensor,
    ) -> DispatchTensor {
        let saved = self.saved_call(id);
        let (buffers, alive, ordering_inputs, dtype) = {
            let state = self.lock();
            let Some(call) = state.calls.get(&id) else { return output };
            let buffers: Vec<_> = state.buffers.of(call.unit).cloned().collect();
            let dtype = self.units[call.unit].precision.output;
            (buffers, call.open.clone(), call.ordering_inputs.clone(), dtype)
        };
        let detach = |value: Float<B>| {
            let dtype = value.dtype();
            let detach = move |value| buffers.iter().fold(value, |value, it| it.detach(value));
            B::defer_one(value, dtype, detach)
        };
        // An output of another backend or kind cannot be a view of a gather buffer.
        let Some(value) = B::from_dispatch(output.clone()) else { return output };
        let (value, context) = match value.cast(dtype) {
            FloatTensor::Plain(value) => {
                return B::into_dispatch(FloatTensor::Plain(detach(value)));
            }
            FloatTensor::Autodiff(value, context) => (value, context),
        };
        let value = match (saved, alive.filter(|_| value.is_tracked())) {
            (Some(_), Some(_)) => {
                let unit = self.name_of(id);
                raise(ScheduleError::TrackedFromElsewhere { unit }.into())
            }
            (Some((saved, parent)), None) => {
                autodiff::output(&saved, &parent, detach(value.into_primitive()))
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
            let first = call.first_output.unwrap_or(u64::MAX);
            call.first_output = Some(first.min(value.id().value));
        }
        B::into_dispatch(FloatTensor::Autodiff(value, context))
    }

    /// Ends a forward, and reshards the unit unless its backward is the next one.
    pub(super) fn post_forward(&self, id: CallId) -> Result<(), Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(call) = state.calls.get_mut(&id) else { return Ok(()) };
        let unit = call.unit;
        tracing::trace!(target: "fsdp::trace", unit = %self.units[unit].name, "fsdp::end_forward");
        let _span = tracing::trace_span!(target: "fsdp", "fsdp::post_forward", unit = %self.units[unit].name).entered();
        call.ordering_inputs.clear();
        self.close_forward(state, unit);
        state.recompute.first_run.take_if(|first_run| *first_run == id);
        if !self.group_continues(state, unit) {
            self.end_call(state, id);
        }
        self.end_groups(state, unit);
        if state.open_forwards == 0 && state.calls.is_empty() {
            self.end_reads_of_shards(state)?;
        }
        Ok(())
    }

    /// Ends the forward of a call, and reshards the unit unless its backward is the next one.
    pub(super) fn end_call(&self, state: &mut State<B>, id: CallId) {
        let Some(call) = state.calls.get_mut(&id) else { return };
        let unit = call.unit;
        call.open = None;
        call.recomputed = None;
        let tracked = call.tracked || call.pending > 0;
        if !tracked {
            state.calls.remove(&id);
        }
        if tracked && self.decisions(state).stays_gathered(unit) {
            return;
        }
        if tracked {
            self.keep_part(state, unit);
        }
        self.reshard(state, unit);
    }

    /// Ends a forward that panicked.
    pub(super) fn abort_forward(&self, id: CallId) {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some(call) = state.calls.remove(&id) {
            tracing::trace!(target: "fsdp::trace", unit = %self.units[call.unit].name, "fsdp::end_forward");
            self.close_forward(state, call.unit);
            self.discard_groups(state, call.unit);
            self.reshard(state, call.unit);
        }
        state.recompute.first_run.take_if(|first_run| *first_run == id);
    }
}

/// Returns the tracked inputs that were recorded last, which are usually the deepest ones, at most
/// [`MAX_ORDERING_INPUTS`].
fn ordering_inputs<B: ModelBackend>(inputs: Vec<DispatchTensor>) -> Vec<Tracked<B>> {
    let tracked = |input| match B::from_dispatch(input)? {
        FloatTensor::Autodiff(tensor, _) => tensor.is_tracked().then_some(tensor),
        FloatTensor::Plain(_) => None,
    };
    let mut inputs: Vec<Tracked<B>> = inputs.into_iter().filter_map(tracked).collect();
    inputs.sort_by_key(|input| std::cmp::Reverse(input.id()));
    inputs.dedup_by_key(|input| input.id());
    inputs.truncate(MAX_ORDERING_INPUTS);
    inputs
}
