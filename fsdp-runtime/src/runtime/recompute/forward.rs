//! A forward that is recomputed in backward, as `#[fsdp_unit]` passes it to the runtime.
//!
//! The first run takes detached inputs and records no graph. It saves a clone of the module, whose
//! parameters are shared, and a clone of the detached inputs. An input behind a reference is cloned, and
//! the first run has a reference to the clone. The recomputation itself is in
//! `schedule/recompute_backward.rs`.

use std::fmt;

use burn::tensor::DispatchTensor;

use super::super::hooks::{Call, OpenCall, post_forward};
use super::super::values::ValueProbe;
use super::kept_inputs::{InputList, KeepInputs};
use crate::error::{ScheduleError, ShardError, raise};
use crate::module::{Forward, ForwardFn, Recording, SavedForward, UnitValue};

/// A running forward that is recomputed in backward and returns an `O`.
pub struct ForwardRecording<O> {
    run: ForwardFn<O>,
    recording: Recording,
}

impl<O> fmt::Debug for ForwardRecording<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForwardRecording").finish_non_exhaustive()
    }
}

/// Inputs that can be saved until backward.
///
/// Generated code calls `savability` on a reference to the [`ValueProbe`] of all inputs of a
/// forward. Method resolution finds this trait if the inputs can be saved, and otherwise
/// [`ProbeUnsavable`], which takes one more reference.
pub trait ProbeSavable {
    /// Returns the operation that saves the inputs.
    fn savability(&self) -> SavableInputs;
}

impl<I: KeepInputs> ProbeSavable for ValueProbe<'_, I> {
    fn savability(&self) -> SavableInputs {
        SavableInputs
    }
}

/// Inputs that cannot be saved until backward.
pub trait ProbeUnsavable {
    /// Returns the operation that leaves the inputs as they are.
    fn savability(&self) -> UnsavableInputs;
}

impl<I> ProbeUnsavable for &ValueProbe<'_, I> {
    fn savability(&self) -> UnsavableInputs {
        UnsavableInputs
    }
}

/// Saves inputs for recomputation.
#[derive(Debug)]
pub struct SavableInputs;

impl SavableInputs {
    /// Returns the inputs for the first run. If the unit is recomputed in backward, these are
    /// detached, and copies of them are saved in the recording.
    ///
    /// # Panics
    ///
    /// Unwinds with [`ScheduleError::TrainedReference`] if the value behind a reference holds a trained
    /// parameter and the unit is recomputed.
    pub fn keep<M, I, O>(
        self,
        call: &Call,
        module: &M,
        inputs: I,
        forward: fn(&M, I::Kept) -> O,
    ) -> (I, Option<ForwardRecording<O>>)
    where
        M: Clone + Send + 'static,
        I: KeepInputs,
        O: 'static,
    {
        let Some(OpenCall { runtime, unit, id, .. }) = &call.0 else { return (inputs, None) };
        let mut tensors = Vec::new();
        inputs.visit(&mut |tensor| tensors.push(tensor));
        if !runtime.begin_recomputed_forward(*id, tensors) {
            return (inputs, None);
        }
        if let Some(input) = inputs.trained() {
            let unit = runtime.unit_name(*unit);
            raise(ScheduleError::TrainedReference { unit, input }.into());
        }
        let inputs = inputs.keep().map_tensors(&mut |tensor| runtime.detach_input(*id, tensor));
        let saved = inputs.clone().map_tensors(&mut |tensor| runtime.save_input(*id, tensor));
        let module = module.clone();
        let run: ForwardFn<O> = Box::new(move |map| forward(&module, saved.map_tensors(map)));
        (I::lend(inputs), Some(ForwardRecording { run, recording: Recording::start() }))
    }
}

/// Checks, before a method of a block under `#[fsdp_unit(more)]` runs, that a unit that is recomputed in
/// backward can be recomputed from the method's inputs. Construction checks the methods of the block
/// without `more`, which a unit lists.
///
/// # Panics
///
/// Unwinds with [`ShardError::NotRecomputable`] if it cannot, and the forward would record a graph.
pub fn check_recomputable(call: &Call, method: &Forward) {
    let obstacle = method.inputs.iter().find_map(|&(input, reason)| Some((input, reason?)));
    if let (Some(OpenCall { runtime, id, .. }), Some((input, reason))) = (&call.0, obstacle)
        && let Some((unit, ty)) = runtime.recomputed_unit(*id)
    {
        let forward = method.name;
        raise(ShardError::NotRecomputable { unit, ty, forward, input, reason }.into());
    }
}

/// Leaves inputs as they are.
#[derive(Debug)]
pub struct UnsavableInputs;

impl UnsavableInputs {
    /// Returns the inputs, and no recording.
    pub fn keep<M, I: InputList, O>(
        self,
        _: &Call,
        _: &M,
        inputs: I,
        _: fn(&M, I::Kept) -> O,
    ) -> (I, Option<ForwardRecording<O>>) {
        (inputs, None)
    }
}

/// Ends a forward as [`post_forward`] does. If there is a recording, the gradient of the output
/// recomputes the forward.
///
/// # Panics
///
/// Unwinds with the typed error if a collective fails.
pub fn post_forward_recompute<O: UnitValue + 'static>(
    call: Call,
    output: O,
    recording: Option<ForwardRecording<O>>,
) -> O {
    if let (Some(OpenCall { runtime, id, .. }), Some(ForwardRecording { run, recording })) =
        (&call.0, recording)
    {
        let run: ForwardFn<Vec<DispatchTensor>> = Box::new(move |map| {
            let mut tensors = Vec::new();
            run(map).map_tensors(&mut |tensor| {
                tensors.push(tensor.clone());
                tensor
            });
            tensors
        });
        runtime.save_forward(*id, SavedForward { run, draws: recording.finish() });
    }
    post_forward(call, output)
}
