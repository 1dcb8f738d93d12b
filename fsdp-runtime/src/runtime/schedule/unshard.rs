//! A unit's way into its buffers and out of them: the all-gathers, and who owns which buffer.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use super::{Pass, Reshard, Schedule, State, When, count};
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend, StorageDevice, StoredTensor, numel as numel_of};
use crate::collectives::group::Group;
use crate::collectives::{Op, ProcessGroup};
use crate::error::{CollectiveError, Error, ScheduleError};
use crate::param_group::Placement;
use crate::param_group::memory::{Counted, MemoryKind, MemoryTracker};
use crate::runtime::state::ShardState;

/// What a rank gives to an all-gather of one flat range.
struct Piece<B: ShardBackend> {
    /// Its place in the flat range, in elements.
    at: usize,
    value: StoredTensor<B>,
    /// Where it is kept as it was sent.
    sent: Option<Arc<OnceLock<Float<B>>>>,
}

/// What is whole on every rank and rests on the host, to be copied to the device.
struct CopyToDevice<B: ShardBackend> {
    value: StoredTensor<B>,
    dtype: DType,
    on_device: Arc<OnceLock<Float<B>>>,
}

/// What a rank gives to the all-gather of each flat range of a unit, and the group they are among.
type CopyIn<B> = (Vec<Vec<Piece<B>>>, Arc<Group>);

/// The all-gather of one flat range: what this rank gives to it, and where it goes.
struct Gather<B: ShardBackend> {
    op: Op,
    pieces: Vec<Piece<B>>,
    numel: usize,
    dtype: DType,
    slot: Arc<GatherBuffer<B>>,
    /// Bytes that this rank has given to all-gathers.
    sent_bytes: Arc<AtomicUsize>,
    tracker: Arc<MemoryTracker>,
}

impl<B: ShardBackend> Gather<B> {
    /// Runs it among `group`, on the communication thread.
    fn run(
        self,
        group: &Group,
        device: &B::Device,
        rest: StorageDevice,
    ) -> Result<(), CollectiveError> {
        let Self { op, pieces, numel, dtype, slot, sent_bytes, tracker } = self;
        let made = |piece: &&Piece<B>| piece.sent.is_none() && !piece.value.is_on_device(dtype);
        let made = pieces.iter().filter(made).map(|piece| piece.value.numel() * dtype.size());
        let _made = Counted::new(&tracker, MemoryKind::Sending, made.sum());
        let send = |Piece { at, value, sent }: Piece<B>| {
            let cross = || value.on_device(device, dtype, rest);
            let value = match sent {
                Some(sent) => sent.get_or_init(cross).clone(),
                None => cross(),
            };
            (at, value)
        };
        let shards: Vec<_> = pieces.into_iter().map(send).collect();
        let bytes = |(_, value): &(usize, Float<B>)| numel_of::<B>(value) * value.dtype().size();
        sent_bytes.fetch_add(shards.iter().map(bytes).sum(), Ordering::Relaxed);
        let shard_len = numel / group.size();
        ProcessGroup::<B>::all_gather(group, &op, device, shards, shard_len, &slot)
    }
}

impl<B: ShardBackend> Schedule<B> {
    /// Issues the all-gathers of a unit that is sharded, as one. `Ahead` of use, it gives way to a unit
    /// that uses one of the slots; otherwise that is an error.
    pub(super) fn unshard(
        &self,
        state: &mut State<B>,
        index: usize,
        pass: Pass,
        when: When,
    ) -> Result<(), Error> {
        let unit = &self.units[index];
        let slots = state.slots_of[index].clone();
        let copies = self.copies(state, index, pass);
        if slots.is_empty() && copies.is_empty() {
            return Ok(());
        }
        if when == When::Now {
            state.units[index].prefetched = false;
        }
        if !matches!(state.units[index].shard_state, ShardState::Sharded) {
            return Ok(());
        }
        let Some((pieces, group)) = self.copy_in(state, index, pass, when)? else {
            return Ok(());
        };
        if !self.take_slots(state, index, when)? {
            return Ok(());
        }
        tracing::trace!(target: "fsdp", unit = %unit.name, ahead = when == When::Ahead, "fsdp::unshard");
        let gather = |((pieces, (numel, dtype)), slot): ((_, (usize, DType)), &usize)| {
            count(&self.counters.all_gathers);
            let op = Op::new("all_gather", unit.name.clone()).of(numel);
            let (slot, sent_bytes) = (state.slots[*slot].clone(), self.counters.sent_bytes.clone());
            let tracker = self.tracker.clone();
            Gather { op, pieces, numel, dtype, slot, sent_bytes, tracker }
        };
        if !copies.is_empty() {
            state.units[index].copied = unit.whole_bytes();
            self.tracker.take(MemoryKind::Copied, unit.whole_bytes());
        }
        let gathers: Vec<Gather<B>> =
            pieces.into_iter().zip(unit.buffers()).zip(&slots).map(gather).collect();
        let (device, rest) = (self.device.clone(), self.settings.rest);
        let work = self.comm.issue_on(&group, move |group| {
            for gather in gathers {
                gather.run(group, &device, rest)?;
            }
            for CopyToDevice { value, dtype, on_device } in copies {
                on_device.get_or_init(|| value.on_device(&device, dtype, rest));
            }
            B::complete(&device);
            Ok(())
        });
        state.units[index].shard_state = ShardState::Unsharding(work);
        state.units[index].prefetched = when == When::Ahead;
        let now =
            self.counters.unsharded_bytes.fetch_add(unit.unsharded_bytes(), Ordering::Relaxed);
        let now = now + unit.unsharded_bytes();
        self.counters.peak_unsharded_bytes.fetch_max(now, Ordering::Relaxed);
        Ok(())
    }

    /// Makes a unit the owner of its slots, all of them or none: `false` where another one uses one of
    /// them and this one is not needed yet.
    fn take_slots(&self, state: &mut State<B>, index: usize, when: When) -> Result<bool, Error> {
        let slots = state.slots_of[index].clone();
        let others = slots.iter().filter_map(|&slot| state.owners[slot]);
        let owners: Vec<usize> = others.filter(|&owner| owner != index).collect();
        if let Some(&owner) = owners.iter().find(|&&owner| state.units[owner].in_use()) {
            if when == When::Ahead {
                return Ok(false);
            }
            return Err(ScheduleError::GatherBufferBusy {
                unit: self.units[index].name.to_string(),
                owner: self.units[owner].name.to_string(),
                slots: self.settings.slots,
            }
            .into());
        }
        for owner in owners {
            self.evict(state, owner)?;
        }
        for slot in slots {
            state.owners[slot] = Some(index);
        }
        Ok(true)
    }

    /// What this rank gives to a unit's all-gathers and the group they are among. `None` when a
    /// prefetch finds that nobody has read the shards.
    fn copy_in(
        &self,
        state: &State<B>,
        index: usize,
        pass: Pass,
        when: When,
    ) -> Result<Option<CopyIn<B>>, Error> {
        let unit = &self.units[index];
        if let (Pass::Backward, true, Reshard::To(group)) =
            (pass, state.units[index].kept_part, &self.settings.reshard)
        {
            let kept = |part: &Arc<GatherBuffer<B>>| {
                let len = part.numel();
                let at = self.part_of(group) * len;
                let value = StoredTensor::Device(part.view(0, &[len]));
                vec![Piece { at, value, sent: None }]
            };
            return Ok(Some((state.parts[index].iter().map(kept).collect(), group.clone())));
        }
        let mut pieces: Vec<Vec<Piece<B>>> = Vec::new();
        pieces.resize_with(unit.layout.ranges().len(), Vec::new);
        for (at, (entry, shard)) in unit.entries.iter().zip(&state.units[index].shards).enumerate()
        {
            let Placement::Shard(range) = &entry.held else { continue };
            let Some(shard) = shard else {
                if when == When::Ahead {
                    return Ok(None);
                }
                let unit = unit.name.to_string();
                return Err(ScheduleError::NotRead { unit, path: entry.path.clone() }.into());
            };
            if !range.is_empty() {
                let (flat, start) = unit.gathered_at(at);
                let sent = self.settings.keep_sent.then(|| shard.on_device.clone());
                let value = shard.value.clone();
                pieces[flat].push(Piece { at: start + range.start, value, sent });
            }
        }
        Ok(Some((pieces, self.settings.groups.shard.clone())))
    }

    /// What is copied to the device beside a unit's all-gathers: what its forward will read. A backward
    /// reads it where it runs the forward again.
    fn copies(&self, state: &State<B>, index: usize, pass: Pass) -> Vec<CopyToDevice<B>> {
        let unit = &self.units[index];
        if self.settings.rest == StorageDevice::Device
            || (pass == Pass::Backward && !unit.checkpointed)
        {
            return Vec::new();
        }
        let shards = unit.entries.iter().zip(&state.units[index].shards);
        let whole = shards.filter(|(entry, _)| entry.held == Placement::Replicated);
        whole
            .filter_map(|(entry, shard)| {
                let shard = shard.as_ref()?;
                let (value, on_device) = (shard.value.clone(), shard.on_device.clone());
                Some(CopyToDevice { value, dtype: entry.dtype, on_device })
            })
            .collect()
    }

    /// Which part of a gathered unit this rank keeps, under `To`.
    fn part_of(&self, group: &Group) -> usize {
        self.settings.mesh.shard_rank().index() % group.size()
    }

    /// Waits until a unit that is being unsharded is.
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

    /// Gives a unit's slots back.
    pub(super) fn reshard(&self, state: &mut State<B>, index: usize) {
        if !matches!(state.units[index].shard_state, ShardState::Unsharded) {
            return;
        }
        let unit = &self.units[index];
        tracing::trace!(target: "fsdp", unit = %unit.name, "fsdp::reshard");
        state.units[index].shard_state = ShardState::Sharded;
        for &slot in &state.slots_of[index] {
            state.owners[slot] = None;
            state.slots[slot].release();
        }
        let state = &mut state.units[index];
        let copied = std::mem::take(&mut state.copied);
        if copied > 0 {
            self.tracker.give_back(MemoryKind::Copied, copied);
            for (entry, shard) in unit.entries.iter().zip(&mut state.shards) {
                if let (Placement::Replicated, Some(shard)) = (&entry.held, shard) {
                    shard.on_device = Arc::default();
                }
            }
        }
        self.counters.unsharded_bytes.fetch_sub(unit.unsharded_bytes(), Ordering::Relaxed);
    }

    /// Copies the part of a gathered unit that this rank keeps for the backward, under `To`.
    pub(super) fn keep_part(&self, state: &mut State<B>, index: usize) {
        let (Reshard::To(group), ShardState::Unsharded) =
            (&self.settings.reshard, &state.units[index].shard_state)
        else {
            return;
        };
        if state.parts[index].is_empty() {
            return;
        }
        for (part, &slot) in state.parts[index].iter().zip(&state.slots_of[index]) {
            let len = part.numel();
            part.write(0, state.slots[slot].view(self.part_of(group) * len, &[len]));
        }
        B::complete(&self.device);
        state.units[index].kept_part = true;
    }

    /// Reshards a unit that nothing uses, whatever state it is in.
    pub(super) fn evict(&self, state: &mut State<B>, index: usize) -> Result<(), Error> {
        if std::mem::take(&mut state.units[index].prefetched) {
            count(&self.counters.mis_prefetches);
        }
        self.wait_for_unshard(state, index)?;
        self.reshard(state, index);
        Ok(())
    }

    /// Gives a unit slots of its own in place of those it shares with one whose backward may run beside
    /// its own. The unit has no graph yet that looks into its present slots.
    pub(super) fn add_slots(
        &self,
        state: &mut State<B>,
        index: usize,
        other: usize,
    ) -> Result<(), Error> {
        self.evict(state, index)?;
        for (range, buffer) in self.units[index].buffers().into_iter().enumerate() {
            if state.slots_of[other].contains(&state.slots_of[index][range]) {
                state.slots_of[index][range] = self.add_slot(state, index, other, buffer);
            }
        }
        Ok(())
    }

    /// A new slot, which is needed as two units are live at once.
    fn add_slot(
        &self,
        state: &mut State<B>,
        index: usize,
        other: usize,
        (numel, dtype): (usize, DType),
    ) -> usize {
        let slot = Arc::new(GatherBuffer::<B>::new(&self.device, numel, dtype));
        tracing::warn!(
            target: "fsdp",
            "{} and {} are live at once and share a buffer: one of {} bytes was added; set the \
             option `slots` above {} to have it from the start",
            self.units[index].name,
            self.units[other].name,
            slot.bytes(),
            self.settings.slots,
        );
        count(&self.counters.added_slots);
        self.tracker.take(MemoryKind::Gathered, slot.bytes());
        state.slots.push(slot);
        state.owners.push(None);
        state.slots.len() - 1
    }
}
