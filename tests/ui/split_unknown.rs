//! Styles of other libraries.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::Linear;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(colwise)]
    up: Linear,
    #[fsdp(colum)]
    gate: Linear,
    #[fsdp(column = "all")]
    last: Linear,
    #[fsdp(row)]
    down: Linear,
}

fn main() {}
