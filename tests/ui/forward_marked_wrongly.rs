//! `#[fsdp(forward)]` on methods that cannot be hooked, and with other arguments.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use fsdp_runtime::fsdp_unit;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    up: Linear,
}

#[fsdp_unit]
impl Block {
    #[fsdp(forward)]
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }

    #[fsdp(forward)]
    pub fn encode(&mut self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }

    #[fsdp(forward)]
    pub fn consume(self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }

    #[fsdp(forward)]
    pub fn scale(x: Tensor<3>) -> Tensor<3> {
        x * 2.0
    }

    #[fsdp(forward)]
    pub async fn decode(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }

    #[fsdp(froward)]
    pub fn project(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }

    #[fsdp(unit)]
    pub fn embed(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }

    #[fsdp(forward, forward)]
    pub fn pool(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
    }

    #[fsdp(forward)]
    pub fn name(&self) -> &str {
        "block"
    }
}

fn main() {}
