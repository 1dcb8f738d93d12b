//! A unit with no parameters of its own: those of nested units do not count.

use burn::module::Module;
use burn::nn::{Dropout, Linear};
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Layer {
    up: Linear,
}

#[fsdp_unit]
impl Layer {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Encoder {
    layers: Vec<Layer>,
    dropout: Dropout,
}

#[fsdp_unit]
impl Encoder {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.layers.iter().fold(x, |x, layer| self.dropout.forward(layer.forward(x)))
    }
}

fn main() {}
