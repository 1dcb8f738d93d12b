//! The hooks that `#[fsdp_unit]` puts around a `forward`: they gather the unit before it and
//! reshard the unit after it.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::values::{map_input, refuse_input};
use crate::error::raise;
use crate::module::{
    CallId, FsdpModule, FsdpUnit, Kind, ParamVisitor, RunningForward, Runtime, Sharded, UnitValue,
};

pub use super::values::{
    Inputs, KnownTensors, MapInputs, ProbeOther, ProbeUnitValue, UnknownTensors, ValueProbe,
};

/// A running forward of a unit, or of a model that is not sharded. A panic drops it before
/// [`post_forward`], which ends the forward.
#[derive(Debug)]
pub struct Call(pub(super) Option<OpenCall>);

/// The running forward of a sharded unit.
#[derive(Debug)]
pub(super) struct OpenCall {
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) unit: usize,
    pub(super) id: CallId,
    /// Whether no other hooked forward was running when this one began.
    pub(super) outermost: bool,
    /// The forward on this thread, in a model with split rows.
    running: Option<RunningForward>,
}

impl Call {
    /// Gathers a unit and starts its forward. `params` are the parameters of the called module, if it may
    /// be a part of the unit.
    ///
    /// # Panics
    ///
    /// Unwinds with the typed error if a collective fails.
    pub(super) fn start(
        runtime: Arc<dyn Runtime>,
        unit: usize,
        params: &[usize],
        inputs: Inputs,
    ) -> Self {
        match runtime.pre_forward(unit, params, inputs.0) {
            Ok(id) => Self(id.map(|id| {
                let running = RunningForward::begin(&runtime);
                OpenCall { runtime, unit, id, outermost: false, running }
            })),
            Err(error) => raise(error),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(OpenCall { runtime, id, .. }) = self.0.take() {
            runtime.abort_forward(id);
        }
    }
}

impl MapInputs for Call {
    fn map_input<T: UnitValue>(&self, input: T) -> T {
        match &self.0 {
            Some(OpenCall { runtime, unit, .. }) => map_input(&**runtime, *unit, input),
            None => input,
        }
    }

    fn refuse_input(&self, ty: &'static str) {
        if let Some(OpenCall { runtime, unit, .. }) = &self.0 {
            refuse_input(&**runtime, *unit, ty);
        }
    }
}

/// Gathers the module's unit. Does nothing in a model that is not sharded.
///
/// # Panics
///
/// Unwinds with the typed error if a collective fails.
pub fn pre_forward<M: FsdpUnit>(module: &M, inputs: impl FnOnce(&mut Inputs)) -> Call {
    let Some((runtime, unit)) = find_unit(module) else { return Call(None) };
    let outermost = !runtime.in_forward();
    if outermost {
        module.visit_params(&mut Collect(&*runtime));
    }
    let mut tensors = Inputs::default();
    inputs(&mut tensors);
    let mut call = Call::start(runtime, unit, &[], tensors);
    if let Some(open) = &mut call.0 {
        open.outermost = outermost;
    }
    call
}

/// Reshards the unit, and hooks the output so that the output's gradient gathers the unit again.
///
/// # Panics
///
/// Unwinds with the typed error if a collective fails.
pub fn post_forward<O: UnitValue>(mut call: Call, output: O) -> O {
    let Some(OpenCall { runtime, id, running, .. }) = call.0.take() else { return output };
    drop(running);
    let output = output.map_tensors(&mut |tensor| runtime.clone().hook_output(id, tensor));
    match runtime.post_forward(id) {
        Ok(()) => output,
        Err(error) => raise(error),
    }
}

/// Returns the schedule and the index of a module's unit, found through the unit's first parameter.
/// A root without parameters of its own is unit 0 of the model that the units below it belong to.
fn find_unit<M: FsdpUnit>(module: &M) -> Option<(Arc<dyn Runtime>, usize)> {
    let mut own = FindParam { nested: false, found: None };
    module.visit_params(&mut own);
    if own.found.is_some() {
        return own.found;
    }
    if M::LAYOUT.kind != (Kind::Unit { root: true }) {
        return None;
    }
    let mut below = FindParam { nested: true, found: None };
    module.visit_params(&mut below);
    let (runtime, _) = below.found?;
    Some((runtime, 0))
}

/// Finds the first sharded or replicated parameter, with its schedule and unit.
struct FindParam {
    /// Whether to search nested units too.
    nested: bool,
    found: Option<(Arc<dyn Runtime>, usize)>,
}

impl ParamVisitor for FindParam {
    fn unit<M: FsdpModule>(&mut self, _: &M) -> bool {
        self.nested && self.found.is_none()
    }

    fn field_unit<M: Module>(&mut self, _: &M) -> bool {
        self.nested && self.found.is_none()
    }

    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.found.is_none()
            && let Some(sharded) = Sharded::of(param)
        {
            self.found = Some((sharded.runtime.clone(), sharded.index.unit));
        }
    }
}

/// Registers the shards of a module, and of all units below it, with the schedule.
pub(crate) struct Collect<'a>(pub(crate) &'a dyn Runtime);

impl ParamVisitor for Collect<'_> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(sharded) = Sharded::of(param) {
            self.0.register_shard(sharded.index, param.base().into_dispatch());
        }
    }
}
