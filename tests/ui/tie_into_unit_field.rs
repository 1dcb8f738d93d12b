//! A weight tied to one in a field that is a unit.

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
#[fsdp_unit(root, tie("embeddings.word" = "heads.1"), tie("word" = "heads.0.weight"))]
pub struct Model {
    word: Embedding,
    embeddings: Embeddings,
    #[fsdp(unit)]
    heads: Vec<Option<Linear>>,
}

#[fsdp_unit(field_units)]
impl Model {
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        self.embeddings.forward(ids)
    }
}

fn main() {}
