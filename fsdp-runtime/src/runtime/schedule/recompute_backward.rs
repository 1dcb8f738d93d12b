//! The recomputation of a unit's forward in backward, and the backward of the recomputed graph.
//!
//! A single operation of the outer graph does all of it. It gathers the unit, runs the forward on
//! leaves that are made from the saved inputs and from shards, and runs the backward of the new
//! graph. In that backward the unit and the units inside it reduce their gradients as usual. The
//! unit is gathered once for both; the units inside it are gathered for the forward and again for
//! the backward.
//!
//! Each graph counts depths from its own leaves. So the schedule does not see the running calls of
//! the outer graph until the recomputation has ended.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::{Autodiff, AutodiffBackend, TensorMetadata};
use burn::tensor::DispatchTensor;

use super::super::autodiff::{OpState, seed, zero};
use super::super::recompute::{RecomputeTask, SavedCall, SavedInput, SavedOutput};
use super::core::Schedule;
use super::state::RunningBackward;
use crate::backend::{Float, FloatTensor, ModelBackend, Tracked, cast_model, new_leaf};
use crate::error::{Error, ScheduleError};
use crate::module::{CallId, Playback, RunningForward, Runtime};

/// The new leaves of a recomputed graph, each with the node of the same input in the outer graph.
type InputLeaves<B> = Vec<(NodeId, Tracked<B>)>;

impl<B: ModelBackend> Schedule<B> {
    /// Recomputes a forward, and runs its backward with the gradients of its outputs. Returns the
    /// gradients to register for the inputs.
    pub(super) fn recompute_and_backward(
        &self,
        op: &OpState<B>,
        reached: usize,
        saved: &SavedCall<B>,
    ) -> Result<Vec<(NodeId, Float<B>)>, Error> {
        let Some(task) = saved.take() else { return Ok(Vec::new()) };
        let RecomputeTask { forward, inputs, outputs: expected, counted: _counted } = task;
        let mut guard = RecomputeGuard::begin(self, op, reached)?;
        let mut inputs = inputs.into_iter();
        let mut leaves = InputLeaves::<B>::new();
        let mut restore = |tensor: DispatchTensor| {
            let input = inputs.next().unwrap_or(SavedInput { node: None, host: None });
            self.restore_input(tensor, input, &mut leaves)
        };
        let found = {
            let _draws = Playback::start(forward.draws);
            let runtime: Arc<dyn Runtime> = self.this();
            let _running = RunningForward::begin(&runtime);
            (forward.run)(&mut restore)
        };
        guard.post_forward();
        let root = self.backward_root(guard.unit, found, expected)?;
        let mut gradients = root.map(|root| root.backward());
        guard.end()?;
        let mut registered = Vec::new();
        for (node, leaf) in leaves {
            // An input that the unit does not use gets zeros, as it does from `PreBackward`.
            registered.push((node, zero::<B>(leaf.shape(), &self.device, leaf.dtype())));
            let gradient = gradients.as_mut().and_then(|gradients| leaf.grad_remove(gradients));
            registered.extend(gradient.map(|gradient| (node, gradient)));
        }
        Ok(registered)
    }

    /// Returns a saved input for the recomputation: as a new leaf, which is added to `leaves`, if
    /// the input is tracked in the outer graph.
    fn restore_input(
        &self,
        tensor: DispatchTensor,
        input: SavedInput,
        leaves: &mut InputLeaves<B>,
    ) -> DispatchTensor {
        let Some(FloatTensor::Autodiff(value, context)) = B::from_dispatch(tensor.clone()) else {
            return tensor;
        };
        let value = match input.host {
            Some(data) => B::float_from_data(data, &self.device),
            None => value.into_primitive(),
        };
        let value = match input.node {
            Some(node) => {
                let leaf = new_leaf::<B>(value);
                leaves.push((node, leaf.clone()));
                leaf
            }
            None => Autodiff::<B>::from_inner(value),
        };
        B::into_dispatch(FloatTensor::Autodiff(value, context))
    }

    /// Returns the tensor from which the backward of a recomputed graph starts: it gives each
    /// output the gradient that arrived for it. Returns `None` if no output is tracked.
    ///
    /// # Errors
    ///
    /// [`ScheduleError::RecomputedShapesMismatch`] or [`ScheduleError::RecomputedValuesMismatch`]
    /// if the recomputed outputs differ from those of the first run.
    fn backward_root(
        &self,
        unit: usize,
        found: Vec<DispatchTensor>,
        expected: Vec<SavedOutput<B>>,
    ) -> Result<Option<Tracked<B>>, Error> {
        let tensor = |output| match B::from_dispatch(output)? {
            FloatTensor::Autodiff(output, _) => Some(output),
            FloatTensor::Plain(_) => None,
        };
        let found: Vec<Tracked<B>> = found.into_iter().filter_map(tensor).collect();
        let shapes = found.iter().map(TensorMetadata::shape);
        let name = || self.units[unit].name.to_string();
        if !shapes.clone().eq(expected.iter().map(|output| output.shape.clone())) {
            return Err(ScheduleError::RecomputedShapesMismatch {
                unit: name(),
                expected: expected.iter().map(|output| output.shape.to_vec()).collect(),
                found: shapes.map(|shape| shape.to_vec()).collect(),
            }
            .into());
        }
        let mut pairs = found.iter().zip(&expected);
        if !pairs.all(|(found, expected)| expected.matches(found.primitive())) {
            return Err(ScheduleError::RecomputedValuesMismatch { unit: name() }.into());
        }
        let outputs = found.into_iter().zip(expected).filter(|(output, _)| output.is_tracked());
        // The first output may have been cast to another dtype, and its gradient has that dtype.
        let gradient = |(output, expected): (Tracked<B>, SavedOutput<B>)| {
            let gradient = cast_model::<B>(expected.gradient?, output.dtype());
            Some((output, gradient))
        };
        Ok(seed(outputs.filter_map(gradient)))
    }
}

/// Stage of a recomputation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The unit is being gathered.
    Gathering,
    Forward,
    Backward,
    Ended,
}

/// Guard of a running recomputation. If an error drops it before [`end`](Self::end), it restores
/// the state of the outer graph.
struct RecomputeGuard<'a, B: ModelBackend> {
    schedule: &'a Schedule<B>,
    call: CallId,
    unit: usize,
    stage: Stage,
    /// Running calls of the outer graph.
    outer: Vec<RunningBackward>,
}

impl<'a, B: ModelBackend> RecomputeGuard<'a, B> {
    /// Gathers the unit for its forward and its backward.
    fn begin(schedule: &'a Schedule<B>, op: &OpState<B>, reached: usize) -> Result<Self, Error> {
        let id = op.call;
        let mut this = Self { schedule, call: id, unit: 0, stage: Stage::Ended, outer: Vec::new() };
        let mut guard = schedule.lock();
        let state = &mut *guard;
        schedule.end_calls(state, reached)?;
        schedule.check_memory_limit()?;
        let call = state.calls.get_mut(&id).expect("a call lives as long as its operations");
        let unit = call.unit;
        let name = &schedule.units[unit].name;
        let span =
            tracing::trace_span!(target: "fsdp", "fsdp::pre_backward", unit = %name).entered();
        call.entered = true;
        call.open = Some(op.alive.clone());
        for (index, leaf) in std::mem::take(&mut call.tied_leaves) {
            if let Some(shard) = &mut state.units[index.unit].shards[index.param] {
                shard.leaf = Some(leaf);
            }
        }
        state.units[unit].backwards += 1;
        this.unit = unit;
        this.outer = std::mem::take(&mut state.running);
        this.stage = Stage::Gathering;
        schedule.gather_for_backward(state, unit)?;
        schedule.cast_replicated(state, unit);
        tracing::trace!(target: "fsdp", unit = %name, "fsdp::recompute");
        state.units[unit].forwards.push(id);
        state.open_forwards += 1;
        schedule.count_saved_of(unit);
        state.recompute.second_run = Some(id);
        this.stage = Stage::Forward;
        drop(span);
        tracing::trace!(target: "fsdp::trace", unit = %name, "fsdp::begin_backward");
        schedule.tracker.mark_backward(unit);
        drop(guard);
        Ok(this)
    }

    /// Ends the forward and starts the backward.
    fn post_forward(&mut self) {
        let mut guard = self.schedule.lock();
        let state = &mut *guard;
        self.schedule.close_forward(state, self.unit);
        self.schedule.end_groups_of_recomputation(state, self.call);
        self.stage = Stage::Backward;
        let Some(call) = state.calls.get_mut(&self.call) else { return };
        call.open = None;
        let (call, unit, reads_frozen) = (self.call, self.unit, call.reads_frozen);
        // At depth 0 the call ends with the whole recomputed graph.
        state.running.push(RunningBackward { call, unit, inputs: 0, reads_frozen });
    }

    /// Ends the backward and returns to the outer graph.
    fn end(mut self) -> Result<(), Error> {
        let mut guard = self.schedule.lock();
        let state = &mut *guard;
        self.schedule.end_calls(state, 0)?;
        let is_part = |part_of: Option<CallId>| part_of == Some(self.call);
        self.schedule.end_calls_with_gradients(state, |call| is_part(call.part_of))?;
        state.calls.retain(|_, call| !is_part(call.part_of));
        state.running = std::mem::take(&mut self.outer);
        state.recompute.second_run = None;
        self.stage = Stage::Ended;
        Ok(())
    }
}

impl<B: ModelBackend> Drop for RecomputeGuard<'_, B> {
    fn drop(&mut self) {
        if self.stage == Stage::Ended {
            return;
        }
        let mut guard = self.schedule.lock();
        let state = &mut *guard;
        if self.stage == Stage::Forward {
            self.schedule.close_forward(state, self.unit);
        }
        self.schedule.discard_groups_of_recomputation(state, self.call);
        let inner = state.running.iter().filter(|running| running.call != self.call);
        let inner: Vec<usize> = inner.map(|running| running.unit).collect();
        for unit in inner.into_iter().chain([self.unit]) {
            let backwards = &mut state.units[unit].backwards;
            *backwards = backwards.saturating_sub(1);
        }
        state.calls.retain(|id, call| *id != self.call && call.part_of != Some(self.call));
        state.running = std::mem::take(&mut self.outer);
        state.recompute.second_run = None;
    }
}
