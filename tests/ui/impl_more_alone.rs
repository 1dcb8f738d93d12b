//! A further block of hooks on a unit without the block that it must have.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

pub trait Encode {
    fn encode(&self, x: Tensor<3>) -> Tensor<3>;
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    up: Linear,
}

#[fsdp_unit(more)]
impl Encode for Block {
    #[fsdp(forward)]
    fn encode(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}

fn main() {}
