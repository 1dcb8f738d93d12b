//! The decisions of a schedule: which units are gathered ahead, which stay gathered, and which unit
//! gives its gather buffers to another one.
//!
//! Nothing here knows tensors. The schedule takes these decisions in training, and the planner takes
//! the same ones without a model in memory (`plan::rehearsal`).

use crate::backend::DeviceKind;
use crate::options::{
    BackwardPrefetch, FsdpOptions, GradientAccumulation, OffloadPolicy, ReshardAfterForward,
};
use crate::param_group::{Unit, UnitControl};

/// Settings that decide when collectives are issued.
#[derive(Clone, Debug)]
pub(crate) struct Timing {
    /// Number of gather buffers of one dtype that the units of an inner nesting level share, before
    /// lists of units to prefetch are regarded.
    pub(crate) gather_buffers: usize,
    /// Whether forward prefetches the next units.
    pub(crate) forward_prefetch: bool,
    /// Time at which backward prefetches the previous units.
    pub(crate) backward_prefetch: BackwardPrefetch,
    /// Number of units that are prefetched while one computes.
    pub(crate) units_ahead: usize,
    /// Number of units whose gradients may be in reduction at a time, at least 1.
    pub(crate) reductions_in_flight: usize,
    /// Form in which the gradients of micro-batches are accumulated.
    pub(crate) accumulation: GradientAccumulation,
    /// Whether parameters are stored in host memory.
    pub(crate) offloads: bool,
}

impl Timing {
    /// Returns the settings of `units` under `options`. `kind` is that of the device that computes.
    pub(crate) fn new(units: &[Unit], options: &FsdpOptions, kind: DeviceKind) -> Self {
        // With one gather buffer, no second unit can be gathered.
        let gather_buffers = options.gather_buffers();
        let has_own = units.iter().any(|unit| unit.control.has_own_buffers());
        let can_prefetch = (gather_buffers > 1 || has_own) && options.units_ahead() > 0;
        Self {
            gather_buffers,
            forward_prefetch: options.forward_prefetch && can_prefetch,
            backward_prefetch: match options.backward_prefetch {
                BackwardPrefetch::Pre if !can_prefetch => BackwardPrefetch::None,
                prefetch => prefetch,
            },
            units_ahead: options.units_ahead(),
            reductions_in_flight: options.reductions_in_flight(kind),
            accumulation: options.gradient_accumulation,
            offloads: options.offload != OffloadPolicy::None,
        }
    }

    /// Returns whether the gradients of micro-batches are accumulated before they are reduced.
    pub(crate) fn holds_unsharded(accumulation: GradientAccumulation) -> bool {
        accumulation == GradientAccumulation::HoldUnsharded
    }
}

/// The pass that an all-gather is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    Backward,
}

/// Time at which a unit that is being gathered is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// The unit is needed at once.
    Now,
    /// The unit is needed later: this is a prefetch.
    Ahead,
}

/// The order in which units run forward.
#[derive(Clone, Debug)]
pub(crate) struct ForwardOrder {
    /// Units in the order of this forward pass.
    pub(crate) current: Vec<usize>,
    /// Units in the order of the forward pass before.
    pub(crate) last: Vec<usize>,
}

impl ForwardOrder {
    /// Returns the order before the first pass: the layout order, in which a unit of several fields
    /// comes once more after its last field.
    pub(crate) fn new(units: &[Unit]) -> Self {
        let end = |(index, unit): (usize, &Unit)| Some((unit.group.as_ref()?.until, index));
        let ends: Vec<(usize, usize)> = units.iter().enumerate().filter_map(end).collect();
        let mut last = Vec::with_capacity(units.len() + ends.len());
        for at in 0..=units.len() {
            last.extend(ends.iter().filter(|(until, _)| *until == at).map(|(_, group)| *group));
            last.extend((at < units.len()).then_some(at));
        }
        last.dedup();
        Self { current: Vec::new(), last }
    }

    /// Starts a forward pass.
    pub(crate) fn begin_pass(&mut self) {
        if !self.current.is_empty() {
            self.last = std::mem::take(&mut self.current);
        }
    }

    /// Adds a unit, and returns its position. A unit that `continues` after others have run is added
    /// once more.
    pub(crate) fn enter(&mut self, unit: usize, continues: bool) -> usize {
        if !(continues && self.current.last() == Some(&unit)) {
            self.current.push(unit);
        }
        self.current.len() - 1
    }

    /// Returns the last position of a unit in this forward pass.
    pub(crate) fn position(&self, unit: usize) -> Option<usize> {
        self.current.iter().rposition(|&index| index == unit)
    }
}

/// What the decisions about one unit depend on.
#[derive(Clone, Copy)]
pub(crate) struct Decisions<'a> {
    /// Units in layout order.
    pub(crate) units: &'a [Unit],
    /// When each unit is gathered and resharded.
    pub(crate) controls: &'a [UnitControl],
    pub(crate) timing: &'a Timing,
    pub(crate) order: &'a ForwardOrder,
    /// Whether the forward of a unit is being recomputed, or its backward runs after that.
    pub(crate) recomputes: bool,
}

impl Decisions<'_> {
    /// Returns the first `count` units in `order` that are gathered on the same nesting level as
    /// `unit`.
    fn following<'a>(
        &self,
        order: impl Iterator<Item = &'a usize>,
        unit: usize,
        count: usize,
    ) -> Vec<usize> {
        let level = self.units[unit].level;
        let mut found = Vec::new();
        for &index in order {
            if found.len() == count {
                break;
            }
            let fits = self.units[index].level == level && self.units[index].gathers;
            if fits && index != unit && !found.contains(&index) {
                found.push(index);
            }
        }
        found
    }

    /// Returns the `count` units that ran forward after `unit` in the pass before, where `unit` is at
    /// position `at` of the present pass. In a recomputation, returns the units after it in the same
    /// recomputed unit.
    fn next_forwards(&self, at: usize, unit: usize, count: usize) -> Vec<usize> {
        if self.recomputes {
            let Some(at) = self.order.position(unit) else { return Vec::new() };
            let next = self.following(self.order.current[at + 1..].iter(), unit, count);
            return next.into_iter().take_while(|&next| self.is_near(next, unit)).collect();
        }
        let last = &self.order.last;
        let at = match last.get(at) {
            Some(&there) if there == unit => Some(at),
            _ => last.iter().position(|&index| index == unit),
        };
        at.map_or_else(Vec::new, |at| self.following(last[at + 1..].iter(), unit, count))
    }

    /// Returns the units to prefetch in forward: those of the list of `unit`, or else those that came
    /// next in the forward pass before; `unit` is at position `at` of the present pass.
    pub(crate) fn ahead_in_forward(&self, at: usize, unit: usize) -> Vec<usize> {
        match &self.controls[unit].forward_prefetch {
            // A recomputation runs a part of the forward pass only.
            Some(list) if self.recomputes => self.near(list, unit),
            Some(list) => list.clone(),
            None if self.timing.forward_prefetch => {
                self.next_forwards(at, unit, self.timing.units_ahead)
            }
            None => Vec::new(),
        }
    }

    /// Returns the units to prefetch in backward: those of the list of `unit`, or else those that ran
    /// forward before it and therefore run backward next. Leaves out units inside another recomputed
    /// unit, whose recomputation starts with a different unit.
    pub(crate) fn ahead_in_backward(&self, unit: usize) -> Vec<usize> {
        match (&self.controls[unit].backward_prefetch, self.order.position(unit)) {
            (Some(list), _) => self.near(list, unit),
            (None, Some(at)) if self.timing.backward_prefetch != BackwardPrefetch::None => {
                let before = self.order.current[..at].iter().rev();
                let previous = self.following(before, unit, self.timing.units_ahead);
                previous.into_iter().take_while(|&previous| self.is_near(previous, unit)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns whether two units are inside the same recomputed unit, or inside none.
    fn is_near(&self, unit: usize, other: usize) -> bool {
        self.units[unit].within == self.units[other].within
    }

    fn near(&self, list: &[usize], unit: usize) -> Vec<usize> {
        list.iter().copied().filter(|&other| self.is_near(other, unit)).collect()
    }

    /// Returns whether a unit stays gathered from its forward to its backward.
    pub(crate) fn stays_gathered(&self, unit: usize) -> bool {
        // Backward starts with the outermost unit and the last one.
        let at = self.order.position(unit).unwrap_or(0);
        let is_last = self.next_forwards(at, unit, 1).is_empty();
        let is_next = self.units[unit].level == 0 || is_last;
        // A unit without shards uses no gather buffer, and the graph keeps its copies anyway.
        let is_replicated = !self.units[unit].gathers;
        is_next || is_replicated || self.controls[unit].reshard == ReshardAfterForward::Never
    }

    /// Returns whether the replicated parameters of a unit are copied to the device with it. Backward
    /// reads them only if it recomputes the forward.
    pub(crate) fn copies_replicated(&self, unit: usize, pass: Pass) -> bool {
        self.timing.offloads && (pass == Pass::Forward || self.units[unit].recomputed)
    }

    /// Returns whether a unit stays gathered from a backward to the next forward of the same step;
    /// `accumulating` says that another micro-batch follows.
    pub(crate) fn stays_after_backward(&self, unit: usize, accumulating: bool) -> bool {
        accumulating && !self.controls[unit].reshard_after_backward
    }
}

/// Outcome of a unit's request for its gather buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The unit may take its buffers once these units have been evicted.
    Take(Vec<usize>),
    /// A prefetch waits: a buffer is in use.
    Skip,
    /// This unit uses a buffer that is needed at once.
    Busy(usize),
}

/// Which gather buffers units use, and which unit is gathered in each.
#[derive(Clone, Debug)]
pub(crate) struct BufferTurns {
    /// Unit that is gathered in each buffer at present.
    owners: Vec<Option<usize>>,
    /// Buffers of each unit, one for each flat range of the unit.
    of_unit: Vec<Vec<usize>>,
    /// Units that have buffers of their own, in place of those of `of_unit`.
    held: Vec<bool>,
}

impl BufferTurns {
    /// Creates the turns of units with the given buffers, of which there are `buffers`.
    pub(crate) fn new(buffers: usize, of_unit: Vec<Vec<usize>>) -> Self {
        Self { owners: vec![None; buffers], held: vec![false; of_unit.len()], of_unit }
    }

    /// Returns the buffers of a unit.
    pub(crate) fn of(&self, unit: usize) -> &[usize] {
        &self.of_unit[unit]
    }

    /// Says whether a unit has buffers of its own.
    pub(crate) fn hold(&mut self, unit: usize, holds: bool) {
        self.held[unit] = holds;
    }

    /// Returns whether a unit has buffers of its own.
    pub(crate) fn holds(&self, unit: usize) -> bool {
        self.held[unit]
    }

    /// Returns whether a unit has no buffers, because none of its parameters is sharded.
    pub(crate) fn has_none(&self, unit: usize) -> bool {
        self.of_unit[unit].is_empty()
    }

    /// Decides whether a unit may take its buffers, given which units are in use.
    pub(crate) fn turn(&self, unit: usize, when: When, in_use: impl Fn(usize) -> bool) -> Turn {
        let owners = self.other_owners(unit);
        match (owners.iter().find(|&&owner| in_use(owner)), when) {
            (Some(_), When::Ahead) => Turn::Skip,
            (Some(&owner), When::Now) => Turn::Busy(owner),
            (None, _) => Turn::Take(owners),
        }
    }

    /// Returns the other units that are gathered in a unit's buffers.
    fn other_owners(&self, unit: usize) -> Vec<usize> {
        if self.holds(unit) {
            return Vec::new();
        }
        let owners = self.of_unit[unit].iter().filter_map(|&buffer| self.owners[buffer]);
        owners.filter(|&owner| owner != unit).collect()
    }

    /// Makes a unit the owner of its buffers.
    pub(crate) fn acquire(&mut self, unit: usize) {
        if self.holds(unit) {
            return;
        }
        for &buffer in &self.of_unit[unit] {
            self.owners[buffer] = Some(unit);
        }
    }

    /// Gives a unit's buffers back.
    pub(crate) fn release(&mut self, unit: usize) {
        for &buffer in &self.of_unit[unit] {
            self.owners[buffer] = None;
        }
    }

    /// Returns whether two units share a buffer.
    pub(crate) fn share(&self, unit: usize, other: usize) -> bool {
        let buffers = &self.of_unit[unit];
        let holds = self.holds(unit) || self.holds(other);
        !holds && self.of_unit[other].iter().any(|buffer| buffers.contains(buffer))
    }

    /// Returns whether the buffer of one flat range of `unit` is also a buffer of `other`.
    pub(crate) fn shares_range(&self, unit: usize, range: usize, other: usize) -> bool {
        self.of_unit[other].contains(&self.of_unit[unit][range])
    }

    /// Gives one flat range of a unit a new buffer.
    pub(crate) fn add(&mut self, unit: usize, range: usize) {
        self.of_unit[unit][range] = self.owners.len();
        self.owners.push(None);
    }

    /// Returns those of the units to prefetch that are gathered ahead. Leaves out a unit whose gather
    /// buffer an earlier one of them takes.
    pub(crate) fn to_prefetch(&self, units: &[Unit], ahead: &[usize]) -> Vec<usize> {
        let is_taken =
            |at: usize, unit: usize| ahead[..at].iter().any(|&earlier| self.share(unit, earlier));
        let chosen = ahead.iter().enumerate();
        let chosen = chosen.filter(|&(at, &unit)| units[unit].gathers && !is_taken(at, unit));
        chosen.map(|(_, &unit)| unit).collect()
    }
}

/// Returns the number of running reductions to wait for, so that one more may be issued.
pub(crate) fn reductions_due(running: usize, in_flight: usize) -> usize {
    running.saturating_sub(in_flight - 1)
}
