//! A `forward` without `&self`.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Absent {
    up: Linear,
}

#[fsdp_unit]
impl Absent {
    pub fn forward(x: Tensor<3>) -> Tensor<3> {
        x
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Exclusive {
    up: Linear,
}

#[fsdp_unit]
impl Exclusive {
    pub fn forward(&mut self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Owned {
    up: Linear,
}

#[fsdp_unit]
impl Owned {
    pub fn forward(self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}

fn main() {}
