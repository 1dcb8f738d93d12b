//! A further method of a recomputed unit that cannot be recomputed.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

pub trait Encode {
    fn encode(&self, x: &[Tensor<3>]) -> Tensor<3>;
}

#[derive(Module, Debug)]
#[fsdp_unit(checkpoint)]
pub struct Block {
    up: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}

#[fsdp_unit(more)]
impl Encode for Block {
    #[fsdp(forward)]
    fn encode(&self, x: &[Tensor<3>]) -> Tensor<3> {
        self.up.forward(x[0].clone())
    }
}

fn main() {}
