//! Units of several fields, under `#[fsdp(unit = "name")]`.
//!
//! The forwards of all modules of a group are one call of its unit. The first of them gathers the
//! group, which stays gathered until each module has run, or the forward of the enclosing unit ends.
//! Backward gathers the group once, and the last of all gradients ends the call. So the group has
//! gather buffers of its own: other units may run between two of its modules.

use super::core::Schedule;
use super::open_group::OpenGroup;
use super::state::State;
use crate::backend::{ModelBackend, Tracked};
use crate::module::CallId;
use crate::param_group::UnitGroup;

impl<B: ModelBackend> Schedule<B> {
    /// Returns the call that a forward belongs to: that of the unit's group if one of the group's modules
    /// has run, or else a new one. `params` are the parameters of the module that runs.
    pub(super) fn call_of(
        &self,
        state: &mut State<B>,
        unit: usize,
        params: &[usize],
        ordering_inputs: Vec<Tracked<B>>,
    ) -> CallId {
        let Some(group) = &self.units[unit].group else {
            return self.open_call(state, unit, ordering_inputs);
        };
        let mut open = match state.units[unit].open_group.take() {
            Some(open) => {
                if let Some(call) = state.calls.get_mut(&open.call) {
                    call.ordering_inputs = ordering_inputs;
                }
                open
            }
            None => OpenGroup::new(self.open_call(state, unit, ordering_inputs), group),
        };
        open.run(group, params);
        let call = open.call;
        state.units[unit].open_group = Some(open);
        call
    }

    /// Returns whether a unit is a group with a module that has not run yet. Otherwise the call of the
    /// group ends with the forward that ends now.
    pub(super) fn group_continues(&self, state: &mut State<B>, unit: usize) -> bool {
        let open = &mut state.units[unit].open_group;
        open.take_if(|open| open.is_complete());
        open.is_some()
    }

    /// Ends the calls of groups in a unit whose forward has ended: modules that have not run do not run
    /// any more. The end of the outermost forward ends those of all groups.
    pub(super) fn end_groups(&self, state: &mut State<B>, enclosing: usize) {
        let is_outermost = state.open_forwards == 0;
        self.take_groups(state, |group, _| is_outermost || group.enclosing == enclosing)
            .into_iter()
            .for_each(|call| self.end_call(state, call));
    }

    /// Ends the calls of groups that are part of a recomputation whose forward has ended.
    pub(super) fn end_groups_of_recomputation(&self, state: &mut State<B>, recomputed: CallId) {
        let calls = self.groups_of_recomputation(state, recomputed);
        calls.into_iter().for_each(|call| self.end_call(state, call));
    }

    /// Drops the calls of groups that are part of a recomputation that panicked.
    pub(super) fn discard_groups_of_recomputation(&self, state: &mut State<B>, recomputed: CallId) {
        let calls = self.groups_of_recomputation(state, recomputed);
        calls.into_iter().for_each(|call| self.discard_call(state, call));
    }

    /// Drops the calls of groups in a unit whose forward panicked, and of the unit itself if it is a
    /// group.
    pub(super) fn discard_groups(&self, state: &mut State<B>, panicked: usize) {
        state.units[panicked].open_group = None;
        let is_outermost = state.open_forwards == 0;
        self.take_groups(state, |group, _| is_outermost || group.enclosing == panicked)
            .into_iter()
            .for_each(|call| self.discard_call(state, call));
    }

    fn groups_of_recomputation(&self, state: &mut State<B>, recomputed: CallId) -> Vec<CallId> {
        let calls = state.calls.iter().filter(|(_, call)| call.part_of == Some(recomputed));
        let calls: Vec<CallId> = calls.map(|(id, _)| *id).collect();
        self.take_groups(state, |_, call| calls.contains(&call))
    }

    /// Closes the groups that satisfy `filter`, and returns their calls.
    fn take_groups(
        &self,
        state: &mut State<B>,
        filter: impl Fn(&UnitGroup, CallId) -> bool,
    ) -> Vec<CallId> {
        let units = self.units.iter().zip(&mut state.units);
        let taken = units.filter_map(|(unit, of_unit)| {
            let group = unit.group.as_ref()?;
            of_unit.open_group.take_if(|open| filter(group, open.call))
        });
        taken.map(|open| open.call).collect()
    }

    /// Drops a call without a backward, and reshards its unit.
    fn discard_call(&self, state: &mut State<B>, id: CallId) {
        if let Some(call) = state.calls.remove(&id) {
            self.reshard(state, call.unit);
        }
    }
}
