//! A `forward` that returns what FSDP cannot find tensors in.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

#[derive(Debug)]
pub struct Output {
    pub hidden: Tensor<3>,
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    up: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Output {
        Output { hidden: self.up.forward(x) }
    }
}

fn main() {}
