//! The start and the end of a unit's forward, and the order in which units run.

use super::core::Schedule;
use super::state::State;
use super::unit_call::UnitCall;
use crate::backend::ops::saved::leave_forward;
use crate::backend::{ModelBackend, Tracked};
use crate::error::{Error, ScheduleError};
use crate::module::CallId;
use crate::param_group::memory::MemoryKind;

impl<B: ModelBackend> Schedule<B> {
    /// Starts a forward pass, before the outermost forward. Ends the calls and prefetches that the
    /// pass before left.
    pub(super) fn begin_forward_pass(&self, state: &mut State<B>) -> Result<(), Error> {
        if let Some(&index) = state.unloaded.first() {
            return Err(self.not_loaded(index));
        }
        let reduced = || state.units.iter().any(|unit| unit.reduced.iter().any(Option::is_some));
        if !state.gradients.accumulating && !state.gradients.continuing {
            if !state.gradients.reductions.is_empty() || reduced() {
                return Err(ScheduleError::GradientsNotCollected.into());
            }
            let bytes = std::mem::take(&mut state.gradients.reduced_bytes);
            self.tracker.give_back(MemoryKind::ReducedGradients, bytes, None);
        }
        state.units.iter_mut().for_each(|unit| unit.open_group = None);
        state.calls.retain(|_, call| call.has_graph());
        self.end_holds(state, |_| true);
        state.shards_may_change();
        let changed = std::mem::take(&mut state.params_changed);
        for unit in 0..self.units.len() {
            let kept = state.units[unit].kept_leaves.take();
            let is_current = !changed && kept == Some(state.units[unit].leaves());
            if !state.units[unit].in_use() && !is_current {
                self.evict(state, unit)?;
                state.units[unit].has_kept_part = false;
            }
        }
        state.order.begin_pass();
        Ok(())
    }

    /// Adds a call of a unit and returns its id.
    pub(super) fn open_call(
        &self,
        state: &mut State<B>,
        unit: usize,
        ordering_inputs: Vec<Tracked<B>>,
    ) -> CallId {
        let id = CallId(state.next_call);
        state.next_call += 1;
        let mut call = UnitCall::new(unit, self.units[unit].params.len(), ordering_inputs);
        call.part_of = state.recompute.second_run;
        state.calls.insert(id, call);
        id
    }

    /// Ends the innermost forward of a unit.
    pub(super) fn close_forward(&self, state: &mut State<B>, unit: usize) {
        leave_forward();
        state.units[unit].forwards.pop();
        if state.units[unit].forwards.is_empty() {
            state.units[unit].shards.iter_mut().flatten().for_each(|shard| shard.cast = None);
        }
        state.open_forwards = state.open_forwards.saturating_sub(1);
    }

    /// Returns a unit that shares a gather buffer with the unit of `call` and may run backward at
    /// the same time, if there is one.
    ///
    /// Such a unit has a graph, and none of its outputs can be an input of `call`. Returns `None`
    /// if the unit of `call` has an earlier graph itself: that graph contains views of the unit's
    /// buffers, so these must not be replaced.
    ///
    /// A forward that records no graph conflicts with none. A recomputation runs completely between
    /// two operations of the outer graph, so of the units in that graph, only one that runs
    /// backward at that moment conflicts.
    pub(super) fn conflicting_live_unit(&self, state: &State<B>, call: CallId) -> Option<usize> {
        let new = &state.calls[&call];
        if state.recompute.first_run.is_some() {
            return None;
        }
        let is_live = |id: &CallId, other: &UnitCall<B>| {
            *id != call && other.open.is_none() && other.has_graph()
        };
        let mut others = state.calls.iter().filter(|(id, other)| is_live(id, other));
        if others.clone().any(|(_, other)| other.unit == new.unit) {
            return None;
        }
        let conflicts = |other: &UnitCall<B>| {
            let is_in_common = state.buffers.has_common(other.unit) && !other.views_ring;
            if is_in_common || !state.buffers.turns.share(new.unit, other.unit) {
                return false;
            }
            if other.part_of != new.part_of {
                return state.units[other.unit].backwards > 0;
            }
            let is_later = |output: u64| new.last_input.is_none_or(|input| input < output);
            other.first_output.is_some_and(is_later)
        };
        others.find(|(_, other)| conflicts(other)).map(|(_, other)| other.unit)
    }
}
