//! A sum before the layer that makes its inputs.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::Linear;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(row)]
    down: Linear,
    #[fsdp(column)]
    up: Linear,
}

fn main() {}
