//! The backward passes of a rehearsal.

use super::action::{Action, Part};
use super::forward::{Rehearsal, Stage};
use crate::options::{BackwardPrefetch, GradientAccumulation};
use crate::runtime::schedule::decide::{Pass, Timing, When, reductions_due};

impl Rehearsal<'_> {
    /// Runs a backward pass; `accumulate` says that another one of the same step follows.
    pub(super) fn backward_pass(&mut self, accumulate: bool) {
        self.accumulating = accumulate;
        self.backward(0);
        if !accumulate {
            for unit in (0..self.units.len()).rev() {
                if self.states[unit].holds_gradients {
                    self.reduce(unit);
                }
            }
        }
        self.collect_reductions(0);
        for unit in 0..self.units.len() {
            let stays = self.decisions().stays_after_backward(unit, self.accumulating)
                && self.states[unit].stage == Stage::Unsharded;
            self.states[unit].kept = stays;
            if !stays {
                self.evict(unit);
            }
        }
    }

    /// Returns whether autodiff runs a unit's backward: its inputs, or parameters in it, need gradients.
    pub(super) fn has_backward(&self, unit: usize) -> bool {
        let has_trained = |unit: usize| self.units[unit].trained().next().is_some();
        !self.units[unit].takes_model_input
            || has_trained(unit)
            || self.children(unit).into_iter().any(|child| self.has_backward(child))
    }

    /// Runs the backward of a unit and of the units inside it.
    fn backward(&mut self, unit: usize) {
        if !self.has_backward(unit) {
            return;
        }
        let recomputed = self.units[unit].recomputed;
        self.states[unit].in_backward = true;
        self.gather_for_backward(unit);
        let children = self.children(unit);
        if recomputed {
            self.states[unit].in_forward = true;
            self.second_run = Some(unit);
            for &child in &children {
                self.forward(child);
            }
            self.actions.push(Action::Compute { unit, part: Part::Recompute });
            self.states[unit].in_forward = false;
        }
        let has_gradients = self.units[unit].trained().next().is_some();
        self.actions.push(Action::Compute { unit, part: Part::Backward });
        for &child in children.iter().rev() {
            self.backward(child);
        }
        self.post_backward(unit, has_gradients);
        if recomputed {
            self.second_run = None;
        }
    }

    fn gather_for_backward(&mut self, unit: usize) {
        self.unshard(unit, Pass::Backward, When::Now);
        self.wait_for_unshard(unit);
        if self.timing.backward_prefetch != BackwardPrefetch::Post {
            self.prefetch_previous(unit);
        }
    }

    fn prefetch_previous(&mut self, unit: usize) {
        let mut ahead = self.decisions().ahead_in_backward(unit);
        ahead.retain(|&unit| self.has_backward(unit));
        self.prefetch(&ahead, Pass::Backward);
    }

    /// Reshards a unit whose gradients have arrived, and issues their reduction.
    fn post_backward(&mut self, unit: usize, has_gradients: bool) {
        // Gathers are ordered right after the unit's inputs, so that gradients arrive at its end.
        if has_gradients {
            self.collect_early_reductions();
            self.actions.push(Action::Gradients { unit });
        }
        self.states[unit].in_backward = false;
        let is_idle = !self.states[unit].in_use();
        let stays = self.decisions().stays_after_backward(unit, self.accumulating);
        if is_idle && self.units[unit].level > 0 && !stays {
            self.reshard(unit);
        }
        if !has_gradients {
            return;
        }
        if self.timing.backward_prefetch == BackwardPrefetch::Post {
            self.prefetch_previous(unit);
        }
        if self.accumulating && Timing::holds_unsharded(self.timing.accumulation) {
            self.states[unit].holds_gradients = true;
            return;
        }
        self.reduce(unit);
    }

    /// Issues the reduction of a unit's gradients.
    fn reduce(&mut self, index: usize) {
        self.collect_early_reductions();
        self.states[index].holds_gradients = false;
        let unit = &self.units[index];
        let (mut sharded, mut replicated, mut kept) = (0, 0, 0);
        for entry in unit.trained() {
            match entry.is_sharded() {
                true => sharded += entry.sent_gradient_bytes(),
                false => replicated += entry.sent_gradient_bytes(),
            }
            kept += entry.range().len() * size_of::<f32>();
        }
        self.counts.sent_gradient_bytes += sharded + replicated;
        self.counts.reduce_scatters += 1;
        let later = self.timing.accumulation == GradientAccumulation::ReduceInGroup;
        let has_replicas = self.mesh.replicas().size() > 1 && !(later && self.accumulating);
        self.counts.all_reduces += usize::from(has_replicas);
        self.actions.push(Action::Reduce {
            unit: index,
            scatters: unit.gathers,
            sharded,
            replicated,
            replicas: has_replicas.then_some(kept),
            to_host: if self.timing.offloads { kept } else { 0 },
        });
        self.reductions.push_back(index);
    }

    /// Waits for the oldest running reductions, so that one more may be issued.
    fn collect_early_reductions(&mut self) {
        let due = reductions_due(self.reductions.len(), self.timing.reductions_in_flight);
        self.collect_reductions(self.reductions.len() - due);
    }

    /// Waits for all running reductions but the last `running`.
    fn collect_reductions(&mut self, running: usize) {
        while self.reductions.len() > running
            && let Some(unit) = self.reductions.pop_front()
        {
            self.actions.push(Action::AwaitReduce { unit });
        }
    }
}
