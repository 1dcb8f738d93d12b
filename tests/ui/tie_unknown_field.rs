//! A tie path begins with no field of the struct.

use burn::module::Module;
use burn::nn::{Embedding, Linear};
use fsdp_runtime::FsdpModule;

#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("embeding" = "decoder"), tie("head" = "decoder.weight"))]
pub struct Model {
    embedding: Embedding,
    decoder: Linear,
}

fn main() {}
