//! Outputs that are split over ranks after the last sum.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::Linear;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(column)]
    up: Linear,
    #[fsdp(row)]
    down: Linear,
    #[fsdp(column)]
    last: Linear,
}

fn main() {}
