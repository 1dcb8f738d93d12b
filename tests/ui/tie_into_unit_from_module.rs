//! A module that is no unit ties a weight of its own to one inside a unit that it holds.

use burn::module::Module;
use burn::nn::{Embedding, Linear};
use burn::tensor::{Int, Tensor};
use fsdp_runtime::{FsdpModule, fsdp_unit};

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Encoder {
    word: Option<Embedding>,
}

#[fsdp_unit]
impl Encoder {
    pub fn forward(&self, ids: Tensor<2, Int>) -> Option<Tensor<3>> {
        Some(self.word.as_ref()?.forward(ids))
    }
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("decoder" = "encoders.0.word"))]
pub struct Pair {
    encoders: Vec<Encoder>,
    decoder: Linear,
}

fn main() {}
