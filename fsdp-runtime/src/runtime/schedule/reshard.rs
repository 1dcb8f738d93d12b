//! The end of a unit's stay in the gather buffers.

use std::sync::Arc;

use super::core::Schedule;
use super::counters::count;
use super::state::State;
use super::unit_state::ShardState;
use crate::backend::{ModelBackend, Raw, ShardBackend};
use crate::error::Error;
use crate::param_group::Placement;
use crate::param_group::memory::MemoryKind;

impl<B: ModelBackend> Schedule<B> {
    /// Waits for the all-gather of a unit, if one is running.
    pub(super) fn wait_for_unshard(&self, state: &mut State<B>, index: usize) -> Result<(), Error> {
        let shard_state = &mut state.units[index].shard_state;
        if matches!(shard_state, ShardState::Unsharding(_)) {
            tracing::trace!(target: "fsdp", unit = %self.units[index].name, "fsdp::wait_for_unshard");
            let ShardState::Unsharding(work) = std::mem::take(shard_state) else { unreachable!() };
            work.wait()?;
            *shard_state = ShardState::Unsharded;
        }
        Ok(())
    }

    /// Releases the gather buffers of a unit. Does nothing if the unit is not unsharded, or if a
    /// guard keeps it so.
    pub(super) fn reshard(&self, state: &mut State<B>, index: usize) {
        let is_unsharded = matches!(state.units[index].shard_state, ShardState::Unsharded);
        if !is_unsharded || state.buffers.turns.holds(index) {
            return;
        }
        tracing::trace!(target: "fsdp", unit = %self.units[index].name, "fsdp::reshard");
        if !state.buffers.turns.has_none(index) {
            // Recorded reads of the gather buffers are launched before they are released.
            self.drain();
        }
        state.buffers.release(index);
        self.end_unsharded(state, index);
    }

    /// Marks an unsharded unit as sharded, and drops its copies of offloaded parameters.
    pub(super) fn end_unsharded(&self, state: &mut State<B>, index: usize) {
        let unit = &self.units[index];
        let state = &mut state.units[index];
        state.shard_state = ShardState::Sharded;
        let copied = std::mem::take(&mut state.copied_bytes);
        if copied > 0 {
            self.tracker.give_back(MemoryKind::ReplicatedCopies, copied, index);
            for (entry, shard) in unit.params.iter().zip(&mut state.shards) {
                if let (Placement::Replicated, Some(shard)) = (&entry.placement, shard) {
                    shard.on_device = Arc::default();
                }
            }
        }
        self.counters.remove_unsharded(unit.unsharded_bytes());
    }

    /// Copies the part of a gathered unit that this rank keeps for backward, under
    /// `ReshardAfterForward::To`.
    pub(super) fn keep_part(&self, state: &mut State<B>, index: usize) {
        let (Some(group), ShardState::Unsharded) =
            (state.block(index), &state.units[index].shard_state)
        else {
            return;
        };
        let parts = state.buffers.kept_parts(index);
        let stays = state.buffers.turns.holds(index) || state.buffers.is_in_place(index);
        if parts.is_empty() || stays {
            return;
        }
        let allocated = parts.iter().map(|part| part.allocate()).sum();
        self.tracker.take(MemoryKind::GatherBuffers, allocated, index);
        let ranges =
            parts.iter().zip(state.buffers.of(index)).zip(self.units[index].code_buffers());
        // The all-gather has kept its part of the codes.
        for ((part, buffer), _) in ranges.filter(|(_, sent)| sent.is_none()) {
            let len = part.numel();
            part.write(0, buffer.view(self.kept_part_index(group) * len, &[len]));
        }
        state.units[index].has_kept_part = true;
    }

    /// Reshards a unit that is not in use, in any state. Counts a prefetch that was not used.
    pub(super) fn evict(&self, state: &mut State<B>, index: usize) -> Result<(), Error> {
        if std::mem::take(&mut state.units[index].prefetched) {
            count(&self.counters.mis_prefetches);
        }
        self.wait_for_unshard(state, index)?;
        self.reshard(state, index);
        Ok(())
    }

    /// Ends the prefetches that nothing has waited for, and drops the references to the module's
    /// parameters, which may change from now on.
    pub(super) fn end_reads_of_shards(&self, state: &mut State<B>) -> Result<(), Error> {
        for unit in 0..self.units.len() {
            if matches!(state.units[unit].shard_state, ShardState::Unsharding(_)) {
                self.evict(state, unit)?;
            }
        }
        // In host memory this rank's reads have run, and so its references may end.
        state.peers.take_if(|_| Raw::<B>::IN_HOST_MEMORY);
        self.forget_shards(state);
        Ok(())
    }

    /// Drops the references to the module's parameters, so that an optimizer can update these in
    /// place.
    pub(super) fn forget_shards(&self, state: &mut State<B>) {
        state.shards_may_change();
        for (index, unit) in state.units.iter_mut().enumerate() {
            // A guard borrows the model, so that no optimizer steps what its units read.
            if !state.buffers.turns.holds(index) {
                unit.shards.iter_mut().for_each(|shard| *shard = None);
            }
        }
    }
}
