//! An enum as a unit, and as a module.

use burn::module::Module;
use burn::nn::{Gelu, Linear};
use burn::tensor::Tensor;
use fsdp_runtime::{FsdpModule, fsdp_unit};

#[derive(Module, Debug)]
#[fsdp_unit]
pub enum Mixer {
    Dense(Linear),
    Plain(Gelu),
}

#[fsdp_unit]
impl Mixer {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Dense(linear) => linear.forward(x),
            Self::Plain(gelu) => gelu.forward(x),
        }
    }
}

#[derive(Module, FsdpModule, Debug)]
pub enum Activation {
    Dense(Linear),
    Plain(Gelu),
}

#[derive(Module, FsdpModule, Debug)]
pub struct Model {
    mixer: Mixer,
    activation: Activation,
}

fn main() {}
