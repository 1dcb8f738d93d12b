//! The smallest models of the tests.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::prelude::*;

/// Two linear layers in one unit.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Pair {
    pub first: Linear,
    pub second: Linear,
}

#[fsdp_unit]
impl Pair {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(self.first.forward(x))
    }
}

impl Pair {
    /// Creates layers from `widths[0]` to `widths[1]`, and from there to `widths[2]`.
    pub fn new(widths: [usize; 3], device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self { first: linear(widths[0], widths[1]), second: linear(widths[1], widths[2]) }
    }
}

/// A matrix, which is sharded, and a vector, which is replicated.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Weight {
    pub weight: Param<Tensor<2>>,
    pub row: Param<Tensor<1>>,
}

#[fsdp_unit]
impl Weight {
    /// Returns `x * weight + row`. The gradient of the row is the sum over the rows of `x`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x * self.weight.val() + self.row.val().unsqueeze::<2>()
    }
}

impl Weight {
    /// Creates the model from a matrix, with a vector of this value.
    pub fn new(weight: Tensor<2>, row: f32) -> Self {
        let [_, columns] = weight.dims();
        let row = Tensor::<1>::full([columns], row, &weight.device());
        Self { weight: Param::from_tensor(weight), row: Param::from_tensor(row) }
    }
}
