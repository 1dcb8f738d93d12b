//! The inputs and outputs of a hooked call.
//!
//! Generated code passes values of any type. [`ValueProbe`] finds out at compile time whether the
//! type is a [`UnitValue`], whose tensors can be collected, cast and hooked.

use burn::tensor::DispatchTensor;

use crate::module::{Runtime, UnitValue};

/// The float tensors among the inputs of a forward.
#[derive(Debug, Default)]
pub struct Inputs(pub(super) Vec<DispatchTensor>);

/// An input or the output of a call, whose type may or may not be a [`UnitValue`].
///
/// Generated code calls `collect` and `kind` on a reference to this struct. For a [`UnitValue`],
/// method resolution finds [`ProbeUnitValue`]; for any other type it finds [`ProbeOther`], which
/// takes one more reference.
#[derive(Debug)]
pub struct ValueProbe<'a, T>(pub &'a T);

/// Values whose tensors are known.
pub trait ProbeUnitValue {
    /// Adds the value's tensors to `inputs`.
    fn collect(&self, inputs: &mut Inputs);
    /// Returns the operations on values of this type.
    fn kind(&self) -> KnownTensors;
}

impl<T: UnitValue> ProbeUnitValue for ValueProbe<'_, T> {
    fn collect(&self, inputs: &mut Inputs) {
        KnownTensors.collect(self.0, inputs);
    }

    fn kind(&self) -> KnownTensors {
        KnownTensors
    }
}

/// Values of any other type.
pub trait ProbeOther {
    /// Adds nothing to `inputs`.
    fn collect(&self, inputs: &mut Inputs);
    /// Returns the operations on values of this type.
    fn kind(&self) -> UnknownTensors;
}

impl<T> ProbeOther for &ValueProbe<'_, T> {
    fn collect(&self, _: &mut Inputs) {}

    fn kind(&self) -> UnknownTensors {
        UnknownTensors
    }
}

/// A call whose inputs may have to be cast.
pub trait MapInputs {
    /// Casts the tensors of an input to the compute dtype of the called unit. Returns the input
    /// unchanged if no unit is called.
    fn map_input<T: UnitValue>(&self, input: T) -> T;
}

/// Casts the tensors of an input to the compute dtype of a unit.
pub(super) fn map_input<T: UnitValue>(runtime: &dyn Runtime, unit: usize, input: T) -> T {
    input.map_tensors(&mut |tensor| runtime.map_input(unit, tensor))
}

/// The operations on an input or output that is a [`UnitValue`].
#[derive(Debug)]
pub struct KnownTensors;

impl KnownTensors {
    /// Adds the tensors of an input to `inputs`. Generated code calls this function for an input of
    /// a generic type, which [`ValueProbe`] cannot examine.
    pub fn collect<T: UnitValue>(self, input: &T, inputs: &mut Inputs) {
        input.visit_tensors(&mut |tensor| inputs.0.push(tensor));
    }

    /// Casts the tensors of an input to the compute dtype of the called unit.
    pub fn map<T: UnitValue>(self, call: &impl MapInputs, input: T) -> T {
        call.map_input(input)
    }
}

/// The operations on an input or output of any other type.
#[derive(Debug)]
pub struct UnknownTensors;

impl UnknownTensors {
    /// Returns the input unchanged.
    pub fn map<T>(self, _: &impl MapInputs, input: T) -> T {
        input
    }
}
