//! Arguments that nothing knows, or that belong elsewhere.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::{FsdpModule, fsdp_unit};

#[derive(Module, Debug)]
#[fsdp_unit(rot, ties("up" = "down"), shard)]
pub struct Block {
    #[fsdp(kye = "a")]
    up: Linear,
    #[fsdp(root)]
    down: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(self.up.forward(x))
    }
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(root, key = "bert")]
pub struct Model {
    up: Linear,
}

fn main() {}
