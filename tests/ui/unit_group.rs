//! Groups of fields under `#[fsdp(unit = "name")]` that are misspelt, alone, or named as a field is.

use burn::module::Module;
use burn::nn::{LayerNorm, Linear};
use burn::tensor::Tensor;
use fsdp_runtime::{FsdpModule, fsdp_unit};

#[derive(Module, FsdpModule, Debug)]
struct Misspelt {
    #[fsdp(unit = "tail")]
    first: LayerNorm,
    #[fsdp(unit = "tail")]
    norm: LayerNorm,
    #[fsdp(unit = "tial")]
    head: Linear,
}

#[derive(Module, FsdpModule, Debug)]
struct Alone {
    #[fsdp(unit = "tail")]
    head: Linear,
}

#[derive(Module, FsdpModule, Debug)]
struct NamedAsAField {
    #[fsdp(unit = "head")]
    norm: LayerNorm,
    #[fsdp(unit = "head")]
    head: Linear,
}

#[derive(Module, FsdpModule, Debug)]
struct NotAName {
    #[fsdp(unit = "the tail")]
    norm: LayerNorm,
    #[fsdp(unit = 3)]
    second: LayerNorm,
    #[fsdp(unit("tail"))]
    head: Linear,
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    inner: Linear,
}

#[fsdp_unit]
impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.inner.forward(x)
    }
}

#[derive(Module, FsdpModule, Debug)]
struct WithAUnit {
    #[fsdp(unit = "tail")]
    block: Block,
    #[fsdp(unit = "tail")]
    head: Linear,
}

#[derive(Module, FsdpModule, Debug)]
struct WithASkippedField {
    #[fsdp(unit = "tail")]
    norm: LayerNorm,
    #[fsdp(unit = "tail")]
    head: Linear,
    #[fsdp(unit = "tail")]
    #[module(skip)]
    skipped: Vec<usize>,
}

#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("first.weight" = "other.weight"))]
struct TiedAcrossGroups {
    #[fsdp(unit = "tail")]
    first: Linear,
    #[fsdp(unit = "tail")]
    second: Linear,
    #[fsdp(unit = "others")]
    other: Linear,
    #[fsdp(unit = "others")]
    norm: LayerNorm,
}

fn main() {}
