use burn::module::Module;
use burn::nn::{Embedding, Linear};
use fsdp_runtime::FsdpModule;

#[derive(Module, FsdpModule, Debug)]
pub struct Embeddings {
    word: Embedding,
    position: Embedding,
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("embeddings.word" = "decoder"))]
pub struct Model {
    embeddings: Embeddings,
    #[fsdp(key = "cls.decoder")]
    decoder: Linear,
}
