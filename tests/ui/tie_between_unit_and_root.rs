//! One place of a tied weight lies in a nested unit, the other in the root itself.

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
#[fsdp_unit(root, tie("embeddings.word" = "decoder"))]
pub struct Model {
    embeddings: Embeddings,
    decoder: Linear,
}

#[fsdp_unit]
impl Model {
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        self.decoder.forward(self.embeddings.forward(ids))
    }
}

fn main() {}
