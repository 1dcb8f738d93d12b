//! A field of a type that FSDP knows nothing of.

use burn::module::Module;
use burn::nn::Linear;
use fsdp_runtime::FsdpModule;

#[derive(Module, Debug)]
pub struct Gate {
    up: Linear,
}

#[derive(Module, FsdpModule, Debug)]
pub struct Block {
    gate: Gate,
    gates: Vec<Gate>,
}

fn main() {}
