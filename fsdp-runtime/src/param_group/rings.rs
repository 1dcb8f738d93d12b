//! The gather buffers that units need, given when they are gathered and resharded.

use std::collections::BTreeMap;

use super::control::UnitControl;
use super::unit::Unit;
use crate::backend::gather_buffer::GatherBufferPlan;

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
