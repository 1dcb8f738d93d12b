//! Split fields without parameters.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::Linear;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[module(skip)]
    #[fsdp(column)]
    cache: Option<Linear>,
    #[fsdp(row)]
    width: usize,
}

fn main() {}
