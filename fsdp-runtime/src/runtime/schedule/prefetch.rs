//! The units that are gathered while another one computes.

use super::core::Schedule;
use super::settings::{Pass, When};
use super::state::State;
use crate::backend::ModelBackend;
use crate::error::Error;
use crate::options::BackwardPrefetch;

impl<B: ModelBackend> Schedule<B> {
    /// Prefetches, in forward, the units of the list of `unit`, or else those that came next in the
    /// forward pass before; `unit` is at position `at` of the present pass.
    pub(super) fn prefetch_next(
        &self,
        state: &mut State<B>,
        at: usize,
        unit: usize,
    ) -> Result<(), Error> {
        let units = match &state.controls[unit].forward_prefetch {
            // A recomputation runs a part of the forward pass only.
            Some(list) if state.recompute.second_run.is_some() => self.near(list, unit),
            Some(list) => list.clone(),
            None if self.settings.forward_prefetch => {
                self.next_forwards(state, at, unit, self.settings.units_ahead)
            }
            None => return Ok(()),
        };
        self.prefetch(state, units, Pass::Forward)
    }

    /// Prefetches, in backward, the units of the list of `unit`, or else those that ran forward before
    /// it and therefore run backward next. Leaves out units inside another recomputed unit, whose
    /// recomputation starts with a different unit.
    pub(super) fn prefetch_previous(&self, state: &mut State<B>, unit: usize) -> Result<(), Error> {
        let units = match (&state.controls[unit].backward_prefetch, state.order.position(unit)) {
            (Some(list), _) => self.near(list, unit),
            (None, Some(at)) if self.settings.backward_prefetch != BackwardPrefetch::None => {
                let before = state.order.current[..at].iter().rev();
                let previous = self.following(before, unit, self.settings.units_ahead);
                let is_near = |previous: &usize| self.is_near(*previous, unit);
                previous.into_iter().take_while(is_near).collect()
            }
            _ => return Ok(()),
        };
        self.prefetch(state, units, Pass::Backward)
    }

    /// Returns whether two units are inside the same recomputed unit, or inside none.
    fn is_near(&self, unit: usize, other: usize) -> bool {
        self.units[unit].within == self.units[other].within
    }

    fn near(&self, list: &[usize], unit: usize) -> Vec<usize> {
        list.iter().copied().filter(|&other| self.is_near(other, unit)).collect()
    }

    /// Issues the all-gathers of units that are needed later. Leaves out a unit whose gather buffer
    /// an earlier one of them takes.
    fn prefetch(&self, state: &mut State<B>, units: Vec<usize>, pass: Pass) -> Result<(), Error> {
        for (at, &unit) in units.iter().enumerate() {
            let is_taken = units[..at].iter().any(|&earlier| state.buffers.share(unit, earlier));
            if self.units[unit].gathers && !is_taken {
                self.unshard(state, unit, pass, When::Ahead)?;
            }
        }
        Ok(())
    }
}
