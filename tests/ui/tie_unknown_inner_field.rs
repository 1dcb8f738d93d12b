//! A tie path goes wrong below the struct: a field that is not there, a list without an index, a
//! path that continues below a parameter.

use burn::module::Module;
use burn::nn::{Embedding, Linear};
use fsdp_runtime::FsdpModule;

#[derive(Module, FsdpModule, Debug)]
pub struct Embeddings {
    word: Embedding,
    position: Embedding,
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("embeddings.wrd" = "decoder"))]
pub struct Misspelt {
    embeddings: Embeddings,
    decoder: Linear,
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("decoders.weight" = "embedding"))]
pub struct Unindexed {
    embedding: Embedding,
    decoders: Vec<Linear>,
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("embedding.weight.data" = "decoder"))]
pub struct TooDeep {
    embedding: Embedding,
    decoder: Linear,
}

fn main() {}
