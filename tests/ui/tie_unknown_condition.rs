//! A tie has one condition, `if_shared`.

use burn::module::Module;
use burn::nn::{Embedding, Linear};
use fsdp_runtime::FsdpModule;

#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("embedding" = "decoder", when_shared))]
pub struct Unknown {
    embedding: Embedding,
    decoder: Linear,
}

fn main() {}
