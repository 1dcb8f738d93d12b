//! A split layer that FSDP does not see.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::Linear;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(column, leaf)]
    up: Linear,
    #[fsdp(row)]
    down: Linear,
}

fn main() {}
