//! The backward half: `pre_backward`, arriving gradients, `post_backward`.

use super::{Schedule, State, count};
use crate::autodiff::BackwardHooks;
use crate::backend::{Float, ShardBackend};
use crate::collectives::{Op, ProcessGroup};
use crate::error::Error;
use crate::group::Call;
use crate::param::CallId;

impl<B: ShardBackend> BackwardHooks<B> for Schedule<B> {
    fn pre_backward(&self, id: CallId) -> Result<(), Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(call) = state.calls.get_mut(&id) else { return Ok(()) };
        let unit = call.unit;
        let _span = tracing::trace_span!(target: "fsdp", "fsdp::pre_backward", unit = %self.units[unit].name).entered();
        // A unit with several outputs comes here once for each.
        if !std::mem::replace(&mut call.entered, true) {
            state.units[unit].backwards += 1;
        }
        self.unshard(state, unit, false)?;
        self.wait_for_unshard(state, unit)?;
        if self.prefetch.backward
            && let Some(at) = state.order.iter().rposition(|&index| index == unit)
            && let Some(previous) = self.following(state.order[..at].iter().rev(), unit)
        {
            self.unshard(state, previous, true)?;
        }
        Ok(())
    }

    fn arrived(&self, id: CallId, entry: usize, gradient: Float<B>) -> Result<bool, Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(call) = state.calls.get_mut(&id) else { return Ok(false) };
        let sum = match call.gradients[entry].take() {
            // In the order in which Burn adds up the gradients of one leaf.
            Some(earlier) => B::float_add(gradient, earlier),
            None => gradient,
        };
        call.gradients[entry] = Some(sum);
        call.pending -= 1;
        if call.pending > 0 {
            return Ok(false);
        }
        if let Some(call) = state.calls.remove(&id) {
            self.post_backward(state, call)?;
        }
        Ok(true)
    }
}

impl<B: ShardBackend> Schedule<B> {
    /// Issues the reduction of a call's gradients and gives its unit's slot back.
    fn post_backward(&self, state: &mut State<B>, call: Call<B>) -> Result<(), Error> {
        let index = call.unit;
        let unit = &self.units[index];
        let _span = tracing::trace_span!(target: "fsdp", "fsdp::post_backward", unit = %unit.name)
            .entered();
        self.collect_reductions(state)?;
        count(&self.counters.reduce_scatters);
        let op = Op::new("reduce_scatter", unit.name.clone());
        let keep: Vec<_> = unit.entries.iter().map(crate::group::Entry::reduce).collect();
        let device = self.device.clone();
        let work = self.comm.issue(move |group| {
            let reduced = ProcessGroup::<B>::reduce_scatter(group, &op, call.gradients, &keep)?;
            B::complete(&device);
            Ok(reduced)
        });
        state.reductions.push_back((index, work));
        if call.entered {
            state.units[index].backwards -= 1;
        }
        if !state.units[index].in_use() && unit.level > 0 {
            self.reshard(state, index);
        }
        Ok(())
    }

    /// Waits for the reductions under way and adds their results up.
    fn collect_reductions(&self, state: &mut State<B>) -> Result<(), Error> {
        while let Some((unit, work)) = state.reductions.pop_front() {
            let reduced = work.wait()?;
            for (sum, gradient) in state.units[unit].reduced.iter_mut().zip(reduced) {
                *sum = match (sum.take(), gradient) {
                    (Some(sum), Some(gradient)) => Some(B::float_add(sum, gradient)),
                    (sum, gradient) => sum.or(gradient),
                };
            }
        }
        Ok(())
    }

    /// What comes after a backward pass: units whose graph it reached only in part are reduced too,
    /// everything is resharded, and the random streams move on.
    pub(super) fn post_backward_final(&self) -> Result<(), Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let reached = |call: &Call<B>| call.entered || call.gradients.iter().any(Option::is_some);
        let ids: Vec<CallId> =
            state.calls.iter().filter(|(_, call)| reached(call)).map(|(id, _)| *id).collect();
        for id in ids {
            let Some(call) = state.calls.remove(&id) else { continue };
            if call.gradients.iter().any(Option::is_some) {
                self.post_backward(state, call)?;
            } else {
                state.units[call.unit].backwards -= 1;
            }
        }
        self.collect_reductions(state)?;
        state.calls.retain(|_, call| call.alive.strong_count() > 0);
        for unit in 0..self.units.len() {
            self.evict(state, unit)?;
        }
        if state.calls.is_empty() {
            self.forget_fragments(state);
        }
        self.random.next_step();
        Ok(())
    }
}
