//! A matrix that is split along both dimensions.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::Linear;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(column, row)]
    up: Linear,
    #[fsdp(row)]
    down: Linear,
}

fn main() {}
