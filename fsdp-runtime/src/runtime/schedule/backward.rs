//! The backward half: `pre_backward`, arriving gradients, `post_backward`.

use burn::backend::autodiff::NodeId;
use burn::tensor::DType;

use super::{Pass, Running, Schedule, State, When, count};
use crate::backend::{Float, ShardBackend, StorageDevice, StoredTensor, bytes, cast};
use crate::collectives::{Op, ProcessGroup, Reduce, ReduceScatter};
use crate::error::Error;
use crate::module::CallId;
use crate::options::{BackwardPrefetch, GradientAccumulation};
use crate::param_group::Unit;
use crate::param_group::memory::{Counted, MemoryKind};
use crate::runtime::autodiff::{BackwardHooks, Depth, State as OpState};
use crate::runtime::recompute::KeptCall;
use crate::runtime::state::{Call, Reduction, add_up};

impl<B: ShardBackend> BackwardHooks<B> for Schedule<B> {
    fn recompute(
        &self,
        state: &OpState<B>,
        reached: usize,
        kept: &KeptCall<B>,
    ) -> Result<Vec<(NodeId, Float<B>)>, Error> {
        self.run_again(state, reached, kept)
    }

    fn pre_backward(&self, id: CallId, depth: Depth) -> Result<bool, Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        self.end_calls(state, depth.reached)?;
        let Some(call) = state.calls.get_mut(&id) else { return Ok(false) };
        let unit = call.unit;
        let _span = tracing::trace_span!(target: "fsdp", "fsdp::pre_backward", unit = %self.units[unit].name).entered();
        // A unit with several outputs comes here once for each.
        let first = !std::mem::replace(&mut call.entered, true);
        if first {
            let reads_frozen = call.reads_frozen;
            state.units[unit].backwards += 1;
            state.running.push(Running { call: id, unit, inputs: depth.inputs, reads_frozen });
        }
        self.unshard(state, unit, Pass::Backward, When::Now)?;
        self.wait_for_unshard(state, unit)?;
        if self.settings.backward_prefetch == BackwardPrefetch::Pre {
            self.prefetch_previous(state, unit)?;
        }
        Ok(first)
    }

    fn arrived(&self, id: CallId, entry: usize, gradient: Float<B>) -> Result<(), Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.calls.get(&id).is_some_and(|call| !call.has_gradients()) {
            self.collect_reductions(state)?;
        }
        let Some(call) = state.calls.get_mut(&id) else { return Ok(()) };
        let sum = match call.gradients[entry].take() {
            // In the order in which Burn adds up the gradients of one leaf.
            Some(earlier) => B::float_add(gradient, earlier),
            None => {
                self.tracker.take(MemoryKind::Gradients, bytes::<B>(&gradient));
                gradient
            }
        };
        call.gradients[entry] = Some(sum);
        call.pending -= 1;
        if call.pending == 0
            && let Some(call) = state.calls.remove(&id)
        {
            self.post_backward(state, call)?;
        }
        Ok(())
    }
}

fn total_bytes<B: ShardBackend>(tensors: &[Option<Float<B>>]) -> usize {
    tensors.iter().flatten().map(bytes::<B>).sum()
}

impl<B: ShardBackend> Schedule<B> {
    /// Unshards the unit whose forward came before that of `unit`, but for one that lies in another
    /// checkpointed unit: the recomputation of that one begins with its first.
    pub(super) fn prefetch_previous(&self, state: &mut State<B>, unit: usize) -> Result<(), Error> {
        if let Some(at) = state.order.iter().rposition(|&index| index == unit)
            && let Some(previous) = self.following(state.order[..at].iter().rev(), unit)
            && self.units[previous].within == self.units[unit].within
        {
            self.unshard(state, previous, Pass::Backward, When::Ahead)?;
        }
        Ok(())
    }

    /// Ends the calls whose ops have all run, now that all below `depth` have: those with gradients
    /// that never arrive, as of an unused output, and those that read frozen parameters.
    pub(super) fn end_calls(&self, state: &mut State<B>, depth: usize) -> Result<(), Error> {
        let (done, rest): (Vec<Running>, Vec<Running>) =
            std::mem::take(&mut state.running).into_iter().partition(|call| depth <= call.inputs);
        state.running = rest;
        for Running { call, unit, reads_frozen, .. } in done {
            match state.calls.remove(&call) {
                Some(call) if call.has_gradients() => {
                    self.post_backward(state, call)?;
                    if reads_frozen {
                        self.leave(state, unit);
                    }
                }
                Some(_) => self.leave(state, unit),
                None if reads_frozen => self.leave(state, unit),
                None => {}
            }
        }
        Ok(())
    }

    /// Ends the calls of a kind that have gradients and have not entered: gathers outside their unit's
    /// forward have no output to enter by.
    pub(super) fn end_arrived(
        &self,
        state: &mut State<B>,
        of: impl Fn(&Call<B>) -> bool,
    ) -> Result<(), Error> {
        let arrived = state.calls.iter().filter(|(_, call)| call.has_gradients() && of(call));
        let ids: Vec<CallId> = arrived.map(|(id, _)| *id).collect();
        for id in ids {
            if let Some(call) = state.calls.remove(&id) {
                self.post_backward(state, call)?;
            }
        }
        Ok(())
    }

    /// One call of a unit has run backward.
    fn leave(&self, state: &mut State<B>, unit: usize) {
        state.units[unit].backwards -= 1;
        if !state.units[unit].in_use() && self.units[unit].level > 0 {
            self.reshard(state, unit);
        }
    }

    /// Gives a call's slot back and issues the reduction of its gradients.
    fn post_backward(&self, state: &mut State<B>, call: Call<B>) -> Result<(), Error> {
        let index = call.unit;
        let _span = tracing::trace_span!(target: "fsdp", "fsdp::post_backward", unit = %self.units[index].name).entered();
        if call.entered && !call.reads_frozen {
            self.leave(state, index);
        }
        if self.settings.backward_prefetch == BackwardPrefetch::Post {
            self.prefetch_previous(state, index)?;
        }
        let before = total_bytes::<B>(&state.units[index].held) + total_bytes::<B>(&call.gradients);
        let gradients = call.gradients.into_iter().zip(&self.units[index].entries);
        let gradients =
            gradients.map(|(gradient, entry)| Some(cast::<B>(gradient?, entry.reduce_dtype)));
        add_up(&mut state.units[index].held, gradients, B::float_add);
        let after = total_bytes::<B>(&state.units[index].held);
        self.tracker.give_back(MemoryKind::Gradients, before);
        self.tracker.take(MemoryKind::Gradients, after);
        let holds = self.settings.accumulation == GradientAccumulation::HoldUnsharded;
        if state.accumulating && holds {
            return Ok(());
        }
        self.reduce(state, index)
    }

    /// Issues the reduction of a unit's gradients.
    fn reduce(&self, state: &mut State<B>, index: usize) -> Result<(), Error> {
        self.collect_reductions(state)?;
        let unit = &self.units[index];
        let gradients: Vec<_> = state.units[index].held.iter_mut().map(Option::take).collect();
        let bytes = total_bytes::<B>(&gradients);
        let name = if unit.gathers { "reduce_scatter" } else { "all_reduce" };
        tracing::trace!(target: "fsdp", unit = %unit.name, op = name, "fsdp::reduce");
        count(&self.counters.reduce_scatters);
        let op = Op::new(name, unit.name.clone()).of(unit.num_params());
        let layout = unit.layout.clone();
        let keep = unit.entries.iter().map(|entry| entry.reduce(entry.reduce_dtype));
        let keep: Vec<Reduce> = keep.collect();
        let world = self.settings.mesh.world.size();
        let (device, rest) = (self.device.clone(), self.settings.rest);
        let results = keep.iter().map(|keep| keep.range.len() * size_of::<f32>()).sum();
        let tracker = self.tracker.clone();
        let replicate = self.settings.groups.replicate.clone();
        if replicate.is_some() {
            count(&self.counters.all_reduces);
        }
        let work = self.comm.issue_on(&self.settings.groups.shard, move |group| {
            // Beside the full ones, until these are no longer there or those rest on the host.
            let counted = Counted::new(&tracker, MemoryKind::Reducing, results);
            let divisor = if replicate.is_some() { 1 } else { world };
            let request = ReduceScatter::<B> { gradients, keep: &keep, layout: &layout, divisor };
            let mut reduced = group.reduce_scatter(&op, &device, request)?;
            if let Some(replicate) = replicate {
                let size = keep.iter().map(|keep| keep.range.len()).sum();
                let op = Op { name: "all_reduce", unit: op.unit, size };
                let whole = |keep: Reduce| Reduce {
                    range: 0..keep.range.len(),
                    segment: None,
                    dtype: DType::F32,
                    ..keep
                };
                let keep: Vec<Reduce> = keep.into_iter().map(whole).collect();
                let request = ReduceScatter::<B> {
                    gradients: reduced,
                    keep: &keep,
                    layout: &layout,
                    divisor: world,
                };
                reduced = replicate.reduce_scatter(&op, &device, request)?;
            }
            B::complete(&device);
            let laid = |gradient: Option<Float<B>>| Some(StoredTensor::store(gradient?, rest));
            let reduced = reduced.into_iter().map(laid).collect();
            Ok((reduced, (rest == StorageDevice::Device).then_some(counted)))
        });
        state.reductions.push_back(Reduction { unit: index, bytes, work });
        Ok(())
    }

    /// Waits for the reductions under way and adds their results up.
    fn collect_reductions(&self, state: &mut State<B>) -> Result<(), Error> {
        while let Some(Reduction { unit, bytes, work }) = state.reductions.pop_front() {
            tracing::trace!(target: "fsdp", unit = %self.units[unit].name, "fsdp::wait_for_reduce");
            let (reduced, counted) = work.wait()?;
            self.tracker.give_back(MemoryKind::Gradients, bytes);
            drop(counted);
            let sums = &mut state.units[unit].reduced;
            let bytes = |sums: &[Option<StoredTensor<B>>]| -> usize {
                sums.iter().flatten().map(StoredTensor::bytes).sum()
            };
            let before = bytes(sums);
            add_up(sums, reduced, StoredTensor::add);
            let more = bytes(sums) - before;
            self.tracker.take(MemoryKind::Reduced, more);
            state.reduced_bytes += more;
        }
        Ok(())
    }

    /// What comes before a backward pass; `accumulate` says that another of the step follows.
    pub(super) fn pre_backward_first(&self, accumulate: bool) {
        let mut state = self.lock();
        if accumulate
            && !state.accumulating
            && self.settings.accumulation == GradientAccumulation::HoldUnsharded
        {
            let held = |unit: &Unit| unit.gradient_bytes().1;
            let bytes: usize = self.units.iter().map(held).sum();
            tracing::info!(
                target: "fsdp",
                "gradients of micro-batches are held unsharded: up to {bytes} bytes on every rank"
            );
        }
        state.accumulating = accumulate;
    }

    /// What comes after a backward pass: units whose graph it reached only in part are reduced too,
    /// everything is resharded, and the random streams move on.
    pub(super) fn post_backward_final(&self) -> Result<(), Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        self.end_calls(state, 0)?;
        self.end_arrived(state, |_| true)?;
        if !state.accumulating {
            // Placement by earlier micro-batches for units that the last one did not use.
            for unit in (0..self.units.len()).rev() {
                if state.units[unit].held.iter().any(Option::is_some) {
                    self.reduce(state, unit)?;
                }
            }
        }
        self.collect_reductions(state)?;
        state.calls.retain(|_, call| call.alive.strong_count() > 0);
        for unit in 0..self.units.len() {
            self.evict(state, unit)?;
        }
        if state.calls.is_empty() {
            self.forget_shards(state);
        }
        self.random.next_step();
        Ok(())
    }
}
