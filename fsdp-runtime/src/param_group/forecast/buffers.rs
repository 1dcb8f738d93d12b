//! Bytes on the device for units that are unsharded.

use std::collections::BTreeMap;

use super::super::unit::{Unit, code_buffers, gather_buffer_plan};
use crate::options::{OffloadPolicy, ReshardAfterForward};

/// Returns the number of units of an inner nesting level that can be unsharded at once.
pub(super) fn ring(units: &[Unit], reshard: ReshardAfterForward, gather_buffers: usize) -> usize {
    if reshard == ReshardAfterForward::Never { units.len() } else { gather_buffers }
}

/// Returns the most bytes of replicated parameters that are copied from the host to the device.
///
/// Of each nesting level, `ring` units that gather are unsharded at once, and the largest ones
/// count. A unit without gather buffers keeps its copies from forward to backward, so all of these
/// count.
pub(super) fn copied(units: &[Unit], ring: usize) -> usize {
    let mut levels: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for unit in units.iter().filter(|unit| unit.gathers) {
        levels.entry(unit.level).or_default().push(unit.replicated_bytes());
    }
    let of_level = |mut bytes: Vec<usize>| {
        bytes.sort_unstable_by_key(|bytes| std::cmp::Reverse(*bytes));
        bytes.into_iter().take(ring).sum::<usize>()
    };
    let others = units.iter().filter(|unit| !unit.gathers).map(Unit::replicated_bytes);
    levels.into_values().map(of_level).chain(others).sum()
}

/// Returns the bytes of the gather buffers, and of the buffers for codes, that the schedule
/// allocates.
pub(super) fn gathered(
    units: &[Unit],
    reshard: ReshardAfterForward,
    gather_buffers: usize,
) -> usize {
    let mut buffers = gather_buffer_plan(units, ring(units, reshard, gather_buffers)).buffers;
    if let ReshardAfterForward::To(size) = reshard {
        buffers.extend(units.iter().flat_map(|unit| unit.parts(size)));
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
