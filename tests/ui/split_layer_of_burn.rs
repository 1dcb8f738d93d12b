//! Burn's layer, which does not sum over ranks.

use burn::module::Module;
use burn::nn::Linear as BurnLinear;
use fsdp_runtime::FsdpModule;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(column)]
    up: BurnLinear,
    #[fsdp(row)]
    down: BurnLinear,
}

fn main() {}
