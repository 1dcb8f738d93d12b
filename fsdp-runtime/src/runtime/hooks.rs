//! What `#[fsdp_unit]` puts around a `forward`: the hooks, and how they find the unit, the inputs
//! that order its gathers and the outputs whose gradient unshards it.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{DispatchTensor, Tensor};

use crate::error::raise;
use crate::module::{
    CallId, FsdpModule, FsdpUnit, Kind, ParamVisitor, Runtime, Sharded, UnitValue,
};

/// The tracked tensors among a forward's inputs.
#[derive(Debug, Default)]
pub struct Inputs(pub(crate) Vec<DispatchTensor>);

/// A forward under way; dropped without [`post_forward`], it was left by a panic.
#[derive(Debug)]
pub struct Call(pub(crate) Option<Open>);

/// The forward of a sharded unit.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) unit: usize,
    pub(crate) id: CallId,
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(Open { runtime, id, .. }) = self.0.take() {
            runtime.abandon(id);
        }
    }
}

/// Unshards the module's unit. Nothing happens to a model that is not sharded.
///
/// # Panics
///
/// Unwinds with the typed error where a collective fails.
pub fn pre_forward<M: FsdpUnit>(module: &M, inputs: impl FnOnce(&mut Inputs)) -> Call {
    let Some(unit) = find(module) else { return Call(None) };
    if !unit.runtime.is_open() {
        module.visit_params(&mut Collect(&*unit.runtime));
    }
    let mut tensors = Inputs::default();
    inputs(&mut tensors);
    let Found { runtime, place } = unit;
    match runtime.pre_forward(place.unit, tensors.0) {
        Ok(id) => Call(id.map(|id| Open { runtime, unit: place.unit, id })),
        Err(error) => raise(error),
    }
}

/// Reshards the unit, and makes its output's gradient unshard it again.
///
/// # Panics
///
/// Unwinds with the typed error where a collective fails.
pub fn post_forward<O: UnitValue>(call: Call, output: O) -> O {
    finish(call, output)
}

pub(crate) fn finish<O: UnitValue>(mut call: Call, output: O) -> O {
    let Some(Open { runtime, id, .. }) = call.0.take() else { return output };
    let output = output.map_tensors(&mut |tensor| runtime.clone().hook_output(id, tensor));
    match runtime.post_forward(id) {
        Ok(()) => output,
        Err(error) => raise(error),
    }
}

/// A unit found through its parameters.
struct Found {
    runtime: Arc<dyn Runtime>,
    place: crate::module::ParamIndex,
}

/// The unit a module is, through its first parameter; a root that has only units below it is unit 0
/// of the model they belong to.
fn find<M: FsdpUnit>(module: &M) -> Option<Found> {
    let mut own = Probe { nested: false, found: None };
    module.visit_params(&mut own);
    if own.found.is_some() {
        return own.found;
    }
    if M::LAYOUT.kind != (Kind::Unit { root: true }) {
        return None;
    }
    let mut below = Probe { nested: true, found: None };
    module.visit_params(&mut below);
    let mut found = below.found?;
    found.place.unit = 0;
    Some(found)
}

struct Probe {
    nested: bool,
    found: Option<Found>,
}

impl ParamVisitor for Probe {
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
            self.found = Some(Found { runtime: sharded.runtime.clone(), place: sharded.place });
        }
    }
}

/// Copy-in, first half: reads the shards of a module and of all units below it.
pub(crate) struct Collect<'a>(pub(crate) &'a dyn Runtime);

impl ParamVisitor for Collect<'_> {
    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(sharded) = Sharded::of(param) {
            self.0.collect(sharded.place, param.base().into_dispatch());
        }
    }
}

/// One input of a forward. Generated code calls `collect` and `kind` on a reference to it: for a
/// [`UnitValue`] that finds [`CollectValue`], for any other type [`CollectOther`], one reference
/// further away.
#[derive(Debug)]
pub struct Input<'a, T>(pub &'a T);

/// Inputs that may hold tensors.
pub trait CollectValue {
    /// Adds the tensors.
    fn collect(&self, inputs: &mut Inputs);
    /// How the forward takes it.
    fn kind(&self) -> Tensors;
}

impl<T: UnitValue> CollectValue for Input<'_, T> {
    fn collect(&self, inputs: &mut Inputs) {
        self.0.visit_tensors(&mut |tensor| inputs.0.push(tensor));
    }

    fn kind(&self) -> Tensors {
        Tensors
    }
}

/// Inputs of any other type.
pub trait CollectOther {
    /// Adds nothing.
    fn collect(&self, inputs: &mut Inputs);
    /// How the forward takes it.
    fn kind(&self) -> NoTensors;
}

impl<T> CollectOther for &Input<'_, T> {
    fn collect(&self, _: &mut Inputs) {}

    fn kind(&self) -> NoTensors {
        NoTensors
    }
}

/// A call whose inputs may be mapped.
pub trait MapInputs {
    /// Passes an input through the map of the unit that is called, if one is.
    fn map_input<T: UnitValue>(&self, input: T) -> T;
}

impl MapInputs for Call {
    fn map_input<T: UnitValue>(&self, input: T) -> T {
        match &self.0 {
            Some(Open { runtime, unit, .. }) => map_input(&**runtime, *unit, input),
            None => input,
        }
    }
}

/// An input as the unit's own code is to have it.
pub(crate) fn map_input<T: UnitValue>(runtime: &dyn Runtime, unit: usize, input: T) -> T {
    input.map_tensors(&mut |tensor| runtime.map_input(unit, tensor))
}

/// An input that may hold tensors.
#[derive(Debug)]
pub struct Tensors;

impl Tensors {
    /// The input, its tensors as the unit's own code is to have them.
    pub fn map<T: UnitValue>(self, call: &impl MapInputs, input: T) -> T {
        call.map_input(input)
    }
}

/// An input of any other type.
#[derive(Debug)]
pub struct NoTensors;

impl NoTensors {
    /// The input.
    pub fn map<T>(self, _: &impl MapInputs, input: T) -> T {
        input
    }
}
