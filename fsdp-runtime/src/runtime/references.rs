//! Inputs of a hooked method that are references to a value of a known type, such as
//! `rope: &RotaryEncoding`.
//!
//! The tensors behind the reference are collected and cast as those of any other input: a copy of the
//! value with cast tensors is made where one has another dtype, and the method gets a reference to the
//! copy. [`ReferenceProbe`] finds out at compile time what is known of the value's type.

use std::any::type_name;
use std::marker::PhantomData;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DispatchTensor, Tensor};

use super::hooks::{Call, OpenCall};
use super::tables::cast_argument;
use super::values::{Inputs, MapInputs};
use crate::module::{FsdpModule, UnitValue};

/// The value behind an input that is a reference.
///
/// Generated code calls `kind` on four references to this struct. Method resolution finds
/// [`ReferenceTensors`] for a [`UnitValue`] with clones, [`ReferenceTables`] for an [`FsdpModule`],
/// [`ReferenceModule`] for another module, and [`ReferenceOther`] for a value of any other type. Each
/// trait takes one reference less than the one before.
#[derive(Debug)]
pub struct ReferenceProbe<'a, T: ?Sized>(pub &'a T);

/// Declares a trait for references to some values, and the type of the operations on them.
macro_rules! reference_kind {
    ($(#[$of:meta])* $name:ident: $kind:ident, $(#[$doc:meta])* [$($bounds:tt)*] $receiver:ty) => {
        $(#[$of])*
        pub trait $name {
            /// Returns the operations on values of this type.
            fn kind(&self) -> $kind;
        }

        impl<T: $($bounds)*> $name for $receiver {
            fn kind(&self) -> $kind {
                $kind
            }
        }

        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $kind;
    };
}
reference_kind!(
    /// References to values whose tensors are known.
    ReferenceTensors: TensorsBehind,
    /// The operations on a [`UnitValue`] behind a reference.
    [UnitValue + Clone] &&&ReferenceProbe<'_, T>
);
reference_kind!(
    /// References to modules whose tables are known.
    ReferenceTables: TablesBehind,
    /// The operations on an [`FsdpModule`] behind a reference.
    [FsdpModule] &&ReferenceProbe<'_, T>
);
reference_kind!(
    /// References to other modules.
    ReferenceModule: ModuleBehind,
    /// The operations on another module behind a reference.
    [Module] &ReferenceProbe<'_, T>
);
reference_kind!(
    /// References to values of any other type.
    ReferenceOther: OtherBehind,
    /// The operations on any other value behind a reference.
    [?Sized] ReferenceProbe<'_, T>
);

/// An input that is a reference: to the caller's value, or to a copy of it.
#[derive(Debug)]
pub struct Reference<'a, T: ?Sized, K>(pub(super) Referred<'a, T>, PhantomData<K>);

/// The value that a [`Reference`] lends.
#[derive(Debug)]
pub(super) enum Referred<'a, T: ?Sized> {
    /// The caller's value.
    Caller(&'a T),
    /// A copy, whose tensors are cast or detached.
    Copy(Box<T>),
}

impl<'a, T: ?Sized, K> Reference<'a, T, K> {
    fn caller(value: &'a T) -> Self {
        Self(Referred::Caller(value), PhantomData)
    }

    /// Creates a reference to a copy.
    pub(super) fn copy(value: Box<T>) -> Self {
        Self(Referred::Copy(value), PhantomData)
    }

    /// Returns the value.
    pub fn get(&self) -> &T {
        match &self.0 {
            Referred::Caller(value) => value,
            Referred::Copy(value) => value,
        }
    }
}

impl TensorsBehind {
    /// Adds the tensors behind a reference to `inputs`.
    pub fn collect<T: UnitValue>(self, value: &T, inputs: &mut Inputs) {
        value.visit_tensors(&mut |tensor| inputs.0.push(tensor));
    }

    /// Casts the tensors behind a reference to the compute dtype of the called unit, in a copy.
    pub fn map<'a, T: UnitValue + Clone>(
        self,
        call: &Call,
        value: &'a T,
    ) -> Reference<'a, T, Self> {
        let Some(OpenCall { runtime, unit, .. }) = &call.0 else { return Reference::caller(value) };
        let mut casts = false;
        value.visit_tensors(&mut |tensor| casts |= runtime.casts_input(*unit, tensor));
        match casts {
            true => Reference::copy(Box::new(call.map_input(value.clone()))),
            false => Reference::caller(value),
        }
    }
}

impl TablesBehind {
    /// Adds nothing to `inputs`: tables have no gradients.
    pub fn collect<T: FsdpModule>(self, _: &T, _: &mut Inputs) {}

    /// Casts the tables behind a reference to the dtype of tables in the called unit, in a copy.
    pub fn map<'a, T: FsdpModule>(self, call: &Call, value: &'a T) -> Reference<'a, T, Self> {
        match cast_argument(call, value) {
            Some(copy) => Reference::copy(Box::new(copy)),
            None => Reference::caller(value),
        }
    }
}

/// Implements the operations on values whose tensors FSDP does not know.
macro_rules! unknown_tensors {
    ($kind:ident: [$($bounds:tt)*]) => {
        impl $kind {
            /// Adds nothing to `inputs`.
            pub fn collect<T: $($bounds)*>(self, _: &T, _: &mut Inputs) {}

            /// Returns the reference unchanged.
            pub fn map<'a, T: $($bounds)*>(self, _: &Call, value: &'a T) -> Reference<'a, T, Self> {
                Reference::caller(value)
            }
        }
    };
}
unknown_tensors!(ModuleBehind: [Module]);
unknown_tensors!(OtherBehind: [?Sized]);

/// What a recomputation needs to know of a value behind a reference.
pub trait Behind<T: ?Sized> {
    /// Passes the tensors that may have a gradient to `visit`.
    fn visit_tensors(_value: &T, _visit: &mut dyn FnMut(DispatchTensor)) {}

    /// Replaces the tensors that [`visit_tensors`](Self::visit_tensors) visits.
    fn map_tensors(
        value: Box<T>,
        _map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor,
    ) -> Box<T> {
        value
    }

    /// Returns the name of the type, if the value holds a trained parameter.
    fn trained(_value: &T) -> Option<&'static str> {
        None
    }
}

impl<T: UnitValue> Behind<T> for TensorsBehind {
    fn visit_tensors(value: &T, visit: &mut dyn FnMut(DispatchTensor)) {
        value.visit_tensors(visit);
    }

    fn map_tensors(value: Box<T>, map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Box<T> {
        Box::new((*value).map_tensors(map))
    }
}

impl<T: FsdpModule> Behind<T> for TablesBehind {
    fn trained(value: &T) -> Option<&'static str> {
        has_trained_param(value).then(type_name::<T>)
    }
}

impl<T: Module> Behind<T> for ModuleBehind {
    fn trained(value: &T) -> Option<&'static str> {
        has_trained_param(value).then(type_name::<T>)
    }
}

impl<T: ?Sized> Behind<T> for OtherBehind {}

/// Returns whether a parameter of a module requires a gradient.
fn has_trained_param<M: Module>(module: &M) -> bool {
    struct Search(bool);
    impl ModuleVisitor for Search {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0 |= param.base().is_require_grad();
        }
    }
    let mut search = Search(false);
    module.visit(&mut search);
    search.0
}
