//! The state of a rehearsal, and its forward passes.

use std::collections::VecDeque;

use super::action::{Action, Part, Peers};
use crate::layout::Mesh;
use crate::options::ReshardAfterForward;
use crate::param_group::{Placement, Unit, UnitControl, gather_buffer_plan};
use crate::runtime::schedule::Counts;
use crate::runtime::schedule::decide::{
    BufferTurns, Decisions, ForwardOrder, Pass, Timing, Turn, When,
};

/// Whether a unit's matrices are gathered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Sharded,
    Unsharding,
    Unsharded,
}

/// The state of one unit.
#[derive(Clone, Debug, Default)]
pub(super) struct UnitState {
    pub(super) stage: Stage,
    /// Whether a forward of the unit runs.
    pub(super) in_forward: bool,
    /// Whether a backward of the unit runs.
    pub(super) in_backward: bool,
    pub(super) prefetched: bool,
    has_kept_part: bool,
    /// Whether the unit stayed gathered after the backward of a micro-batch.
    pub(super) kept: bool,
    /// Whether gradients of micro-batches wait for their reduction.
    pub(super) holds_gradients: bool,
}

impl UnitState {
    pub(super) fn in_use(&self) -> bool {
        self.in_forward || self.in_backward
    }
}

/// The training steps of one rank, without tensors.
pub(crate) struct Rehearsal<'a> {
    pub(super) units: &'a [Unit],
    pub(super) controls: Vec<UnitControl>,
    pub(super) timing: Timing,
    pub(super) mesh: Mesh,
    /// Whether the device keeps sent copies of offloaded shards from forward to backward.
    keeps_sent: bool,
    pub(super) turns: BufferTurns,
    pub(super) order: ForwardOrder,
    pub(super) states: Vec<UnitState>,
    /// Unit whose first forward runs, before it is recomputed in backward.
    first_run: Option<usize>,
    /// Unit whose forward is recomputed, or whose backward runs after that.
    pub(super) second_run: Option<usize>,
    /// Units whose gradients are in reduction, in issue order.
    pub(super) reductions: VecDeque<usize>,
    pub(super) accumulating: bool,
    pub(super) counts: Counts,
    pub(super) actions: Vec<Action>,
}

impl<'a> Rehearsal<'a> {
    /// Creates the rehearsal of the rank of `mesh`.
    pub(crate) fn new(units: &'a [Unit], timing: Timing, mesh: Mesh, keeps_sent: bool) -> Self {
        let controls: Vec<_> = units.iter().map(|unit| unit.control.clone()).collect();
        let buffers = gather_buffer_plan(units, &controls, timing.gather_buffers);
        Self {
            controls,
            mesh,
            keeps_sent,
            turns: BufferTurns::new(buffers.buffers.len(), buffers.buffers_of),
            order: ForwardOrder::new(units),
            states: vec![UnitState::default(); units.len()],
            first_run: None,
            second_run: None,
            reductions: VecDeque::new(),
            accumulating: false,
            counts: Counts::default(),
            actions: Vec::new(),
            timing,
            units,
        }
    }

    /// Runs a step of several micro-batches. Returns its actions, and the counts that
    /// [`Stats::counts`](crate::model::Stats::counts) adds up in such a step.
    pub(crate) fn step(&mut self, micro_batches: usize) -> (Vec<Action>, Counts) {
        self.counts = Counts::default();
        for left in (0..micro_batches).rev() {
            self.begin_forward_pass();
            self.forward(0);
            self.backward_pass(left > 0);
        }
        (std::mem::take(&mut self.actions), self.counts)
    }

    pub(super) fn decisions(&self) -> Decisions<'_> {
        Decisions {
            units: self.units,
            controls: &self.controls,
            timing: &self.timing,
            order: &self.order,
            recomputes: self.second_run.is_some(),
        }
    }

    /// Returns the units directly inside `unit`, in layout order.
    pub(super) fn children(&self, unit: usize) -> Vec<usize> {
        let level = self.units[unit].level;
        let after = self.units.iter().enumerate().skip(unit + 1);
        let inside = after.take_while(|(_, inner)| inner.level > level);
        inside.filter(|(_, inner)| inner.level == level + 1).map(|(index, _)| index).collect()
    }

    /// Starts a forward pass, as `Schedule::begin_forward_pass` does.
    fn begin_forward_pass(&mut self) {
        for unit in 0..self.units.len() {
            if !std::mem::take(&mut self.states[unit].kept) {
                self.evict(unit);
                self.states[unit].has_kept_part = false;
            }
        }
        self.order.begin_pass();
    }

    /// Runs the forward of a unit and of the units inside it.
    pub(super) fn forward(&mut self, unit: usize) {
        let at = self.order.current.len();
        if self.second_run.is_none() {
            self.order.current.push(unit);
        }
        self.unshard(unit, Pass::Forward, When::Now);
        self.wait_for_unshard(unit);
        self.states[unit].in_forward = true;
        let ahead = self.decisions().ahead_in_forward(at, unit);
        self.prefetch(&ahead, Pass::Forward);
        let recomputed = self.units[unit].recomputed;
        if recomputed {
            self.first_run = Some(unit);
        }
        for child in self.children(unit) {
            self.forward(child);
        }
        let part = match (self.first_run, self.second_run) {
            (Some(_), _) => Part::FirstRun,
            (_, Some(_)) => Part::Recompute,
            _ => Part::Forward,
        };
        self.actions.push(Action::Compute { unit, part });
        if recomputed {
            self.first_run = None;
        }
        self.end_forward(unit);
    }

    fn end_forward(&mut self, unit: usize) {
        self.states[unit].in_forward = false;
        // A forward without a graph has no backward.
        let tracked = self.first_run.is_none() && self.has_backward(unit);
        if !(tracked && self.decisions().stays_gathered(unit)) {
            if tracked {
                self.keep_part(unit);
            }
            self.reshard(unit);
        }
    }

    /// Issues the all-gathers of units that are needed later.
    pub(super) fn prefetch(&mut self, units: &[usize], pass: Pass) {
        for unit in self.turns.to_prefetch(self.units, units) {
            self.unshard(unit, pass, When::Ahead);
        }
    }

    /// Issues the all-gathers of a unit, as `Schedule::unshard` does.
    pub(super) fn unshard(&mut self, index: usize, pass: Pass, when: When) {
        let unit = &self.units[index];
        if when == When::Now {
            self.states[index].prefetched = false;
        }
        if self.states[index].stage != Stage::Sharded {
            return;
        }
        let has_replicated =
            unit.params.iter().any(|entry| entry.placement == Placement::Replicated);
        let copies = has_replicated && self.decisions().copies_replicated(index, pass);
        if self.turns.has_none(index) && !copies {
            return;
        }
        let turn = self.turns.turn(index, when, |owner| self.states[owner].in_use());
        let Turn::Take(owners) = turn else {
            debug_assert_eq!(when, When::Ahead, "units that run at once share no gather buffer");
            return;
        };
        for owner in owners {
            self.evict(owner);
        }
        self.turns.acquire(index);
        let action = self.gather(index, pass, when, copies);
        if let Action::Gather { gathers, sent, .. } = action {
            self.counts.all_gathers += gathers;
            self.counts.sent_bytes += sent;
        }
        self.actions.push(action);
        self.states[index].stage = Stage::Unsharding;
        self.states[index].prefetched = when == When::Ahead;
    }

    /// Returns the all-gathers of a unit.
    fn gather(&self, index: usize, pass: Pass, when: When, copies: bool) -> Action {
        let unit = &self.units[index];
        let bytes = |(numel, dtype): (usize, burn::tensor::DType)| numel * dtype.size();
        let as_sent = unit.buffers().into_iter().zip(unit.code_buffers());
        let full = as_sent.map(|(gathered, sent)| bytes(sent.unwrap_or(gathered))).sum();
        let kept = match self.controls[index].reshard {
            ReshardAfterForward::To(size)
                if pass == Pass::Backward && self.states[index].has_kept_part =>
            {
                Some((size, unit.parts(size).into_iter().map(bytes).sum::<usize>()))
            }
            _ => None,
        };
        let of_shards = if unit.gathers { unit.sent_bytes() } else { 0 };
        // The sent copies stay on the device from forward to backward.
        let is_on_device = kept.is_some() || (self.keeps_sent && pass == Pass::Backward);
        let shards_from_host = if is_on_device { 0 } else { of_shards };
        let replicated_from_host = if copies { unit.replicated_bytes() } else { 0 };
        Action::Gather {
            unit: index,
            pass,
            ahead: when == When::Ahead,
            peers: kept.map_or(Peers::Shard, |(size, _)| Peers::Block(size)),
            gathers: unit.buffers().len(),
            full,
            sent: kept.map_or(of_shards, |(_, bytes)| bytes),
            from_host: match self.timing.offloads {
                true => shards_from_host + replicated_from_host,
                false => 0,
            },
        }
    }

    pub(super) fn wait_for_unshard(&mut self, unit: usize) {
        if self.states[unit].stage == Stage::Unsharding {
            self.actions.push(Action::AwaitGather { unit });
            self.states[unit].stage = Stage::Unsharded;
        }
    }

    pub(super) fn reshard(&mut self, unit: usize) {
        if self.states[unit].stage != Stage::Unsharded {
            return;
        }
        self.actions.push(Action::Reshard { unit });
        self.turns.release(unit);
        self.states[unit].stage = Stage::Sharded;
    }

    /// Keeps a part of a gathered unit for backward, under `ReshardAfterForward::To`.
    fn keep_part(&mut self, unit: usize) {
        let ReshardAfterForward::To(size) = self.controls[unit].reshard else { return };
        let is_unsharded = self.states[unit].stage == Stage::Unsharded;
        if is_unsharded && !self.units[unit].parts(size).is_empty() {
            self.states[unit].has_kept_part = true;
        }
    }

    /// Reshards a unit that is not in use. Counts a prefetch that was not used.
    pub(super) fn evict(&mut self, unit: usize) {
        if std::mem::take(&mut self.states[unit].prefetched) {
            self.counts.mis_prefetches += 1;
        }
        self.wait_for_unshard(unit);
        self.reshard(unit);
    }
}
