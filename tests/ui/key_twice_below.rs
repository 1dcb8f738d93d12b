//! Two parameters with one checkpoint key, below different fields.

use burn::module::Module;
use burn::nn::{LayerNorm, Linear};
use fsdp_runtime::FsdpModule;

#[derive(Module, FsdpModule, Debug)]
pub struct Block {
    up: Linear,
    norm: LayerNorm,
}

#[derive(Module, FsdpModule, Debug)]
pub struct Model {
    #[fsdp(key = "layers.0")]
    first: Block,
    #[fsdp(key = "layers.0.norm")]
    norm: LayerNorm,
}

/// What `Model` holds twice is reported there only.
#[derive(Module, FsdpModule, Debug)]
pub struct Outer {
    model: Model,
}

fn main() {}
