//! A split layer that is a unit of its own.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::Linear;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(column, unit)]
    up: Linear,
    #[fsdp(row)]
    down: Linear,
}

fn main() {}
