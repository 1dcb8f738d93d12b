//! When units are gathered and resharded, and how many gather buffers that takes.

use std::collections::BTreeMap;

use super::unit::Unit;
use crate::backend::gather_buffer::GatherBufferPlan;
use crate::options::ReshardAfterForward;

/// When a unit is gathered and resharded. Programs may change it between steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnitControl {
    /// State of the gathered parameters between forward and backward. It is neither `To(1)` nor `To`
    /// with all ranks.
    pub(crate) reshard: ReshardAfterForward,
    /// Whether the unit is resharded after the backward of a micro-batch that another one follows.
    pub(crate) reshard_after_backward: bool,
    /// Units to prefetch in forward, in place of those that come next.
    pub(crate) forward_prefetch: Option<Vec<usize>>,
    /// Units to prefetch in backward, in place of those that ran forward before.
    pub(crate) backward_prefetch: Option<Vec<usize>>,
}

impl UnitControl {
    /// Returns the settings of a unit that no option names.
    pub(crate) fn new(reshard: ReshardAfterForward) -> Self {
        Self {
            reshard,
            reshard_after_backward: true,
            forward_prefetch: None,
            backward_prefetch: None,
        }
    }

    /// Returns whether the unit has gather buffers of its own, because it stays gathered while other
    /// units run.
    pub(crate) fn has_own_buffers(&self) -> bool {
        self.reshard == ReshardAfterForward::Never || !self.reshard_after_backward
    }
}

/// Number of gather buffers of one dtype that the units of each inner nesting level share.
#[derive(Clone, Debug)]
pub(crate) struct Rings {
    least: usize,
    /// Levels that need more.
    levels: BTreeMap<usize, usize>,
}

impl Rings {
    /// Returns the numbers for `units` with their `controls`: at least `least`, and as many as the
    /// lists of units to prefetch need.
    ///
    /// Units take the buffers of their level in turn, in layout order. So a unit can be prefetched
    /// while another one runs if the level has as many buffers as it has units from one to the other.
    pub(crate) fn new(units: &[Unit], controls: &[UnitControl], least: usize) -> Self {
        let mut levels = BTreeMap::new();
        let lists = controls.iter().enumerate().flat_map(|(unit, control)| {
            let lists = [&control.forward_prefetch, &control.backward_prefetch];
            lists.into_iter().flatten().flatten().map(move |&ahead| (unit, ahead))
        });
        for (unit, ahead) in lists {
            let level = units[ahead].level;
            let between = unit.min(ahead)..=unit.max(ahead);
            let shares = |&at: &usize| units[at].level == level && !controls[at].has_own_buffers();
            let needed = levels.entry(level).or_insert(least);
            *needed = between.filter(shares).count().max(*needed);
        }
        Self { least, levels }
    }

    /// Returns the number for a nesting level.
    pub(crate) fn of(&self, level: usize) -> usize {
        self.levels.get(&level).copied().unwrap_or(self.least)
    }
}

/// Assigns gather buffers to units.
pub(crate) fn gather_buffer_plan(
    units: &[Unit],
    controls: &[UnitControl],
    least: usize,
) -> GatherBufferPlan {
    let rings = Rings::new(units, controls, least);
    let buffers: Vec<_> = units.iter().map(|unit| (unit.level, unit.buffers())).collect();
    let is_alone = |unit: usize| controls[unit].has_own_buffers();
    GatherBufferPlan::new(&buffers, |level| rings.of(level), is_alone)
}
