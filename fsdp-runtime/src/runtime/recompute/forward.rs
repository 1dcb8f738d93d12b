//! A forward that is run again in backward: what `#[fsdp_unit]` hands over of a hooked method, where
//! its inputs can be kept, and what becomes of it in a unit that is checkpointed.
//!
//! The forward itself runs on detached inputs and records nothing. Kept are a clone of the module,
//! whose parameters are shared, and of the detached inputs. What is done with them in backward is in
//! `schedule/recompute.rs`.

use std::fmt;

use burn::tensor::DispatchTensor;

use crate::module::UnitValue;
use crate::module::{KeptForward, Recording, Run};
use crate::runtime::hooks::{Call, Input, Open, finish};

/// A checkpointed forward under way, which returns an `O`.
pub struct Replay<O> {
    run: Run<O>,
    recording: Recording,
}

impl<O> fmt::Debug for Replay<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replay").finish_non_exhaustive()
    }
}

/// All inputs of a forward. Generated code calls `replays` on a reference to [`Input`] of them: where
/// they can be kept that finds this, else [`KeepOther`], one reference further away.
pub trait KeepValue {
    /// How they are kept.
    fn replays(&self) -> Kept;
}

impl<I: UnitValue + Clone + Send + 'static> KeepValue for Input<'_, I> {
    fn replays(&self) -> Kept {
        Kept
    }
}

/// Inputs that cannot be kept.
pub trait KeepOther {
    /// Not at all.
    fn replays(&self) -> NotKept;
}

impl<I> KeepOther for &Input<'_, I> {
    fn replays(&self) -> NotKept {
        NotKept
    }
}

/// Inputs that can be kept until backward.
#[derive(Debug)]
pub struct Kept;

impl Kept {
    /// The inputs of a call; where its unit is checkpointed detached, and a copy of them kept.
    pub fn keep<M, I, O>(
        self,
        call: &Call,
        module: &M,
        inputs: I,
        forward: fn(&M, I) -> O,
    ) -> (I, Option<Replay<O>>)
    where
        M: Clone + Send + 'static,
        I: UnitValue + Clone + Send + 'static,
        O: 'static,
    {
        let Some(Open { runtime, id, .. }) = &call.0 else { return (inputs, None) };
        let mut tensors = Vec::new();
        inputs.visit_tensors(&mut |tensor| tensors.push(tensor));
        if !runtime.checkpoint(*id, tensors) {
            return (inputs, None);
        }
        let inputs = inputs.map_tensors(&mut |tensor| runtime.detach_input(*id, tensor));
        let kept = inputs.clone().map_tensors(&mut |tensor| runtime.keep_input(*id, tensor));
        let module = module.clone();
        let run: Run<O> = Box::new(move |map| forward(&module, kept.map_tensors(map)));
        (inputs, Some(Replay { run, recording: Recording::start() }))
    }
}

/// Inputs that cannot be kept until backward.
#[derive(Debug)]
pub struct NotKept;

impl NotKept {
    /// The inputs of a call.
    pub fn keep<M, I, O>(
        self,
        _: &Call,
        _: &M,
        inputs: I,
        _: fn(&M, I) -> O,
    ) -> (I, Option<Replay<O>>) {
        (inputs, None)
    }
}

/// Ends a forward as `post_forward` does; where it is checkpointed, its
/// output's gradient runs it again.
///
/// # Panics
///
/// Unwinds with the typed error where a collective fails.
pub fn post_forward_recompute<O: UnitValue + 'static>(
    call: Call,
    output: O,
    replay: Option<Replay<O>>,
) -> O {
    if let (Some(Open { runtime, id, .. }), Some(Replay { run, recording })) = (&call.0, replay) {
        let run: Run<Vec<DispatchTensor>> = Box::new(move |map| {
            let mut tensors = Vec::new();
            run(map).map_tensors(&mut |tensor| {
                tensors.push(tensor.clone());
                tensor
            });
            tensors
        });
        runtime.keep_forward(*id, KeptForward { run, draws: recording.finish() });
    }
    finish(call, output)
}
