//! The reduction of a unit's gradients.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::backend::Backend;
use burn::tensor::DType;

use super::core::Schedule;
use super::counters::count;
use super::decide::reductions_due;
use super::reduce_codes;
use super::reduction::{Reduced, Reduction, add_up};
use super::state::State;
use crate::backend::{
    Float, ModelBackend, Raw, RawFloat, ShardBackend, StorageDevice, StoredTensor, bytes,
};
use crate::collectives::group::AnyProcessGroup;
use crate::collectives::{Op, ProcessGroup, Reduce, ReduceScatter};
use crate::error::{CollectiveError, Error};
use crate::layout::{StorageType, UnitLayout};
use crate::options::GradientAccumulation;
use crate::param_group::memory::{Counted, MemoryKind, MemoryTracker};

/// Returns the bytes of all tensors that are present.
pub(super) fn total_bytes<B: Backend>(tensors: &[Option<Float<B>>]) -> usize {
    tensors.iter().flatten().map(bytes::<B>).sum()
}

/// Returns the bytes of all stored tensors that are present.
fn stored_bytes<B: ModelBackend>(tensors: &[Option<StoredTensor<Raw<B>>>]) -> usize {
    tensors.iter().flatten().map(StoredTensor::bytes).sum()
}

/// A job of the communication thread: the reduction of a unit's gradients.
struct ReduceUnit<B: ShardBackend> {
    /// Index of the unit.
    unit: usize,
    op: Op,
    device: B::Device,
    storage: StorageDevice,
    /// Full gradients, one for each parameter of the unit.
    gradients: Vec<Option<Float<B>>>,
    /// The elements of each gradient that this rank keeps.
    keep: Vec<Reduce>,
    layout: UnitLayout,
    divisor: Divisor,
    replicas: Replicas<B>,
    /// Codes that the gradients of sharded matrices are sent in, if there are any, and their bytes.
    codes: Option<(StorageType, usize)>,
    tracker: Arc<MemoryTracker>,
}

impl<B: ShardBackend> ReduceUnit<B> {
    /// Reduces the gradients among the shard group, and then among the replicas.
    fn run(self, group: &AnyProcessGroup) -> Result<Reduced<B>, CollectiveError> {
        let Self { unit, op, device, storage, gradients, keep, layout, .. } = self;
        let (divisor, replicas, codes, tracker) =
            (self.divisor, self.replicas, self.codes, self.tracker);
        // On the device, the results and the full gradients exist at the same time until the full
        // gradients are freed. Offloaded results leave the device once they are copied to the host.
        let kept = gradients.iter().zip(&keep).filter(|(gradient, _)| gradient.is_some());
        let results = kept.map(|(_, keep)| keep.range.len() * size_of::<f32>()).sum();
        let counted = Counted::new(&tracker, MemoryKind::ReductionOutputs, results, unit);
        let first = if matches!(replicas, Replicas::None) { divisor.of_sum } else { 1 };
        let request =
            ReduceScatter::<B> { gradients, keep: &keep, layout: &layout, divisor: first };
        // One rank has no one to send codes to.
        let mut reduced = match codes.filter(|_| group.size() > 1) {
            Some((codes, bytes)) => {
                let _codes = Counted::new(&tracker, MemoryKind::ReductionOutputs, bytes, unit);
                reduce_codes::reduce_scatter::<B>(group, &op, &device, request, codes)?
            }
            None => group.reduce_scatter(&op, &device, request)?,
        };
        let is_partial = matches!(replicas, Replicas::Later);
        if let Replicas::Now { group, partial } = replicas {
            let on_device = |sum: StoredTensor<B>| sum.on_device(&device, DType::F32, storage);
            for (sum, partial) in reduced.iter_mut().zip(partial) {
                *sum = match (sum.take(), partial.map(on_device)) {
                    (Some(sum), Some(partial)) => Some(B::float_add(partial, sum)),
                    (sum, partial) => sum.or(partial),
                };
            }
            let size = keep.iter().map(|keep| keep.range.len()).sum();
            let op = Op { name: "all_reduce", unit: op.unit, size };
            let keep: Vec<Reduce> = keep.into_iter().map(all_of_shard).collect();
            let (gradients, divisor) = (reduced, divisor.of_sum);
            let request = ReduceScatter::<B> { gradients, keep: &keep, layout: &layout, divisor };
            reduced = group.reduce_scatter(&op, &device, request)?;
        }
        let divide = |gradient: Float<B>| match divisor.of_result {
            Some(factor) if !is_partial => B::float_div_scalar(gradient, factor.into()),
            _ => gradient,
        };
        let store =
            |gradient: Option<Float<B>>| Some(StoredTensor::store(divide(gradient?), storage));
        let reduced = reduced.into_iter().map(store).collect();
        Ok((reduced, (storage == StorageDevice::Device).then_some(counted)))
    }
}

/// The reduction of a unit's gradients among the replicas of a hybrid strategy, after that in the
/// shard group.
enum Replicas<B: ShardBackend> {
    /// There is one copy of the parameters.
    None,
    /// A later micro-batch adds the result up and reduces it.
    Later,
    /// The result is reduced in the given process group, with the sums of earlier micro-batches.
    Now { group: Arc<AnyProcessGroup>, partial: Vec<Option<StoredTensor<B>>> },
}

/// The number by which sums of gradients are divided.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Divisor {
    /// Divides sums in the kernel that adds them up: the number, if it is an integer, or else 1.
    of_sum: usize,
    /// Divides the sums afterwards: the number, if it is no integer.
    of_result: Option<f32>,
}

impl Divisor {
    /// Returns the divisor of a gradient divide factor, which is positive, in a world of `world`
    /// ranks.
    fn new(factor: Option<f64>, world: usize) -> Self {
        let exact = |factor: f64| factor.fract() == 0.0 && factor <= f64::from(1 << 24);
        match factor {
            None => Self { of_sum: world, of_result: None },
            Some(factor) if exact(factor) => Self { of_sum: factor as usize, of_result: None },
            Some(factor) => Self { of_sum: 1, of_result: Some(factor as f32) },
        }
    }
}

/// Returns how a shard of a gradient is reduced among replicas: every rank keeps all of it.
fn all_of_shard(keep: Reduce) -> Reduce {
    Reduce { range: 0..keep.range.len(), segment: None, dtype: DType::F32, ..keep }
}

impl<B: ModelBackend> Schedule<B> {
    /// Issues the reduction of a unit's gradients. First waits for earlier reductions, so that at
    /// most `reductions_in_flight` run at a time.
    pub(super) fn reduce(&self, state: &mut State<B>, index: usize) -> Result<(), Error> {
        self.collect_early_reductions(state)?;
        let unit = &self.units[index];
        let gradients = &mut state.units[index].unsharded_gradients;
        let gradients: Vec<_> = gradients.iter_mut().map(Option::take).collect();
        let bytes = total_bytes::<B>(&gradients);
        let sent = gradients.iter().zip(&unit.params).filter(|(gradient, _)| gradient.is_some());
        let sent = sent.map(|(_, entry)| entry.sent_gradient_bytes()).sum();
        self.counters.sent_gradient_bytes.fetch_add(sent, Ordering::Relaxed);
        let codes = unit.params.iter().find_map(|entry| entry.gradient_codes);
        let gradients = self.lower_gradients(gradients);
        let name = if unit.gathers { "reduce_scatter" } else { "all_reduce" };
        tracing::trace!(target: "fsdp", unit = %unit.name, op = name, "fsdp::reduce");
        count(&self.counters.reduce_scatters);
        let replicas = self.replicas(state, index);
        let is_partial = matches!(replicas, Replicas::Later);
        if matches!(replicas, Replicas::Now { .. }) {
            count(&self.counters.all_reduces);
        }
        let factor = state.gradients.divide_factor();
        let job = ReduceUnit {
            unit: index,
            op: Op::new(name, unit.name.clone()).of(unit.num_params()),
            device: self.device.clone(),
            storage: self.settings.storage,
            gradients,
            keep: unit.params.iter().map(|entry| entry.reduce(entry.reduce_dtype)).collect(),
            layout: unit.layout.clone(),
            divisor: Divisor::new(factor, self.settings.mesh.world.size()),
            replicas,
            codes: codes.map(|codes| (codes, unit.gradient_code_bytes())),
            tracker: self.tracker.clone(),
        };
        let work = self.issue(&self.settings.groups.shard, move |group| job.run(group));
        state.gradients.reductions.push_back(Reduction { unit: index, is_partial, bytes, work });
        Ok(())
    }

    /// Returns the second part of a unit's reduction, and takes the sums of earlier micro-batches.
    fn replicas(&self, state: &mut State<B>, index: usize) -> Replicas<Raw<B>> {
        let Some(group) = self.settings.groups.replicate.clone() else { return Replicas::None };
        let holds = state.gradients.accumulation == GradientAccumulation::ReduceInGroup;
        let unit = &mut state.units[index];
        if holds && state.gradients.accumulating {
            unit.has_partial = true;
            return Replicas::Later;
        }
        unit.has_partial = false;
        let partial: Vec<_> = unit.partial.iter_mut().map(Option::take).collect();
        let bytes = stored_bytes::<B>(&partial);
        self.tracker.give_back(MemoryKind::ReducedGradients, bytes, index);
        state.gradients.reduced_bytes -= bytes;
        Replicas::Now { group, partial }
    }

    /// Lowers the gradients that are present, all at once.
    fn lower_gradients(&self, gradients: Vec<Option<Float<B>>>) -> Vec<Option<RawFloat<B>>> {
        let present = gradients.iter().map(Option::is_some).collect::<Vec<_>>();
        let mut buffers = self.lower_values(gradients.into_iter().flatten().collect()).into_iter();
        present.into_iter().map(|present| present.then(|| buffers.next())?).collect()
    }

    /// Blocks until at most `running` reductions have not been issued on a shared device. Returns
    /// the number of reductions that are left.
    ///
    /// There a reduction is issued once all ranks have come to it. A rank that is ahead of the
    /// others would block at each of its units. So if it has to block, it lets the others catch up.
    fn block_for_reductions(&self, state: &mut State<B>, running: usize) -> usize {
        let reductions = &mut state.gradients.reductions;
        let due = reductions.len().checked_sub(running + 1).filter(|_| self.shares_device());
        let due = due.and_then(|newest_due| reductions.get_mut(newest_due));
        if due.is_none_or(|due| due.work.is_issued()) {
            return running;
        }
        if let Some(last) = reductions.back_mut() {
            last.work.block();
        }
        0
    }

    /// Waits for the oldest running reductions, so that one more may be issued.
    pub(super) fn collect_early_reductions(&self, state: &mut State<B>) -> Result<(), Error> {
        let running = state.gradients.reductions.len();
        let due = reductions_due(running, self.settings.timing.reductions_in_flight);
        self.collect_reductions(state, running - due)
    }

    /// Waits for all running reductions but the last `running`, and adds the results to the reduced
    /// gradients.
    pub(super) fn collect_reductions(
        &self,
        state: &mut State<B>,
        running: usize,
    ) -> Result<(), Error> {
        let running = self.block_for_reductions(state, running);
        while state.gradients.reductions.len() > running
            && let Some(reduction) = state.gradients.reductions.pop_front()
        {
            let Reduction { unit, is_partial, bytes, work } = reduction;
            tracing::trace!(target: "fsdp", unit = %self.units[unit].name, "fsdp::wait_for_reduce");
            let (reduced, counted) = work.wait()?;
            self.tracker.give_back(MemoryKind::Gradients, bytes, unit);
            drop(counted);
            let of_unit = &mut state.units[unit];
            let sums = if is_partial { &mut of_unit.partial } else { &mut of_unit.reduced };
            let before = stored_bytes::<B>(sums);
            add_up(sums, reduced);
            let more = stored_bytes::<B>(sums) - before;
            self.tracker.take(MemoryKind::ReducedGradients, more, unit);
            state.gradients.reduced_bytes += more;
        }
        Ok(())
    }
}
