//! Arguments whose value is not of the right form.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

#[derive(Module, Debug)]
#[fsdp_unit(root = true, tie("up"), tie = "up", tie("up." = "down"))]
pub struct Model {
    #[fsdp(key = 3)]
    up: Linear,
    #[fsdp(key("down"))]
    down: Linear,
    #[fsdp(key = "a..b")]
    gate: Linear,
    #[fsdp(leaf = "yes")]
    other: Linear,
    #[fsdp]
    last: Linear,
}

#[fsdp_unit]
impl Model {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(self.up.forward(x))
    }
}

fn main() {}
