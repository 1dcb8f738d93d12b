//! Units that stay gathered while a guard lives, in gather buffers of their own.
//!
//! A unit has its own buffers from the first guard on. It is gathered into them once; its forwards
//! and backwards neither gather nor reshard it. When the last guard is dropped, the unit loses these
//! buffers, but not before the backward of a forward that used them. Their memory is never
//! rewritten, so a tensor that views it keeps its values.

use std::sync::Arc;

use super::core::Schedule;
use super::decide::{Pass, When};
use super::state::State;
use super::unit_state::ShardState;
use crate::backend::ModelBackend;
use crate::backend::gather_buffer::GatherBuffer;
use crate::error::{Error, ScheduleError};
use crate::param_group::memory::MemoryKind;

/// The units of a sharded model that guards keep gathered.
pub(crate) trait ScheduleHolds {
    /// Gathers units, each into buffers of its own, and keeps them gathered until
    /// [`end_guard`](Self::end_guard). Their shards have been registered. Every rank calls it.
    fn begin_guard(&self, units: &[usize]) -> Result<(), Error>;
    /// Ends one guard of units.
    fn end_guard(&self, units: &[usize]);
    /// Notes that the parameters are about to change.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::ChangedWhileUnsharded`] if a guard keeps a unit gathered.
    fn begin_change(&self) -> Result<(), Error>;
}

impl<B: ModelBackend> ScheduleHolds for Schedule<B> {
    fn begin_guard(&self, units: &[usize]) -> Result<(), Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        self.refuse_during_pass(state)?;
        if let Some(&index) = state.unloaded.first() {
            return Err(self.not_loaded(index));
        }
        self.end_holds(state, |_| true);
        state.shards_may_change();
        let begun = self.hold_all(state, units);
        if begun.is_err() {
            units.iter().for_each(|&unit| state.units[unit].guards -= 1);
            self.end_holds(state, |_| true);
        }
        if !units.iter().any(|&unit| state.buffers.turns.holds(unit)) {
            self.forget_shards(state);
        }
        begun
    }

    fn end_guard(&self, units: &[usize]) {
        let mut guard = self.lock();
        let state = &mut *guard;
        for &unit in units {
            state.units[unit].guards -= 1;
        }
        self.end_unused_holds(state);
        if state.open_forwards == 0 && state.calls.is_empty() {
            self.forget_shards(state);
        }
    }

    fn begin_change(&self) -> Result<(), Error> {
        let mut state = self.lock();
        state.params_changed = true;
        match state.units.iter().position(|unit| unit.guards > 0) {
            Some(unit) => {
                let unit = self.units[unit].name.to_string();
                Err(ScheduleError::ChangedWhileUnsharded { unit }.into())
            }
            None => Ok(()),
        }
    }
}

impl<B: ModelBackend> Schedule<B> {
    /// Returns an error if a forward or a backward runs, or if a backward is still to come: the
    /// autodiff graph has views of the shared gather buffers.
    fn refuse_during_pass(&self, state: &State<B>) -> Result<(), Error> {
        match self.unit_in_pass(state) {
            Some(unit) => Err(ScheduleError::UnshardDuringPass { unit }.into()),
            None => Ok(()),
        }
    }

    /// Returns the name of a unit that runs forward or backward, or whose backward is still to come.
    pub(super) fn unit_in_pass(&self, state: &State<B>) -> Option<String> {
        let live = state.calls.values().find(|call| call.open.is_some() || call.has_graph());
        let running = state.running.first().map(|running| running.unit);
        let unit = live.map(|call| call.unit).or(running)?;
        Some(self.units[unit].name.to_string())
    }

    /// Adds a guard to each unit, and gathers the units that had none.
    fn hold_all(&self, state: &mut State<B>, units: &[usize]) -> Result<(), Error> {
        units.iter().for_each(|&unit| state.units[unit].guards += 1);
        for &unit in units {
            if state.buffers.turns.holds(unit) {
                continue;
            }
            self.evict(state, unit)?;
            let new = |(numel, dtype)| {
                let buffer = GatherBuffer::new(&self.device, numel, dtype);
                self.tracker.take(MemoryKind::GatherBuffers, buffer.bytes(), unit);
                Arc::new(buffer)
            };
            let buffers = self.units[unit].buffers().into_iter().map(new).collect();
            state.buffers.hold(unit, buffers);
            self.unshard(state, unit, Pass::Forward, When::Now)?;
        }
        units.iter().try_for_each(|&unit| self.wait_for_unshard(state, unit))
    }

    /// Takes the buffers of their own from units without a guard, unless an autodiff graph has
    /// views of them.
    pub(super) fn end_unused_holds(&self, state: &mut State<B>) {
        let live: Vec<_> = state.calls.values().filter(|call| call.has_graph()).collect();
        let in_graph: Vec<usize> = live.into_iter().map(|call| call.unit).collect();
        self.end_holds(state, |unit| !in_graph.contains(&unit));
    }

    /// Takes the buffers of their own from units without a guard that satisfy `filter`. What an
    /// autodiff graph has of them keeps its values.
    pub(super) fn end_holds(&self, state: &mut State<B>, filter: impl Fn(usize) -> bool) {
        for unit in 0..self.units.len() {
            let is_done = state.units[unit].guards == 0 && !state.units[unit].in_use();
            if !is_done || !state.buffers.turns.holds(unit) || !filter(unit) {
                continue;
            }
            // A collective that has failed fails again at the next one.
            let _ = self.wait_for_unshard(state, unit);
            if matches!(state.units[unit].shard_state, ShardState::Unsharded) {
                self.end_unsharded(state, unit);
            }
            state.units[unit].shard_state = ShardState::Sharded;
            let bytes = state.buffers.end_hold(unit);
            self.tracker.give_back(MemoryKind::GatherBuffers, bytes, unit);
        }
    }
}
