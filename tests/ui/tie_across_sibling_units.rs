//! The two places of a tied weight lie in two sibling units.

use burn::module::Module;
use burn::nn::{Embedding, Linear};
use burn::tensor::{Int, Tensor};
use fsdp_runtime::fsdp_unit;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Embeddings {
    word: Embedding,
}

#[fsdp_unit]
impl Embeddings {
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        self.word.forward(ids)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Head {
    decoder: Linear,
}

#[fsdp_unit]
impl Head {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.decoder.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root, tie("embeddings.word" = "head.decoder"))]
pub struct Model {
    embeddings: Embeddings,
    head: Head,
}

#[fsdp_unit]
impl Model {
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        self.head.forward(self.embeddings.forward(ids))
    }
}

fn main() {}
