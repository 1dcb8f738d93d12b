//! The backward pass: the gathers before a unit's backward, the gradients of a unit, and the end of
//! the pass.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use fsdp_kernels::takes;

use super::super::autodiff::Depth;
use super::core::Schedule;
use super::decide::{Pass, When};
use super::reduce::total_bytes;
use super::state::{RunningBackward, State};
use super::unit_call::UnitCall;
use super::unit_state::ShardState;
use crate::backend::{Float, ModelBackend, Raw, bytes, cast_model};
use crate::error::Error;
use crate::module::CallId;
use crate::options::BackwardPrefetch;
use crate::param_group::Unit;
use crate::param_group::memory::MemoryKind;

impl<B: ModelBackend> Schedule<B> {
    /// Gathers a unit for its backward and prefetches the next one. Called for each output of a
    /// call; returns whether this is the first of them, or may be the first of a module's.
    pub(super) fn begin_unit_backward(&self, id: CallId, depth: Depth) -> Result<bool, Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        self.end_calls(state, depth.reached)?;
        self.check_memory_limit()?;
        let Some(call) = state.calls.get_mut(&id) else { return Ok(true) };
        let unit = call.unit;
        let span = tracing::trace_span!(target: "fsdp", "fsdp::pre_backward", unit = %self.units[unit].name).entered();
        let first = !std::mem::replace(&mut call.entered, true);
        let is_group = self.units[unit].group.is_some();
        if first {
            let reads_frozen = call.reads_frozen;
            state.units[unit].backwards += 1;
            // The inputs of another module of a group may be less deep.
            let inputs = if is_group { 0 } else { depth.inputs };
            state.running.push(RunningBackward { call: id, unit, inputs, reads_frozen });
        }
        self.unshard(state, unit, Pass::Backward, When::Now)?;
        self.wait_for_unshard(state, unit)?;
        // The units that ran before the group's last module have run backward already.
        if first || !is_group {
            self.prefetch_for_backward(state, unit)?;
        }
        drop(span);
        if first {
            let name = &self.units[unit].name;
            tracing::trace!(target: "fsdp::trace", unit = %name, "fsdp::begin_backward");
            self.tracker.mark_backward(unit);
        }
        Ok(first || is_group)
    }

    /// Gathers a unit for its backward, waits for it, and prefetches the next unit if the options
    /// say so.
    pub(super) fn gather_for_backward(
        &self,
        state: &mut State<B>,
        unit: usize,
    ) -> Result<(), Error> {
        self.unshard(state, unit, Pass::Backward, When::Now)?;
        self.wait_for_unshard(state, unit)?;
        self.prefetch_for_backward(state, unit)
    }

    /// Prefetches the next unit while `unit` runs backward, if the options say so.
    fn prefetch_for_backward(&self, state: &mut State<B>, unit: usize) -> Result<(), Error> {
        let waits = self.settings.timing.backward_prefetch == BackwardPrefetch::Post;
        if !waits { self.prefetch_previous(state, unit) } else { Ok(()) }
    }

    /// Adds the full gradient of a parameter to the call that it belongs to. The last gradient ends
    /// the call.
    pub(super) fn add_to_call(
        &self,
        id: CallId,
        entry: usize,
        gradient: Float<B>,
    ) -> Result<(), Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if state.calls.get(&id).is_some_and(|call| !call.has_gradients()) {
            // Full gradients of one unit at a time, in addition to those in reduction.
            self.collect_early_reductions(state)?;
        }
        let Some(call) = state.calls.get_mut(&id) else { return Ok(()) };
        let sum = match call.gradients[entry].take() {
            // This is the order in which Burn adds up the gradients of one leaf.
            Some(earlier) => B::float_add(gradient, earlier),
            None => {
                self.tracker.take(MemoryKind::Gradients, bytes::<B>(&gradient), call.unit);
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

    /// Ends the calls whose operations have all run, given that all operations deeper than `depth`
    /// have. These are calls with gradients that never arrive, for example because an output is not
    /// used, and calls that read frozen parameters.
    pub(super) fn end_calls(&self, state: &mut State<B>, depth: usize) -> Result<(), Error> {
        let running = std::mem::take(&mut state.running);
        let (done, running): (Vec<_>, Vec<_>) =
            running.into_iter().partition(|call| depth <= call.inputs);
        state.running = running;
        for RunningBackward { call, unit, reads_frozen, .. } in done {
            match state.calls.remove(&call) {
                Some(call) if call.has_gradients() => {
                    self.post_backward(state, call)?;
                    if reads_frozen {
                        self.leave_backward(state, unit);
                    }
                }
                Some(_) => self.leave_backward(state, unit),
                None if reads_frozen => self.leave_backward(state, unit),
                None => {}
            }
        }
        Ok(())
    }

    /// Ends the calls that have gradients and satisfy `filter`. A gather outside of a forward of
    /// its unit is such a call: it has no output, so nothing else ends it if gradients are missing.
    pub(super) fn end_calls_with_gradients(
        &self,
        state: &mut State<B>,
        filter: impl Fn(&UnitCall<B>) -> bool,
    ) -> Result<(), Error> {
        let calls = state.calls.iter().filter(|(_, call)| call.has_gradients() && filter(call));
        let ids: Vec<CallId> = calls.map(|(id, _)| *id).collect();
        for id in ids {
            if let Some(call) = state.calls.remove(&id) {
                self.post_backward(state, call)?;
            }
        }
        Ok(())
    }

    /// Ends the backward of one call of a unit, and reshards the unit if nothing uses it any more.
    fn leave_backward(&self, state: &mut State<B>, unit: usize) {
        state.units[unit].backwards -= 1;
        let is_idle = !state.units[unit].in_use();
        if is_idle && self.units[unit].level > 0 && !self.stays_after_backward(state, unit) {
            self.reshard(state, unit);
        }
    }

    /// Reshards the unit of a call whose gradients have arrived, and issues their reduction.
    fn post_backward(&self, state: &mut State<B>, mut call: UnitCall<B>) -> Result<(), Error> {
        let index = call.unit;
        tracing::trace!(target: "fsdp::trace", unit = %self.units[index].name, "fsdp::end_backward");
        let _span = tracing::trace_span!(target: "fsdp", "fsdp::post_backward", unit = %self.units[index].name).entered();
        if call.entered && !call.reads_frozen {
            self.leave_backward(state, index);
        }
        if self.settings.timing.backward_prefetch == BackwardPrefetch::Post {
            self.prefetch_previous(state, index)?;
        }
        let sums = &mut state.units[index].unsharded_gradients;
        let before = total_bytes::<B>(sums) + total_bytes::<B>(&call.gradients);
        self.cast_replicated_gradients(index, &mut call.gradients);
        for ((sum, gradient), entry) in
            sums.iter_mut().zip(call.gradients).zip(&self.units[index].params)
        {
            let Some(gradient) = gradient else { continue };
            *sum = Some(match sum.take() {
                None if self.reduces_as(gradient.dtype(), entry.reduce_dtype) => gradient,
                None => cast_model::<B>(gradient, entry.reduce_dtype),
                Some(sum) => {
                    let cast = |tensor| cast_model::<B>(tensor, entry.reduce_dtype);
                    B::float_add(cast(sum), cast(gradient))
                }
            });
        }
        let after = total_bytes::<B>(sums);
        self.tracker.give_back(MemoryKind::Gradients, before, index);
        self.tracker.take(MemoryKind::Gradients, after, index);
        if state.gradients.accumulating && state.gradients.holds_unsharded() {
            return Ok(());
        }
        self.reduce(state, index)
    }

    /// Returns whether a unit stays gathered from a backward to the next forward of the same step.
    fn stays_after_backward(&self, state: &State<B>, unit: usize) -> bool {
        self.decisions(state).stays_after_backward(unit, state.gradients.accumulating)
    }

    /// Returns whether a gradient of dtype `found` needs no cast before a reduction in `wanted`.
    ///
    /// Where ranks share a device, the kernel that adds their gradients in f32 reads them in any
    /// dtype.
    pub(super) fn reduces_as(&self, found: DType, wanted: DType) -> bool {
        let shares_device = self.settings.groups.shard.shares_device::<Raw<B>>();
        shares_device && wanted == DType::F32 && takes(found)
    }

    /// Starts a backward pass. `accumulate` says that another one of the same step follows.
    pub(super) fn begin_backward_pass(&self, accumulate: bool) {
        let mut state = self.lock();
        if accumulate && !state.gradients.accumulating && state.gradients.holds_unsharded() {
            let bytes = |unit: &Unit| unit.gradient_bytes().1;
            let bytes: usize = self.units.iter().map(bytes).sum();
            tracing::info!(
                target: "fsdp",
                "gradients of micro-batches are held unsharded: up to {bytes} bytes on every rank"
            );
        }
        state.gradients.continuing = state.gradients.accumulating;
        state.gradients.accumulating = accumulate;
    }

    /// Ends a backward pass: ends the calls whose gradients did not all arrive, waits for all
    /// reductions, reshards all units, and advances the random stream.
    pub(super) fn end_backward_pass(&self) -> Result<(), Error> {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.gradients.continuing = false;
        self.end_calls(state, 0)?;
        self.end_calls_with_gradients(state, |_| true)?;
        if !state.gradients.accumulating {
            // Earlier micro-batches may have left gradients of units that the last one did not use.
            for unit in (0..self.units.len()).rev() {
                let of_unit = &state.units[unit];
                let is_held = of_unit.unsharded_gradients.iter().any(Option::is_some);
                if is_held || of_unit.has_partial {
                    self.reduce(state, unit)?;
                }
            }
        }
        state.calls.retain(|_, call| call.has_graph());
        // This comes after all reductions, so that the rank blocks once.
        if let Some(end) = self.end_reads_of_peers(state) {
            end.wait()?;
        }
        self.collect_reductions(state, 0)?;
        self.end_unused_holds(state);
        for unit in 0..self.units.len() {
            // The references to what is gathered in place have been dropped.
            let stays = self.stays_after_backward(state, unit)
                && !state.buffers.is_in_place(unit)
                && matches!(state.units[unit].shard_state, ShardState::Unsharded);
            state.units[unit].kept_leaves = stays.then(|| state.units[unit].leaves());
            if !stays {
                self.evict(state, unit)?;
            }
        }
        if state.calls.is_empty() {
            self.forget_shards(state);
        }
        self.random.next_step();
        self.check_context()?;
        self.check_memory_limit()
    }
}
