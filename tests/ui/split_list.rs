//! A list of layers, of which each would take whole inputs.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::Linear;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(column)]
    layers: Vec<Linear>,
    #[fsdp(row)]
    down: Linear,
}

fn main() {}
