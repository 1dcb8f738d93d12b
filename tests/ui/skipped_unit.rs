//! A unit in a field that Burn passes by, or that FSDP does not look into.

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
}

#[derive(Module, FsdpModule, Debug)]
pub struct Model {
    #[module(skip)]
    block: Block,
    #[module(skip)]
    blocks: Vec<Option<Block>>,
    #[module(skip)]
    shared: std::sync::Arc<Block>,
    #[module(skip)]
    stack: Stack,
    #[fsdp(leaf)]
    leaf: Block,
    #[module(skip)]
    fine: Option<Linear>,
}

fn main() {}
