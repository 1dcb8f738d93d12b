//! The inputs and outputs of a hooked call.
//!
//! Generated code passes values of any type. [`ValueProbe`] finds out at compile time whether the
//! type is a [`UnitValue`], whose tensors can be collected, cast and hooked.

use std::any::type_name;

use burn::tensor::{DispatchTensor, Tensor};

use crate::error::{ScheduleError, raise};
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

    /// Refuses an input of an unknown type that holds float tensors, if a unit is called.
    fn refuse_input(&self, ty: &'static str);
}

/// Casts the tensors of an input to the compute dtype of a unit.
pub(super) fn map_input<T: UnitValue>(runtime: &dyn Runtime, unit: usize, input: T) -> T {
    input.map_tensors(&mut |tensor| runtime.map_input(unit, tensor))
}

/// Unwinds with [`ScheduleError::OpaqueInput`] for an input of type `ty`.
pub(super) fn refuse_input(runtime: &dyn Runtime, unit: usize, ty: &'static str) {
    raise(ScheduleError::OpaqueInput { unit: runtime.unit_name(unit), input: ty }.into());
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
    /// Returns the input unchanged, unless it is a [`UnitValue`] after all.
    ///
    /// In a generic method the probe knows a type parameter's bounds only. The type that a caller has
    /// chosen is known here.
    ///
    /// # Panics
    ///
    /// Unwinds with [`ScheduleError::OpaqueInput`] if a unit is called and the input is a float tensor or a standard container of such tensors.
    pub fn map<T>(self, call: &impl MapInputs, input: T) -> T {
        if names_tensors(type_name::<T>()) {
            call.refuse_input(type_name::<T>());
        }
        input
    }
}

/// Returns whether a type with this name is a float tensor, or a container or tuple of the standard
/// library whose first type parameter is such a type.
fn names_tensors(name: &str) -> bool {
    /// Starts of the names of containers that are `UnitValue`s.
    const CONTAINERS: [&str; 6] = [
        "core::option::Option<",
        "core::result::Result<",
        "alloc::vec::Vec<",
        "alloc::boxed::Box<",
        "[",
        "(",
    ];
    let mut rest = name;
    while let Some(inner) = CONTAINERS.iter().find_map(|container| rest.strip_prefix(container)) {
        rest = inner;
    }
    // `..::Tensor<` and what follows the rank: the kind of elements.
    let tensor = type_name::<Tensor<1>>();
    let Some((tensor, float)) = tensor.split_once('1') else { return false };
    let Some(rank_and_kind) = rest.strip_prefix(tensor) else { return false };
    rank_and_kind.trim_start_matches(|c: char| c.is_ascii_digit()).starts_with(float)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Bool, Int};

    use super::*;

    #[test]
    fn a_name_says_whether_a_value_holds_float_tensors() {
        type Nested = Option<Vec<(Tensor<12>, usize)>>;
        for name in [type_name::<Tensor<3>>(), type_name::<[Tensor<1>; 2]>(), type_name::<Nested>()]
        {
            assert!(names_tensors(name), "{name}");
        }
        type Reference = &'static Tensor<3>;
        for name in [
            type_name::<Tensor<3, Int>>(),
            type_name::<Vec<Tensor<1, Bool>>>(),
            type_name::<Reference>(),
            type_name::<Option<usize>>(),
            type_name::<(usize, f32)>(),
        ] {
            assert!(!names_tensors(name), "{name}");
        }
    }
}
