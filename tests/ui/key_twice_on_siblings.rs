//! Two fields with one checkpoint key.

use burn::module::Module;
use burn::nn::Linear;
use fsdp_runtime::FsdpModule;

#[derive(Module, FsdpModule, Debug)]
pub struct Block {
    #[fsdp(key = "dense")]
    up: Linear,
    #[fsdp(key = "dense")]
    down: Linear,
}

#[derive(Module, FsdpModule, Debug)]
pub struct Other {
    #[fsdp(key = "down")]
    up: Linear,
    down: Linear,
}

fn main() {}
