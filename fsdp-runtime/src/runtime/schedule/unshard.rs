//! The all-gathers of a unit, and the assignment of gather buffers to units.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use super::core::Schedule;
use super::counters::count;
use super::decide::{Pass, Turn, When};
use super::state::State;
use super::unit_state::{LocalShard, ShardState, UnitState};
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{
    Float, ModelBackend, Raw, ShardBackend, StorageDevice, StoredTensor, decoded, numel as numel_of,
};
use crate::collectives::device_work::DeviceWork;
use crate::collectives::group::AnyProcessGroup;
use crate::collectives::{Op, ProcessGroup};
use crate::error::{CollectiveError, Error, ScheduleError};
use crate::layout::StorageType;
use crate::param_group::memory::{Counted, MemoryKind, MemoryTracker};
use crate::param_group::{ParamSpec, Placement, Unit};

/// A shard to be sent in an all-gather.
pub(super) struct ShardToSend<B: ShardBackend> {
    /// Offset of the shard in the flat range, in elements as they are sent.
    offset: usize,
    pub(super) value: StoredTensor<B>,
    /// Place for the sent copy, if it is kept for backward.
    sent: Option<Arc<OnceLock<Float<B>>>>,
}

/// A replicated parameter in host memory, to be copied to the device.
struct CopyToDevice<B: ShardBackend> {
    value: StoredTensor<B>,
    storage: StorageType,
    shape: Vec<usize>,
    dtype: DType,
    on_device: Arc<OnceLock<Float<B>>>,
}

impl<B: ShardBackend> CopyToDevice<B> {
    /// Copies the parameter, unless a copy exists.
    fn run(self, device: &B::Device, place: StorageDevice) {
        let Self { value, storage, shape, dtype, on_device } = self;
        let sent = storage.sent_dtype(dtype);
        on_device.get_or_init(|| {
            decoded::<B>(value.on_device(device, sent, place), storage, &shape, dtype)
        });
    }
}

/// Elements that are not sent as the gather buffer has them.
struct Codes<B: ShardBackend> {
    /// Buffer that they are received in.
    buffer: Arc<GatherBuffer<B>>,
    storage: StorageType,
    /// Buffer for the part that this rank keeps for backward, and the part's position in `buffer`.
    kept: Option<(Arc<GatherBuffer<B>>, usize)>,
}

impl<B: ShardBackend> Codes<B> {
    /// Writes the elements of the received `numel` codes to a gather buffer, and gives the buffer of
    /// the codes back.
    fn decode_into(self, numel: usize, target: &GatherBuffer<B>) {
        let Self { buffer, storage, kept } = self;
        target.decode(buffer.view(0, &[numel]), storage);
        if let Some((part, start)) = kept {
            part.write(0, buffer.view(start, &[part.numel()]));
        }
        buffer.release();
    }
}

/// The shards that this rank sends, for each flat range of a unit, and the process group of the
/// all-gathers.
type CopyIn<B> = (Vec<Vec<ShardToSend<B>>>, Arc<AnyProcessGroup>);

/// Mark of the operations of a rank's own thread.
type Fence<B> = <Raw<B> as ShardBackend>::Fence;

/// The all-gather of one flat range.
pub(super) struct AllGather<B: ShardBackend> {
    /// Index of the unit.
    unit: usize,
    op: Op,
    pub(super) shards: Vec<ShardToSend<B>>,
    /// Elements of the flat range as they are sent, padding included.
    numel: usize,
    /// Dtype in which the elements are sent.
    pub(super) dtype: DType,
    pub(super) buffer: Arc<GatherBuffer<B>>,
    codes: Option<Codes<B>>,
    /// Form in which shards are encoded before they are sent, if they are.
    encode: Option<StorageType>,
    /// Counter of the bytes that this rank has sent.
    pub(super) sent_bytes: Arc<AtomicUsize>,
    tracker: Arc<MemoryTracker>,
}

impl<B: ShardBackend> AllGather<B> {
    /// Counts the bytes of this rank's shards, which the other ranks read without a collective.
    pub(super) fn count_sent(&self) {
        let bytes = self.shards.iter().map(|shard| shard.value.numel() * self.dtype.size());
        self.sent_bytes.fetch_add(bytes.sum(), Ordering::Relaxed);
    }

    /// Runs the all-gather in `group`, on the communication thread.
    fn run(
        self,
        group: &AnyProcessGroup,
        device: &B::Device,
        storage: StorageDevice,
    ) -> Result<(), CollectiveError> {
        let Self { unit, op, shards, numel, dtype, buffer, codes, encode, sent_bytes, tracker } =
            self;
        // Ranks that share a device copy shards into the buffer by a kernel that casts as well.
        let casts_later = group.shares_device::<B>();
        let dtype_of = |shard: &ShardToSend<B>| match &shard.value {
            StoredTensor::Device(value) if casts_later && shard.sent.is_none() => value.dtype(),
            _ => dtype,
        };
        let is_temporary = |shard: &&ShardToSend<B>| {
            let is_made = encode.is_some() || !shard.value.is_on_device(dtype_of(shard));
            shard.sent.is_none() && is_made
        };
        let bytes = |shard: &ShardToSend<B>| match encode {
            Some(codes) => codes.stored_bytes(shard.value.numel()),
            None => shard.value.numel() * dtype.size(),
        };
        let temporary = shards.iter().filter(is_temporary).map(bytes).sum();
        let _temporary = Counted::new(&tracker, MemoryKind::AllGatherInputs, temporary, unit);
        let send = |shard: ShardToSend<B>| {
            let dtype = dtype_of(&shard);
            let ShardToSend { offset, value, sent } = shard;
            let copy = || match encode {
                Some(codes) => value.encoded(codes, device),
                None => value.on_device(device, dtype, storage),
            };
            let value = match sent {
                Some(sent) => sent.get_or_init(copy).clone(),
                None => copy(),
            };
            (offset, value)
        };
        let shards: Vec<_> = shards.into_iter().map(send).collect();
        let bytes = |(_, value): &(usize, Float<B>)| numel_of::<B>(value) * dtype.size();
        sent_bytes.fetch_add(shards.iter().map(bytes).sum(), Ordering::Relaxed);
        let shard_len = numel / group.size();
        let received = codes.as_ref().map_or(&buffer, |codes| &codes.buffer);
        ProcessGroup::<B>::all_gather(group, &op, device, shards, shard_len, received)?;
        if let Some(codes) = codes {
            codes.decode_into(numel, &buffer);
        }
        Ok(())
    }
}

impl<B: ModelBackend> Schedule<B> {
    /// Issues the all-gathers of a unit. Does nothing if the unit is gathered already.
    ///
    /// A prefetch is skipped if one of the gather buffers is in use; otherwise that is an error.
    pub(super) fn unshard(
        &self,
        state: &mut State<B>,
        index: usize,
        pass: Pass,
        when: When,
    ) -> Result<(), Error> {
        let unit = &self.units[index];
        if when == When::Now {
            state.units[index].prefetched = false;
        }
        if !matches!(state.units[index].shard_state, ShardState::Sharded) {
            return Ok(());
        }
        self.lower_shards(state, index);
        let copies = self.copies(state, index, pass);
        if state.buffers.turns.has_none(index) && copies.is_empty() {
            return Ok(());
        }
        let Some((shards, group)) = self.copy_in(state, index, pass, when)? else {
            return Ok(());
        };
        let in_place = self.gather_in_place(state, index)?;
        if !in_place && !self.acquire_buffers(state, index, when)? {
            return Ok(());
        }
        tracing::trace!(target: "fsdp", unit = %unit.name, ahead = when == When::Ahead, "fsdp::unshard");
        if !copies.is_empty() {
            state.units[index].copied_bytes = unit.replicated_bytes();
            self.tracker.take(MemoryKind::ReplicatedCopies, unit.replicated_bytes(), index);
        }
        let gathers = self.all_gathers(state, index, pass, shards);
        if !in_place && !state.buffers.turns.holds(index) {
            let allocated = state.buffers.allocate(index);
            self.tracker.take(MemoryKind::GatherBuffers, allocated, index);
        }
        // Codes are received in buffers that only the communication thread uses.
        let has_codes = gathers.iter().any(|gather| gather.codes.is_some());
        let work = if in_place {
            gathers.iter().for_each(AllGather::count_sent);
            DeviceWork::Issued(Ok(()))
        } else if self.reads_peers(state, index, &group) && !has_codes {
            self.gather_from_peers(state, index, gathers)?;
            DeviceWork::Issued(Ok(()))
        } else {
            self.issue_gathers(state, (index, pass), &group, gathers, copies)
        };
        state.units[index].shard_state = ShardState::Unsharding(work);
        state.units[index].prefetched = when == When::Ahead;
        self.counters.add_unsharded(unit.unsharded_bytes());
        Ok(())
    }

    /// Issues the all-gathers of a unit, and the copies of offloaded parameters to the device, as
    /// one job of the communication thread.
    fn issue_gathers(
        &self,
        state: &mut State<B>,
        (index, pass): (usize, Pass),
        group: &Arc<AnyProcessGroup>,
        gathers: Vec<AllGather<Raw<B>>>,
        copies: Vec<CopyToDevice<Raw<B>>>,
    ) -> DeviceWork<Raw<B>, ()> {
        let (device, storage) = (self.device.clone(), self.settings.storage);
        let collective = move |group: &AnyProcessGroup| {
            for gather in gathers {
                gather.run(group, &device, storage)?;
            }
            for copy in copies {
                copy.run(&device, storage);
            }
            Ok(())
        };
        let after = || self.fence_of_shards(state, index, pass);
        self.issue_after(group, after, collective)
    }

    /// Makes a unit the owner of its gather buffers and evicts the units in them. Returns `false`
    /// if a prefetch finds one of the buffers in use.
    fn acquire_buffers(
        &self,
        state: &mut State<B>,
        index: usize,
        when: When,
    ) -> Result<bool, Error> {
        let turn = state.buffers.turns.turn(index, when, |owner| state.units[owner].in_use());
        match turn {
            Turn::Skip => Ok(false),
            Turn::Busy(owner) => Err(ScheduleError::GatherBufferBusy {
                unit: self.units[index].name.to_string(),
                owner: self.units[owner].name.to_string(),
                gather_buffers: self.settings.timing.gather_buffers,
            }
            .into()),
            Turn::Take(owners) => {
                for owner in owners {
                    self.evict(state, owner)?;
                }
                state.buffers.turns.acquire(index);
                Ok(true)
            }
        }
    }

    /// Returns the all-gathers of a unit, one for each flat range, and counts them.
    fn all_gathers(
        &self,
        state: &State<B>,
        index: usize,
        pass: Pass,
        shards: Vec<Vec<ShardToSend<Raw<B>>>>,
    ) -> Vec<AllGather<Raw<B>>> {
        let unit = &self.units[index];
        let ranges = unit.layout.ranges().iter().zip(unit.code_buffers()).zip(shards);
        let is_kept = pass == Pass::Backward && state.units[index].has_kept_part;
        let mut gathers = Vec::new();
        for (range, ((flat, sent), shards)) in ranges.enumerate() {
            count(&self.counters.all_gathers);
            let (numel, dtype) = sent.unwrap_or((flat.layout.padded_len(), flat.dtype));
            let codes = sent.map(|_| Codes {
                buffer: state.buffers.codes(dtype),
                storage: flat.sent,
                kept: self.kept_codes(state, (index, range), pass),
            });
            gathers.push(AllGather {
                unit: index,
                op: Op::new("all_gather", unit.name.clone()).of(numel),
                shards,
                numel,
                dtype,
                buffer: state.buffers.of_range(index, range).clone(),
                codes,
                encode: (flat.sent != flat.storage && !is_kept).then_some(flat.sent),
                sent_bytes: self.counters.sent_bytes.clone(),
                tracker: self.tracker.clone(),
            });
        }
        gathers
    }

    /// Returns the buffer for the part of a flat range of codes that this rank keeps under
    /// `ReshardAfterForward::To`, and the part's position in the range. Returns `None` if the all-gather sends
    /// that part.
    fn kept_codes(
        &self,
        state: &State<B>,
        (index, range): (usize, usize),
        pass: Pass,
    ) -> Option<(Arc<GatherBuffer<Raw<B>>>, usize)> {
        let group = state.block(index)?;
        if pass == Pass::Backward && state.units[index].has_kept_part {
            return None;
        }
        let part = state.buffers.kept_parts(index).get(range)?;
        Some((part.clone(), self.kept_part_index(group) * part.numel()))
    }

    /// Returns the fence after the operations that wrote the shards of a unit. The unit's
    /// all-gathers wait for it before they send the shards.
    ///
    /// The module's parameters do not change during a pass. So one fence, made when the pass first
    /// reads them, serves all units.
    fn fence_of_shards(&self, state: &mut State<B>, index: usize, pass: Pass) -> Fence<B> {
        let fence = || Raw::<B>::fence(&self.device);
        if pass == Pass::Backward && state.units[index].has_kept_part {
            return fence();
        }
        state.shards_written.get_or_insert_with(fence).clone()
    }

    /// Lowers the shards of all units if a unit needs one that has no buffer yet: once in a pass,
    /// as the outermost forward reads all of them from the module.
    fn lower_shards(&self, state: &mut State<B>, index: usize) {
        let on_host = self.settings.storage != StorageDevice::Device;
        let missing = |(entry, shard): (&ParamSpec, &Option<LocalShard<B>>)| {
            let shard = shard.as_ref().filter(|shard| shard.buffer.get().is_none())?;
            let is_sharded = matches!(entry.placement, Placement::Shard(_));
            (is_sharded || on_host).then(|| shard.clone())
        };
        let of_unit = |(unit, shards): (&Unit, &UnitState<B>)| -> Vec<LocalShard<B>> {
            unit.params.iter().zip(&shards.shards).filter_map(missing).collect()
        };
        if of_unit((&self.units[index], &state.units[index])).is_empty() {
            return;
        }
        let missing: Vec<_> = self.units.iter().zip(&state.units).flat_map(of_unit).collect();
        let values = missing.iter().map(|shard| shard.value.clone()).collect();
        for (shard, buffer) in missing.iter().zip(self.lower(values)) {
            shard.buffer.get_or_init(|| buffer);
        }
        // The operations that write the shards have been launched only now.
        state.shards_written = None;
    }

    /// Returns the shards that this rank sends in a unit's all-gathers. Returns `None` if a
    /// prefetch finds that the unit's shards have not been read from the module.
    fn copy_in(
        &self,
        state: &State<B>,
        index: usize,
        pass: Pass,
        when: When,
    ) -> Result<Option<CopyIn<Raw<B>>>, Error> {
        let unit = &self.units[index];
        if let (Pass::Backward, true, Some(group)) =
            (pass, state.units[index].has_kept_part, state.block(index))
        {
            let kept = |part: &Arc<GatherBuffer<Raw<B>>>| {
                let len = part.numel();
                let offset = self.kept_part_index(group) * len;
                let value = StoredTensor::Device(part.view(0, &[len]));
                vec![ShardToSend { offset, value, sent: None }]
            };
            let parts = state.buffers.kept_parts(index).iter().map(kept).collect();
            return Ok(Some((parts, group.clone())));
        }
        let mut ranges: Vec<Vec<ShardToSend<Raw<B>>>> = Vec::new();
        ranges.resize_with(unit.layout.ranges().len(), Vec::new);
        for (at, (entry, shard)) in unit.params.iter().zip(&state.units[index].shards).enumerate() {
            let Placement::Shard(range) = &entry.placement else { continue };
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
                let value = shard.buffer().clone();
                let offset = entry.sent().stored_len(start + range.start);
                ranges[flat].push(ShardToSend { offset, value, sent });
            }
        }
        Ok(Some((ranges, self.settings.groups.shard.clone())))
    }

    /// Returns the offloaded replicated parameters that a unit's forward reads, to be copied to the
    /// device after the all-gathers. Backward reads them only if it recomputes the forward.
    fn copies(&self, state: &State<B>, index: usize, pass: Pass) -> Vec<CopyToDevice<Raw<B>>> {
        let unit = &self.units[index];
        if !self.decisions(state).copies_replicated(index, pass) {
            return Vec::new();
        }
        let params = unit.params.iter().zip(&state.units[index].shards);
        let replicated = params.filter(|(entry, _)| entry.placement == Placement::Replicated);
        replicated
            .filter_map(|(entry, param)| {
                let param = param.as_ref()?;
                let (value, on_device) = (param.buffer().clone(), param.on_device.clone());
                let ParamSpec { storage, dtype, shape, .. } = entry;
                let (storage, dtype, shape) = (*storage, *dtype, shape.clone());
                Some(CopyToDevice { value, storage, shape, dtype, on_device })
            })
            .collect()
    }

    /// Replaces the gather buffers that a unit shares with `other`, whose backward may run at the
    /// same time. The unit has no graph yet that contains views of the present buffers.
    pub(super) fn separate_buffers(
        &self,
        state: &mut State<B>,
        index: usize,
        other: usize,
    ) -> Result<(), Error> {
        self.evict(state, index)?;
        for (range, size) in self.units[index].buffers().into_iter().enumerate() {
            if state.buffers.turns.shares_range(index, range, other) {
                self.add_buffer(state, (index, range), other, size);
            }
        }
        Ok(())
    }

    /// Adds a gather buffer for one flat range of a unit, and warns about it.
    fn add_buffer(
        &self,
        state: &mut State<B>,
        (index, range): (usize, usize),
        other: usize,
        size: (usize, DType),
    ) {
        let buffer = state.buffers.add(index, range, &self.device, size);
        tracing::warn!(
            target: "fsdp",
            "{} and {} are in use at the same time and share a gather buffer: one of {} bytes was \
             added; call `with_gather_buffers` with more than {} to have it from the start",
            self.units[index].name,
            self.units[other].name,
            buffer.bytes(),
            self.settings.timing.gather_buffers,
        );
        count(&self.counters.added_gather_buffers);
        self.tracker.take(MemoryKind::GatherBuffers, buffer.bytes(), index);
    }
}
