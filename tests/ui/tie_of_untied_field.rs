//! A tie that names a field without known parameters, one place twice, or the same pair again.

use burn::module::Module;
use burn::nn::{Embedding, Linear};
use fsdp_runtime::FsdpModule;

#[derive(Module, FsdpModule, Debug)]
#[fsdp(
    tie("vendor" = "decoder"),
    tie("cache" = "decoder"),
    tie("width" = "decoder"),
    tie("word" = "word"),
    tie("word" = "decoder"),
    tie("decoder" = "word")
)]
pub struct Model {
    #[fsdp(leaf)]
    vendor: Linear,
    #[module(skip)]
    cache: Option<usize>,
    width: usize,
    word: Embedding,
    decoder: Linear,
}

fn main() {}
