//! A unit in a field, and an `impl` block without the hooks around its calls; and the other way
//! round.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::{FsdpModule, fsdp_unit};

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    up: Linear,
    #[fsdp(unit)]
    down: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(self.up.forward(x))
    }
}

#[derive(Module, FsdpModule, Debug)]
pub struct Heads {
    #[fsdp(unit)]
    heads: Vec<Linear>,
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Decoder {
    heads: Heads,
    norm: Linear,
}

#[fsdp_unit]
impl Decoder {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.heads.heads[0].forward(self.norm.forward(x))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Plain {
    up: Linear,
}

#[fsdp_unit(field_units)]
impl Plain {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}

fn main() {}
