//! Common buffers: gather buffers in which the shards of all ranks of a shard group lie, where the
//! ranks are threads of one process on Flex.
//!
//! A unit with common buffers is gathered without a copy, and reshards without one. The ranks
//! exchange references to their shards once in a pass ([`exchange_shards`](super::exchange_shards)), and
//! each checks that all shards lie in the common buffers. If one does not, the unit is gathered in this
//! pass as units without common buffers are.
//!
//! # Note: who writes a common buffer
//!
//! Each shard is a tensor of its own over its part of the buffer, and no other tensor is stored there.
//! An optimizer writes it in place if nothing else refers to it. Each rank refers to the shards of all
//! others from the exchange of a pass until it has ended the pass, and as long as it has a graph with
//! views of the buffer. So no rank reads a part that is written, and the graph of a forward has the
//! values of that forward. All ranks decide alike whether a unit is gathered in place: what they know of
//! each other is from the exchange.

use std::sync::Arc;

use burn::tensor::DispatchTensor;

use super::buffers::BuffersOfUnits;
use super::core::Schedule;
use super::state::State;
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{ModelBackend, Raw, ShardBackend, StorageDevice, StoredTensor, numel};
use crate::collectives::Op;
use crate::collectives::comm::Communicator;
use crate::collectives::group::AnyProcessGroup;
use crate::error::Error;
use crate::module::ParamIndex;
use crate::param_group::{Placement, Unit};

/// Creates the common buffers of `units` and shares them among the ranks of the shard group. Units that
/// can have none get none. Every rank calls it.
pub(crate) fn common_buffers<B: ShardBackend>(
    comm: &Communicator,
    shard: &Arc<AnyProcessGroup>,
    device: &B::Device,
    units: &[Unit],
) -> Result<BuffersOfUnits<B>, Error> {
    let none = vec![None; units.len()];
    let is_possible = B::PLACES && shard.shares_memory() && shard.size() > 1;
    if !is_possible || !units.iter().any(Unit::is_stored_as_gathered) {
        return Ok(none);
    }
    let new = |(numel, dtype)| Arc::new(GatherBuffer::<B>::new(device, numel, dtype));
    let of_unit = |unit: &Unit| {
        let has_common = unit.is_stored_as_gathered();
        has_common.then(|| unit.buffers().into_iter().map(new).collect())
    };
    let is_first = shard.members().first() == Some(&shard.rank());
    let mine: Option<BuffersOfUnits<B>> = is_first.then(|| units.iter().map(of_unit).collect());
    let (op, device) = (Op::new("broadcast", "the common buffers"), device.clone());
    let share = move |group: &AnyProcessGroup| group.exchange_on_device::<B, _>(&op, &device, mine);
    let ranks = comm.issue_on(shard, share).wait()?;
    Ok(ranks[0].0.clone().unwrap_or(none))
}

/// Shards in common buffers.
pub(crate) trait ScheduleShards {
    /// Returns whether shards are to be moved to common buffers.
    fn places_shards(&self) -> bool;
    /// Moves the shard of a parameter to the common buffer of its unit, and returns it as it is stored
    /// there, without an autodiff node. Returns `None` if it is there already, if the unit has no common
    /// buffer, or if something refers to an earlier shard in that place.
    fn placed(&self, index: ParamIndex, shard: DispatchTensor) -> Option<DispatchTensor>;
}

impl<B: ModelBackend> ScheduleShards for Schedule<B> {
    fn places_shards(&self) -> bool {
        self.lock().buffers.common().iter().any(Option::is_some)
    }

    fn placed(&self, index: ParamIndex, shard: DispatchTensor) -> Option<DispatchTensor> {
        let (unit, spec) = self.param(index);
        let Placement::Shard(range) = &spec.placement else { return None };
        let buffers = self.lock().buffers.common()[index.unit].clone()?;
        let (StoredTensor::Device(shard), _, context) =
            StoredTensor::<B>::from_dispatch(shard, StorageDevice::Device)?
        else {
            return None;
        };
        let shard = B::lower(vec![shard]).pop()?;
        // A parameter that is yet to be loaded has a placeholder.
        if range.is_empty() || numel::<Raw<B>>(&shard) != range.len() {
            return None;
        }
        let (flat, start) = unit.gathered_at(index.param);
        let placed = buffers[flat].place(start + range.start, &shard)?;
        Some(StoredTensor::<B>::Device(B::raise(placed)).with_context(context))
    }
}

impl<B: ModelBackend> Schedule<B> {
    /// Gathers a unit in its common buffers, and returns whether it is gathered. Exchanges the shards
    /// if this is the first all-gather of a pass.
    pub(super) fn gather_in_place(
        &self,
        state: &mut State<B>,
        index: usize,
    ) -> Result<bool, Error> {
        if !state.buffers.has_common(index) || state.buffers.turns.holds(index) {
            return Ok(false);
        }
        self.read_peers(state, index)?;
        let peers = state.peers.as_ref().filter(|peers| peers.has(index));
        let (Some(peers), Some(buffers)) = (peers, &state.buffers.common()[index]) else {
            return Ok(false);
        };
        // The backward of a graph with views of the other buffers gathers into these.
        let mut ranges = buffers.iter().enumerate();
        let in_place = !peers.views_ring(index)
            && ranges.all(|(range, buffer)| buffer.stores(peers.of_range(index, range)));
        state.buffers.set_in_place(index, in_place);
        Ok(in_place)
    }
}
