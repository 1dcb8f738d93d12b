//! Outputs that are split over ranks and leave the module.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::Linear;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(column)]
    gate: Linear,
    #[fsdp(column)]
    up: Linear,
    down: Linear,
}

fn main() {}
