//! Splits where there is no layer: on a struct and on a method.

use burn::module::Module;
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;
use fsdp_runtime::nn::Linear;

#[derive(Module, Debug)]
#[fsdp_unit(column)]
pub struct Block {
    up: Linear,
}

#[fsdp_unit(row)]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}

fn main() {}
