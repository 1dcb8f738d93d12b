//! `gather` without a split of outputs.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::Linear;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(column)]
    up: Linear,
    #[fsdp(row, gather)]
    down: Linear,
    #[fsdp(gather)]
    last: Linear,
}

fn main() {}
