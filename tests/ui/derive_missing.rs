//! A unit, and a module, without `#[derive(Module)]`.

use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::{FsdpModule, fsdp_unit};

#[fsdp_unit]
pub struct Block {
    up: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}

#[derive(FsdpModule, Debug)]
pub struct Model {
    up: Linear,
}

fn main() {}
