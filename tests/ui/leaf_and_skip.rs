//! A field that is both passed by and looked into, and arguments on fields that have no parameters.

use burn::module::Module;
use burn::nn::Linear;
use fsdp_runtime::FsdpModule;

#[derive(Module, FsdpModule, Debug)]
pub struct Model {
    #[module(skip)]
    #[fsdp(leaf)]
    cache: Option<Linear>,
    #[module(skip)]
    #[fsdp(key = "other")]
    other: Option<Linear>,
    #[fsdp(leaf, key = "width")]
    width: usize,
}

fn main() {}
