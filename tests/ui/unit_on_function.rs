//! `#[fsdp_unit]` on neither a type nor an `impl` block.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::{FsdpModule, fsdp_unit};

#[derive(Module, FsdpModule, Debug)]
pub struct Block {
    up: Linear,
}

impl Block {
    #[fsdp_unit]
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}

fn main() {}
