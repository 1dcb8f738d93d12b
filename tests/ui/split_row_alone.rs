//! A sum over parts of inputs that no layer makes.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::Linear;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(row)]
    down: Linear,
}

fn main() {}
