//! Two `impl` blocks of one unit with hooks.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

#[derive(Module, Debug)]
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

#[fsdp_unit]
impl Block {
    pub fn forward_step(&self, x: Tensor<2>) -> Tensor<2> {
        self.up.forward(x)
    }
}

fn main() {}
