//! `crate = ".."` that is not the path of the runtime crate.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::{FsdpModule, UnitValue, fsdp_unit};

#[derive(Module, Debug)]
#[fsdp_unit(crate)]
pub struct Block {
    #[fsdp(crate = "fsdp_runtime")]
    up: Linear,
}

#[fsdp_unit(crate = "fsdp_runtime", crate = "fsdp_runtime")]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(crate = fsdp_runtime)]
pub struct NoString {
    up: Linear,
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(crate = "fsdp-runtime")]
pub struct NoPath {
    up: Linear,
}

#[derive(UnitValue)]
#[fsdp(crate = "", crates = "fsdp_runtime", tie("x" = "y"))]
pub struct Output {
    #[fsdp(leaf)]
    x: Tensor<3>,
}

mod fsdp {}

#[derive(UnitValue)]
#[fsdp(crate = "crate::fsdp")]
pub struct NoRuntime {
    x: Tensor<3>,
}

fn main() {}
