//! A type that is no unit in a wrap list.

use burn::module::Module;
use burn::nn::Linear;
use fsdp_runtime::options::UnitType;
use fsdp_runtime::{FsdpModule, unit_types};

#[derive(Module, FsdpModule, Debug)]
pub struct Block {
    up: Linear,
}

fn main() {
    let _wrapped: &[UnitType] = unit_types![Block, Linear];
}
