//! The all-gathers of ranks that share a device, and of units with common buffers.
//!
//! Such ranks read each other's shards where they are. They exchange references to all shards once
//! in a pass. After that each rank's own thread fills its gather buffers: an all-gather waits for
//! no other rank and no other thread, and takes no fence.
//!
//! # Note: writes after reads
//!
//! An optimizer updates a shard in its own memory if nothing else refers to the shard. So the
//! owner's next write must come after the reads of all ranks:
//!
//! - At the end of a backward pass each rank drops its references to the shards of others, and then
//!   all ranks exchange fences. A rank returns from the pass only after this exchange
//!   ([`Schedule::end_reads_of_peers`]).
//! - After a forward pass without a backward pass the references live until the exchange of the
//!   next pass has ended, or in host memory until this rank has ended the pass. A step of an
//!   optimizer in between copies the shards.
//! - A graph over common buffers keeps the references of its forward until its backward.

use std::sync::Arc;

use super::core::Schedule;
use super::peer_shards::{Given, PeerShards};
use super::state::State;
use super::unshard::AllGather;
use crate::backend::{ModelBackend, Raw, StorageDevice, StoredTensor};
use crate::collectives::Op;
use crate::collectives::device_work::DeviceWork;
use crate::collectives::group::AnyProcessGroup;
use crate::error::{Error, ScheduleError};
use crate::param_group::Placement;

impl<B: ModelBackend> Schedule<B> {
    /// Returns whether the ranks of the shard group share a device that stores their shards.
    pub(super) fn shares_device(&self) -> bool {
        self.settings.storage == StorageDevice::Device
            && self.settings.groups.shard.shares_device::<Raw<B>>()
    }

    /// Returns whether the all-gathers of a unit in `group` are those of shards on a shared device, or of
    /// shards that may lie in common buffers.
    pub(super) fn reads_peers(
        &self,
        state: &State<B>,
        unit: usize,
        group: &Arc<AnyProcessGroup>,
    ) -> bool {
        let shard_group = &self.settings.groups.shard;
        let shares = self.shares_device() || state.buffers.has_common(unit);
        Arc::ptr_eq(group, shard_group) && group.size() > 1 && shares
    }

    /// Exchanges the shards with the other ranks, unless that has been done for `unit` in this pass.
    pub(super) fn read_peers(&self, state: &mut State<B>, unit: usize) -> Result<(), Error> {
        match &state.peers {
            Some(peers) if peers.has(unit) => Ok(()),
            _ => self.exchange_shards(state, unit),
        }
    }

    /// Runs the all-gathers of a unit on this thread. The first ones of a pass exchange the shards.
    pub(super) fn gather_from_peers(
        &self,
        state: &mut State<B>,
        unit: usize,
        gathers: Vec<AllGather<Raw<B>>>,
    ) -> Result<(), Error> {
        self.read_peers(state, unit)?;
        let peers = state.peers.as_ref().filter(|peers| peers.has(unit));
        let Some(peers) = peers else {
            let (unit, path) = (&self.units[unit].name, &self.units[unit].params[0].path);
            return Err(
                ScheduleError::NotRead { unit: unit.to_string(), path: path.clone() }.into()
            );
        };
        for (range, gather) in gathers.into_iter().enumerate() {
            gather.count_sent();
            gather.buffer.write_all(peers.of_range(unit, range).cloned().collect());
        }
        Ok(())
    }

    /// Exchanges the shards of all units that were read from the module, for an all-gather of
    /// `unit`. Blocks until all ranks have come to this.
    fn exchange_shards(&self, state: &mut State<B>, unit: usize) -> Result<(), Error> {
        let unit = &self.units[unit];
        tracing::trace!(target: "fsdp", unit = %unit.name, "fsdp::exchange_shards");
        let given = self.given_shards(state);
        // The reads of the earlier shards are ordered before later writes by this exchange.
        let earlier = state.peers.take();
        let numel = unit.buffers().iter().map(|(numel, _)| numel).sum();
        let op = Op::new("all_gather", unit.name.clone()).of(numel);
        let device = self.device.clone();
        let ranks = self.issue(&self.settings.groups.shard, move |group| {
            let ranks = group.exchange_on_device::<Raw<B>, _>(&op, &device, given)?;
            drop(earlier);
            Ok(ranks)
        });
        state.peers = Some(PeerShards { ranks: Arc::new(ranks.wait()?), stale: false });
        Ok(())
    }

    /// Returns the shards of this rank.
    fn given_shards(&self, state: &State<B>) -> Given<Raw<B>> {
        let of_unit = |index: usize| {
            let unit = &self.units[index];
            let mut ranges = vec![Vec::new(); unit.layout.ranges().len()];
            for (at, (entry, shard)) in
                unit.params.iter().zip(&state.units[index].shards).enumerate()
            {
                let Placement::Shard(range) = &entry.placement else { continue };
                #[allow(clippy::infallible_destructuring_match, reason = "`flex` adds a variant")]
                let value = match shard.as_ref()?.buffer.get()? {
                    StoredTensor::Device(value) => value,
                    #[cfg(feature = "flex")]
                    StoredTensor::Host(_) => return None,
                };
                if !range.is_empty() {
                    let (flat, start) = unit.gathered_at(at);
                    ranges[flat].push((start + range.start, value.clone()));
                }
            }
            Some(ranges)
        };
        let views_ring = |unit: usize| {
            let mut calls = state.calls.values().filter(|call| call.unit == unit);
            calls.any(|call| call.views_ring && call.has_graph())
        };
        Given {
            shards: (0..self.units.len()).map(of_unit).collect(),
            views_ring: (0..self.units.len()).map(views_ring).collect(),
        }
    }

    /// Drops the references to the shards of other ranks, and issues the exchange of fences after
    /// which owners may write them. Returns `None` if there are no such references.
    pub(super) fn end_reads_of_peers(
        &self,
        state: &mut State<B>,
    ) -> Option<DeviceWork<Raw<B>, ()>> {
        let peers = state.peers.take()?;
        let op = Op::new("barrier", "the end of the backward pass");
        let device = self.device.clone();
        Some(self.issue(&self.settings.groups.shard, move |group| {
            drop(peers);
            group.exchange_on_device::<Raw<B>, _>(&op, &device, ())?;
            Ok(())
        }))
    }
}
