//! Inputs of generic types whose bounds do not say that they are `UnitValue`s.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::{UnitValue, fsdp_unit};

/// A module of another crate.
#[derive(Module, Debug)]
pub struct Foreign {
    inner: Linear,
}

impl Foreign {
    pub fn forward<T: Into<Tensor<2>>>(&self, x: T) -> Tensor<2> {
        self.inner.forward(x.into())
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    up: Linear,
    #[fsdp(unit, leaf)]
    foreign: Foreign,
}

#[fsdp_unit(field_units)]
impl Block {
    pub fn forward<T: Into<Tensor<2>>>(&self, x: T) -> Tensor<2> {
        self.up.forward(x.into())
    }

    pub fn forward_any(&self, x: impl Into<Tensor<2>>) -> Tensor<2> {
        self.up.forward(x.into())
    }

    pub fn forward_if<T>(&self, x: Option<T>, y: Tensor<2>) -> Tensor<2>
    where
        T: Into<Tensor<2>>,
    {
        self.up.forward(x.map_or(y, Into::into))
    }

    pub fn forward_passed<T: Into<Tensor<2>>>(&self, x: T) -> Tensor<2> {
        self.foreign.forward(x)
    }

    /// Not hooked, but the call in it is.
    pub fn pass<T: Into<Tensor<2>>>(&self, x: T) -> Tensor<2> {
        self.foreign.forward(x)
    }

    /// Nothing is wrong with this one.
    pub fn forward_map<T: Into<Tensor<2>> + UnitValue>(
        &self,
        x: T,
        last: &T,
        map: impl FnOnce(Tensor<2>) -> Tensor<2>,
    ) -> Tensor<2>
    where
        T: Clone,
    {
        map(self.up.forward(x.into() + last.clone().into()))
    }
}

fn main() {}
