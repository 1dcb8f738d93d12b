//! Arguments given twice.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

#[derive(Module, Debug)]
#[fsdp_unit(root, root, checkpoint, checkpoint)]
pub struct Model {
    #[fsdp(key = "a", key = "b")]
    up: Linear,
    #[fsdp(leaf)]
    #[fsdp(leaf)]
    down: Linear,
}

#[fsdp_unit]
impl Model {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(self.up.forward(x))
    }
}

fn main() {}
