//! Measurements of a sharded model on this rank: memory, collectives, sizes.

use std::time::Duration;

use super::model::Fsdp;
use crate::layout::Mesh;
use crate::param_group::Unit;
use crate::param_group::memory::{Memory, MemoryHolder, MemoryTimeline};
use crate::param_group::wrapping::Wrapping;
use crate::runtime::schedule::Counts;

/// The measurements of a sharded model on this rank.
///
/// [`Fsdp::stats`] returns it.
#[derive(Debug)]
pub struct Stats<'a, M> {
    pub(crate) model: &'a Fsdp<M>,
}

impl<M> Fsdp<M> {
    /// Returns the measurements of the model on this rank: memory, number of collectives, units,
    /// sizes.
    pub fn stats(&self) -> Stats<'_, M> {
        Stats { model: self }
    }
}

impl<M> Stats<'_, M> {
    /// Returns this rank's coordinates in the device mesh.
    pub fn mesh(&self) -> Mesh {
        self.model.schedule.mesh()
    }

    /// Returns the number of elements of all parameters of the full model. A tied weight counts
    /// once.
    pub fn num_params(&self) -> usize {
        self.model.schedule.units().iter().map(Unit::num_params).sum()
    }

    /// Returns the bytes of parameters that this rank holds between steps: its shards and the
    /// replicated parameters.
    pub fn sharded_bytes(&self) -> usize {
        let stored = self.model.schedule.units().iter().map(Unit::stored_bytes);
        stored.map(|(shards, replicated)| shards + replicated).sum()
    }

    /// Returns the largest number of bytes of gathered parameters that this rank held at once. Parameters
    /// that are gathered in place
    /// ([`with_gather_in_place`](crate::options::FsdpOptions::with_gather_in_place)) count like others.
    ///
    /// It is 0 where nothing is gathered: under `NO_SHARD`, and on CubeCL devices for f32
    /// parameters that are not divided among several ranks.
    pub fn peak_unsharded_bytes(&self) -> usize {
        self.model.schedule.peak_unsharded_bytes()
    }

    /// Returns the bytes of the gather buffers, which are allocated once. Those of units that are gathered in
    /// place ([`with_gather_in_place`](crate::options::FsdpOptions::with_gather_in_place)) are allocated, and
    /// counted, when such a unit first has to be copied.
    pub fn gather_buffer_bytes(&self) -> usize {
        self.model.schedule.gather_buffer_bytes()
    }

    /// Returns the bytes that this rank holds on its device for the model, by kind: now, and the
    /// most at once.
    pub fn memory(&self) -> Memory {
        self.model.schedule.memory()
    }

    /// Returns the bytes that this rank holds in host memory in place of device memory: parameters,
    /// gradients and optimizer state under an [`OffloadPolicy`](crate::options::OffloadPolicy), and
    /// offloaded activations.
    pub fn host_memory(&self) -> Memory {
        self.model.schedule.host_memory()
    }

    /// Returns what holds the bytes of [`memory`](Self::memory) and
    /// [`host_memory`](Self::host_memory) at present, by kind and unit, the largest holder first.
    pub fn memory_holders(&self) -> Vec<MemoryHolder> {
        self.model.schedule.memory_handle().holders()
    }

    /// Starts a record of the changes of [`memory`](Self::memory) and
    /// [`host_memory`](Self::host_memory) over time, and drops a running record, if there is one.
    ///
    /// The record holds the newest `max_samples` changes, and as many marks of units and steps. A step
    /// of a model with `n` units makes about `10 n` changes and `2 n` marks. By default there is no
    /// record.
    ///
    /// PyTorch's `torch.cuda.memory._record_memory_history(max_entries=max_samples)`.
    pub fn start_memory_timeline(&self, max_samples: usize) {
        self.model.schedule.memory_handle().start_timeline(max_samples);
    }

    /// Returns the record of memory over time so far. Returns `None` without
    /// [`start_memory_timeline`](Self::start_memory_timeline).
    pub fn memory_timeline(&self) -> Option<MemoryTimeline> {
        self.model.schedule.memory_handle().timeline()
    }

    /// Ends the record of memory over time and returns it. Returns `None` without
    /// [`start_memory_timeline`](Self::start_memory_timeline).
    pub fn stop_memory_timeline(&self) -> Option<MemoryTimeline> {
        let timeline = self.memory_timeline();
        self.model.schedule.memory_handle().stop_timeline();
        timeline
    }

    /// Returns the units of the model as a tree: path, type, parameters, bytes.
    pub fn wrapping(&self) -> Wrapping {
        Wrapping::new(self.model.schedule.units())
    }

    /// Returns how long this rank's collectives have taken since its launch, and how much of that
    /// time the rank waited for them. Both include the delays of other ranks; the difference
    /// overlapped with this rank's computation.
    ///
    /// On CubeCL devices it is the time that the host takes to issue the collectives; the device runs
    /// them later. With the environment variable `FSDP_NCCL_STREAM` at `0` the engine `nccl` waits
    /// for their end.
    pub fn communication_time(&self) -> (Duration, Duration) {
        self.model.schedule.communication_time()
    }

    /// Returns how often this rank has blocked on a collective since its launch. A collective whose
    /// result is there already counts as none.
    ///
    /// On CubeCL devices with the engine `local` the rank blocks until its communication thread has
    /// issued the collective, at which it waits for the other ranks. It never waits for the device.
    /// All-gathers of units block once in a forward pass, when ranks exchange their shards.
    pub fn waits(&self) -> usize {
        self.model.schedule.waits()
    }

    /// Returns the number of all-gathers and reductions that this rank has run.
    pub fn counts(&self) -> Counts {
        self.model.schedule.counts()
    }
}
