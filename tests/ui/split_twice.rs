//! An argument that is given twice.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::Linear;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(column, column)]
    up: Linear,
    #[fsdp(row, row)]
    down: Linear,
}

fn main() {}
