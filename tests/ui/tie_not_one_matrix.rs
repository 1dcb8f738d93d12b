//! A tie path leads to a module with no matrix, or with several.

use burn::module::Module;
use burn::nn::{Embedding, LayerNorm, Linear};
use fsdp_runtime::FsdpModule;

#[derive(Module, FsdpModule, Debug)]
pub struct Embeddings {
    word: Embedding,
    position: Embedding,
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("embeddings" = "decoder"))]
pub struct Several {
    embeddings: Embeddings,
    decoder: Linear,
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("norm" = "decoder"))]
pub struct Without {
    norm: LayerNorm,
    decoder: Linear,
}

fn main() {}
