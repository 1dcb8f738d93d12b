//! `#[fsdp(unit)]` on what is a unit already, or holds one.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::{FsdpModule, fsdp_unit};

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

#[derive(Module, FsdpModule, Debug)]
pub struct Stack {
    blocks: Vec<Block>,
    norm: Linear,
}

#[derive(Module, FsdpModule, Debug)]
pub struct Model {
    #[fsdp(unit)]
    block: Block,
    #[fsdp(unit)]
    blocks: Vec<Option<Block>>,
    #[fsdp(unit)]
    stack: Stack,
    #[fsdp(unit, leaf)]
    leaf: Block,
}

fn main() {}
