//! A norm and an embedding that are split like linear layers.

use burn::module::Module;
use burn::nn::Embedding;
use fsdp_runtime::FsdpModule;
use fsdp_runtime::nn::RmsNorm;

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(column)]
    norm: RmsNorm,
    #[fsdp(row)]
    words: Embedding,
}

fn main() {}
