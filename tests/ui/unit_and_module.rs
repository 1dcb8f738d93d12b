//! Both macros on one struct, or one twice.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::{FsdpModule, fsdp_unit};

#[derive(Module, FsdpModule, Debug)]
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

#[derive(Module, Debug)]
#[fsdp_unit]
#[fsdp_unit(root)]
#[fsdp(tie("up" = "down"))]
pub struct Model {
    up: Linear,
    down: Linear,
}

#[fsdp_unit]
impl Model {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(self.up.forward(x))
    }
}

fn main() {}
