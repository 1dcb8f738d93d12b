//! A `forward` that does not run from beginning to end when it is called.

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
    pub async fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }

    pub const fn forward_width(&self) -> usize {
        4
    }
}

fn main() {}
