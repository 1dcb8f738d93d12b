//! The inputs of a forward that may be recomputed, as generated code passes them: nested pairs
//! `(a, (b, ()))`, which stand for tuples of any length.
//!
//! An input by value is a [`ByValue`], and one by reference a [`Reference`]. [`InputList::Kept`] is the
//! form in which they are kept until backward: a reference is kept as a clone of its value.

use std::marker::PhantomData;

use burn::tensor::DispatchTensor;

use super::super::references::{Behind, Reference, Referred};
use crate::module::UnitValue;

/// An input that is passed by value.
#[derive(Clone, Debug)]
pub struct ByValue<T>(pub T);

/// A clone of the value behind a reference.
#[derive(Debug)]
pub struct KeptReference<T: ?Sized, K>(Box<T>, PhantomData<K>);

impl<T: ?Sized, K> KeptReference<T, K> {
    /// Returns the value.
    pub fn get(&self) -> &T {
        &self.0
    }
}

impl<T: Clone, K> Clone for KeptReference<T, K> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), PhantomData)
    }
}

impl<T: UnitValue> UnitValue for ByValue<T> {
    fn map_tensors(self, map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        Self(self.0.map_tensors(map))
    }

    fn visit_tensors(&self, visit: &mut dyn FnMut(DispatchTensor)) {
        self.0.visit_tensors(visit);
    }
}

impl<T, K: Behind<T>> UnitValue for KeptReference<T, K> {
    fn map_tensors(self, map: &mut dyn FnMut(DispatchTensor) -> DispatchTensor) -> Self {
        Self(K::map_tensors(self.0, map), PhantomData)
    }

    fn visit_tensors(&self, visit: &mut dyn FnMut(DispatchTensor)) {
        K::visit_tensors(&self.0, visit);
    }
}

/// A list of inputs.
pub trait InputList {
    /// The inputs as a recomputation has them.
    type Kept;
}

impl InputList for () {
    type Kept = ();
}

impl<A: InputList, B: InputList> InputList for (A, B) {
    type Kept = (A::Kept, B::Kept);
}

impl<T> InputList for ByValue<T> {
    type Kept = Self;
}

impl<T: ?Sized, K> InputList for Reference<'_, T, K> {
    type Kept = KeptReference<T, K>;
}

/// Inputs that can be kept until backward.
pub trait KeepInputs: InputList<Kept: UnitValue + Clone + Send + 'static> {
    /// Passes the tensors that may have a gradient to `visit`.
    fn visit(&self, visit: &mut dyn FnMut(DispatchTensor));
    /// Returns the type of the first value behind a reference that holds a trained parameter.
    fn trained(&self) -> Option<&'static str>;
    /// Returns the inputs to keep. Values behind references are cloned.
    fn keep(self) -> Self::Kept;
    /// Returns inputs that own the kept ones.
    fn lend(kept: Self::Kept) -> Self;
}

impl KeepInputs for () {
    fn visit(&self, _: &mut dyn FnMut(DispatchTensor)) {}

    fn trained(&self) -> Option<&'static str> {
        None
    }

    fn keep(self) {}

    fn lend(_: ()) {}
}

impl<A: KeepInputs, B: KeepInputs> KeepInputs for (A, B) {
    fn visit(&self, visit: &mut dyn FnMut(DispatchTensor)) {
        self.0.visit(visit);
        self.1.visit(visit);
    }

    fn trained(&self) -> Option<&'static str> {
        self.0.trained().or_else(|| self.1.trained())
    }

    fn keep(self) -> Self::Kept {
        (self.0.keep(), self.1.keep())
    }

    fn lend((first, rest): Self::Kept) -> Self {
        (A::lend(first), B::lend(rest))
    }
}

impl<T: UnitValue + Clone + Send + 'static> KeepInputs for ByValue<T> {
    fn visit(&self, visit: &mut dyn FnMut(DispatchTensor)) {
        self.0.visit_tensors(visit);
    }

    fn trained(&self) -> Option<&'static str> {
        None
    }

    fn keep(self) -> Self {
        self
    }

    fn lend(kept: Self) -> Self {
        kept
    }
}

impl<T, K> KeepInputs for Reference<'_, T, K>
where
    T: Clone + Send + 'static,
    K: Behind<T> + Send + 'static,
{
    fn visit(&self, visit: &mut dyn FnMut(DispatchTensor)) {
        K::visit_tensors(self.get(), visit);
    }

    fn trained(&self) -> Option<&'static str> {
        K::trained(self.get())
    }

    fn keep(self) -> Self::Kept {
        let value = match self.0 {
            Referred::Caller(value) => Box::new(value.clone()),
            Referred::Copy(value) => value,
        };
        KeptReference(value, PhantomData)
    }

    fn lend(kept: Self::Kept) -> Self {
        Self::copy(kept.0)
    }
}
