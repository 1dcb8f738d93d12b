//! A vocabulary that is split in a layer without one, and in one place of a tied weight.

use burn::module::Module;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::{Embedding, Linear, LmHead};

#[derive(Module, FsdpModule, Debug)]
pub struct Layers {
    #[fsdp(vocab)]
    up: Linear,
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("words" = "head"))]
pub struct Model {
    #[fsdp(vocab)]
    words: Embedding,
    head: LmHead,
}

fn main() {}
