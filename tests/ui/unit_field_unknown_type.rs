//! `#[fsdp(unit)]` on a module that FSDP knows nothing of.

use burn::module::Module;
use burn::nn::Linear;
use fsdp_runtime::FsdpModule;

#[derive(Module, Debug)]
pub struct Gate {
    up: Linear,
}

#[derive(Module, FsdpModule, Debug)]
pub struct Block {
    #[fsdp(unit)]
    gate: Gate,
}

fn main() {}
