//! What [`Fsdp`](crate::Fsdp) asks of a schedule between passes, whatever its backend.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use burn::tensor::{DispatchTensor, TensorData};

use super::{Counts, Schedule, Step, Whole};
use crate::backend::Norm;
use crate::backend::{ShardBackend, StoredTensor, to_data};
use crate::collectives::Op;
use crate::collectives::comm::Communicator;
use crate::error::Error;
use crate::layout::Mesh;
use crate::module::RandomStream;
use crate::module::{ParamIndex, Runtime};
use crate::options::ShardingStrategy;
use crate::param_group::memory::{Memory, MemoryKind};
use crate::param_group::{Placement, Unit};

/// The erased schedule of a sharded model.
pub(crate) trait Engine: Runtime {
    /// This rank's place.
    fn mesh(&self) -> Mesh;
    /// The model's units, in layout order.
    fn units(&self) -> &[Unit];
    /// What is sharded.
    fn strategy(&self) -> ShardingStrategy;
    /// What issues this rank's collectives.
    fn comm(&self) -> &Arc<Communicator>;
    /// The model's randomness on this rank.
    fn random(&self) -> &Arc<RandomStream>;
    /// How often this rank did what.
    fn counts(&self) -> Counts;
    /// The most bytes of gathered parameters there were at once.
    fn peak_unsharded_bytes(&self) -> usize;
    /// Bytes of the buffers that gathered parameters live in.
    fn gather_buffer_bytes(&self) -> usize;
    /// How long collectives have taken, and how long this rank has waited for them.
    fn communication_time(&self) -> (Duration, Duration);
    /// What this rank holds on its device.
    fn memory(&self) -> Memory;
    /// What this rank holds in the host's memory in its place.
    fn host_memory(&self) -> Memory;
    /// The bytes of an optimizer's state.
    fn record_optimizer(&self, bytes: usize);
    /// Begins a backward pass; `accumulate` says that another one of the same step follows.
    fn begin_backward(&self, accumulate: bool);
    /// Ends a backward pass.
    fn finish_backward(&self) -> Result<(), Error>;
    /// The reduced gradient of a parameter, once.
    fn take_gradient(&self, place: ParamIndex) -> Option<DispatchTensor>;
    /// The norm over all ranks of reduced gradients.
    fn gradient_norm(
        &self,
        gradients: Vec<(ParamIndex, DispatchTensor)>,
        norm: Norm,
    ) -> Result<f64, Error>;
    /// A full parameter, given its base; every rank calls, `keep` says who wants the result.
    fn full(
        &self,
        place: ParamIndex,
        base: DispatchTensor,
        keep: bool,
    ) -> Result<Option<TensorData>, Error>;
    /// Lets go of the parameters that were collected, unless a pass still needs them.
    fn forget(&self);
    /// Says which parameters are to be loaded before they are used.
    fn set_unloaded(&self, places: &[ParamIndex]);
    /// Says which parameters hold loaded values.
    fn set_loaded(&self, places: &[ParamIndex]);
    /// Shows a tensor's elements in order, as bytes of the host, without a copy where it can.
    fn with_bytes(&self, tensor: DispatchTensor, f: &mut dyn FnMut(&[u8]));
    /// Whether gradients are finite, on each rank of the world, beside what it scales its loss by.
    fn exchange_finite(&self, finite: bool, scale: f32) -> Result<Vec<Arc<(bool, f32)>>, Error>;
    /// Each rank's gradients, as their numbers of elements, in the order of the shard group.
    fn exchange_gradients(
        &self,
        gradients: Vec<Option<usize>>,
    ) -> Result<Vec<Arc<Vec<Option<usize>>>>, Error>;
    /// Updates matrices whole, each on its owner, of which each has one; returns the new shards.
    fn step_whole(
        &self,
        round: Vec<Whole>,
        step: &mut Step<'_>,
    ) -> Result<Vec<Option<DispatchTensor>>, Error>;
}

impl<B: ShardBackend> Engine for Schedule<B> {
    fn mesh(&self) -> Mesh {
        self.settings.mesh
    }

    fn units(&self) -> &[Unit] {
        &self.units
    }

    fn strategy(&self) -> ShardingStrategy {
        self.settings.strategy
    }

    fn comm(&self) -> &Arc<Communicator> {
        &self.comm
    }

    fn random(&self) -> &Arc<RandomStream> {
        &self.random
    }

    fn counts(&self) -> Counts {
        let read = |counter: &std::sync::atomic::AtomicUsize| counter.load(Ordering::Relaxed);
        Counts {
            all_gathers: read(&self.counters.all_gathers),
            single_gathers: read(&self.counters.single_gathers),
            sent_bytes: read(&self.counters.sent_bytes),
            reduce_scatters: read(&self.counters.reduce_scatters),
            all_reduces: read(&self.counters.all_reduces),
            mis_prefetches: read(&self.counters.mis_prefetches),
            added_slots: read(&self.counters.added_slots),
        }
    }

    fn peak_unsharded_bytes(&self) -> usize {
        self.counters.peak_unsharded_bytes.load(Ordering::Relaxed)
    }

    fn gather_buffer_bytes(&self) -> usize {
        let state = self.lock();
        let parts = state.parts.iter().flatten();
        state.slots.iter().chain(parts).map(|slot| slot.bytes()).sum()
    }

    fn communication_time(&self) -> (Duration, Duration) {
        self.comm.times()
    }

    fn memory(&self) -> Memory {
        self.tracker.device()
    }

    fn host_memory(&self) -> Memory {
        self.tracker.host()
    }

    fn record_optimizer(&self, bytes: usize) {
        self.tracker.set(MemoryKind::Optimizer, bytes);
    }

    fn begin_backward(&self, accumulate: bool) {
        self.pre_backward_first(accumulate);
    }

    fn finish_backward(&self) -> Result<(), Error> {
        self.post_backward_final()
    }

    fn take_gradient(&self, place: ParamIndex) -> Option<DispatchTensor> {
        let gradient = self.lock().units[place.unit].reduced[place.entry].take()?;
        Some(gradient.into_dispatch())
    }

    /// Each rank sums up its own shards, in layout order; the partial sums are added in rank
    /// order, then those of replicated parameters. A rank that holds a matrix whole sums up every
    /// rank's part by itself, so that all strategies find the same bits.
    fn gradient_norm(
        &self,
        gradients: Vec<(ParamIndex, DispatchTensor)>,
        norm: Norm,
    ) -> Result<f64, Error> {
        let mesh = self.settings.mesh;
        let (mut parts, mut ranks) = (Vec::new(), Vec::new());
        let mut whole = Vec::new();
        for (place, gradient) in gradients {
            let (unit, entry) = self.place(place);
            let Some((gradient, ..)) = StoredTensor::<B>::read(gradient, self.settings.rest) else {
                continue;
            };
            if entry.segment.is_none() {
                whole.push((gradient, 0..entry.numel()));
                continue;
            }
            for (rank, range) in unit.norm_ranges(place.entry, mesh) {
                ranks.push(rank);
                parts.push((gradient.clone(), range));
            }
        }
        let mut partial = vec![0f64; mesh.shard_size().size()];
        for (rank, sum) in ranks.into_iter().zip(StoredTensor::norm_sums(parts, norm)) {
            partial[rank] = norm.add(partial[rank], sum);
        }
        // Whether there are shards is the same on all ranks; one whose own are empty takes part.
        if self.units.iter().any(|unit| unit.gathers) {
            let mine = partial[mesh.shard_rank().index()];
            let op = Op::new("all_reduce", "the gradient norm");
            let group = &self.settings.groups.shard;
            tracing::trace!(target: "fsdp", "fsdp::reduce_norm");
            let all = self.comm.issue_on(group, move |group| group.exchange(&op, mine)).wait()?;
            partial = all.iter().map(|sum| **sum).collect();
        }
        // `-0.0` is what a sum of floats begins with.
        let sum = partial.into_iter().chain(StoredTensor::norm_sums(whole, norm));
        Ok(norm.root(sum.fold(-0.0, |sum, part| norm.add(sum, part))))
    }

    fn full(
        &self,
        place: ParamIndex,
        base: DispatchTensor,
        keep: bool,
    ) -> Result<Option<TensorData>, Error> {
        let (_, entry) = self.place(place);
        if self.lock().unloaded.contains(&place) {
            return Err(self.not_loaded(place));
        }
        let Some((base, ..)) = StoredTensor::<B>::read(base, self.settings.rest) else {
            return Ok(None);
        };
        let base = self.on_device(base);
        let full = match &entry.held {
            Placement::Shard(_) if keep => self.gather_single(place, base)?,
            Placement::Shard(_) => {
                // Whoever does not keep it does not put it together either.
                self.gather_parts(place, base)?;
                return Ok(None);
            }
            Placement::Replicated | Placement::PerRank if keep => base,
            Placement::Replicated | Placement::PerRank | Placement::TiedTo(_) => return Ok(None),
        };
        Ok(Some(to_data::<B>(full)))
    }

    fn forget(&self) {
        let state = &mut *self.lock();
        if state.open == 0 && state.calls.is_empty() {
            self.forget_shards(state);
        }
    }

    fn set_unloaded(&self, places: &[ParamIndex]) {
        let owned =
            |place: &&ParamIndex| !matches!(self.place(**place).1.held, Placement::TiedTo(_));
        self.lock().unloaded = places.iter().filter(owned).copied().collect();
    }

    fn set_loaded(&self, places: &[ParamIndex]) {
        let mut state = self.lock();
        for place in places {
            state.unloaded.remove(place);
        }
    }

    fn with_bytes(&self, tensor: DispatchTensor, f: &mut dyn FnMut(&[u8])) {
        if let Some((tensor, ..)) = StoredTensor::<B>::read(tensor, self.settings.rest) {
            tensor.with_bytes(f);
        }
    }

    fn exchange_finite(&self, finite: bool, scale: f32) -> Result<Vec<Arc<(bool, f32)>>, Error> {
        let op = Op::new("all_reduce", "the overflow check");
        tracing::trace!(target: "fsdp", finite, "fsdp::reduce_finite");
        Ok(self.comm.issue(move |group| group.exchange(&op, (finite, scale))).wait()?)
    }

    fn exchange_gradients(
        &self,
        gradients: Vec<Option<usize>>,
    ) -> Result<Vec<Arc<Vec<Option<usize>>>>, Error> {
        let op = Op::new("all_gather", "what has gradients");
        let group = &self.settings.groups.shard;
        Ok(self.comm.issue_on(group, move |group| group.exchange(&op, gradients)).wait()?)
    }

    fn step_whole(
        &self,
        round: Vec<Whole>,
        step: &mut Step<'_>,
    ) -> Result<Vec<Option<DispatchTensor>>, Error> {
        self.step_round(round, step)
    }
}
