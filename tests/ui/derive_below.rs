//! `#[derive(Module)]` below `#[fsdp_unit]`.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

#[fsdp_unit]
#[derive(Module, Debug)]
pub struct Block {
    #[fsdp(key = "dense")]
    up: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}

fn main() {}
