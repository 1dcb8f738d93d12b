//! Bytes on the device for units that are unsharded.

use std::collections::BTreeMap;

use crate::options::{OffloadPolicy, ReshardAfterForward};
use crate::param_group::UnitControl;
use crate::param_group::{Rings, gather_buffer_plan};
use crate::param_group::{Unit, code_buffers};

/// Returns what the options say of each unit.
fn controls(units: &[Unit]) -> Vec<UnitControl> {
    units.iter().map(|unit| unit.control.clone()).collect()
}

/// Returns the most bytes of replicated parameters that are copied from the host to the device.
///
/// Of each nesting level, as many units that gather are unsharded at once as there are gather
/// buffers, and the largest ones count. A unit without gather buffers, or with its own, keeps its
/// copies from forward to backward, so all of these count.
pub(super) fn copied(units: &[Unit], gather_buffers: usize) -> usize {
    let rings = Rings::new(units, &controls(units), gather_buffers);
    let takes_turns = |unit: &&Unit| unit.gathers && !unit.control.has_own_buffers();
    let mut levels: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for unit in units.iter().filter(takes_turns) {
        levels.entry(unit.level).or_default().push(unit.replicated_bytes());
    }
    let of_level = |(level, mut bytes): (usize, Vec<usize>)| {
        bytes.sort_unstable_by_key(|bytes| std::cmp::Reverse(*bytes));
        bytes.into_iter().take(rings.of(level)).sum::<usize>()
    };
    let others = units.iter().filter(|unit| !takes_turns(unit)).map(Unit::replicated_bytes);
    levels.into_iter().map(of_level).chain(others).sum()
}

/// Returns the bytes of the gather buffers, and of the buffers for codes, that the schedule
/// allocates.
pub(super) fn gathered(units: &[Unit], gather_buffers: usize) -> usize {
    let mut buffers = gather_buffer_plan(units, &controls(units), gather_buffers).buffers;
    for unit in units {
        if let ReshardAfterForward::To(size) = unit.control.reshard {
            buffers.extend(unit.parts(size));
        }
    }
    buffers.extend(code_buffers(units));
    buffers.iter().map(|(numel, dtype)| numel * dtype.size()).sum()
}

/// Returns the most bytes of shards that are cast or copied for an all-gather at once.
///
/// All-gathers run one after the other, so the largest one counts.
pub(super) fn sending(units: &[Unit], offload: OffloadPolicy) -> usize {
    let of_unit = |unit: &Unit| unit.sending_bytes(offload != OffloadPolicy::None);
    match offload {
        // The device keeps the sent shards until backward, and they count as shards.
        OffloadPolicy::OptimizerOnly => 0,
        _ => units.iter().map(of_unit).max().unwrap_or(0),
    }
}
