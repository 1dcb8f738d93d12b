//! A root inside a root.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Encoder {
    up: Linear,
}

#[fsdp_unit]
impl Encoder {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Model {
    encoders: Vec<Encoder>,
    head: Linear,
}

#[fsdp_unit]
impl Model {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.head.forward(self.encoders[0].forward(x))
    }
}

fn main() {}
