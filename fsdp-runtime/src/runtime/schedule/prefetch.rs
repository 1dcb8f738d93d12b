//! The units that are gathered while another one computes.

use super::core::Schedule;
use super::decide::{Pass, When};
use super::state::State;
use crate::backend::ModelBackend;
use crate::error::Error;

impl<B: ModelBackend> Schedule<B> {
    /// Prefetches, in forward, the units after `unit`, which is at position `at` of the present pass.
    pub(super) fn prefetch_next(
        &self,
        state: &mut State<B>,
        at: usize,
        unit: usize,
    ) -> Result<(), Error> {
        let units = self.decisions(state).ahead_in_forward(at, unit);
        self.prefetch(state, &units, Pass::Forward)
    }

    /// Prefetches, in backward, the units before `unit`. Leaves out those without a backward: frozen
    /// units before the first trained one.
    pub(super) fn prefetch_previous(&self, state: &mut State<B>, unit: usize) -> Result<(), Error> {
        let mut units = self.decisions(state).ahead_in_backward(unit);
        units.retain(|&unit| state.calls.values().any(|call| call.unit == unit));
        self.prefetch(state, &units, Pass::Backward)
    }

    /// Issues the all-gathers of units that are needed later.
    fn prefetch(&self, state: &mut State<B>, units: &[usize], pass: Pass) -> Result<(), Error> {
        for unit in state.buffers.turns.to_prefetch(&self.units, units) {
            self.unshard(state, unit, pass, When::Ahead)?;
        }
        Ok(())
    }
}
