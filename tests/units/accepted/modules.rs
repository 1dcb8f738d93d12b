//! Every form of struct that the macros accept, and its layout.
#![deny(warnings)]

use burn::module::{Content, Module, ModuleDisplay, ModuleDisplayDefault, Param};
use burn::nn::conv::Conv2d;
use burn::nn::transformer::TransformerEncoder;
use burn::nn::{BatchNorm, Embedding, Gelu, LayerNorm, Linear, Lstm, PositionalEncoding};
use burn::tensor::{Int, Tensor};

use fsdp_runtime::__private::{Kind, Node};
use fsdp_runtime::options::UnitType;
use fsdp_runtime::{FsdpModule, fsdp_unit, unit_types};

#[derive(Debug, Clone, Default)]
pub struct Counters(pub usize);

#[derive(Module, Debug)]
pub struct Vendor {
    up: Linear,
}

#[derive(Module, FsdpModule, Debug)]
pub struct Nothing;

/// Burn does not derive `Module` for a tuple struct, so that it is implemented by hand.
#[derive(FsdpModule, Debug, Clone)]
pub struct Pair(Linear, #[fsdp(key = "second")] Linear);

impl Module for Pair {
    burn::empty!(module);
}

impl ModuleDisplay for Pair {}

impl ModuleDisplayDefault for Pair {
    fn content(&self, content: Content) -> Option<Content> {
        Some(content)
    }
}

#[derive(Module, FsdpModule, Debug)]
pub struct Constants {
    #[cfg(any())]
    absent: Absent,
    width: usize,
    name: Option<String>,
    letter: char,
    table: std::collections::HashMap<String, Vec<f32>>,
}

#[derive(Module, FsdpModule, Debug)]
pub struct Embeddings {
    word: Embedding,
    r#type: Option<Embedding>,
    sinusoids: PositionalEncoding,
    ids: Param<Tensor<1, Int>>,
    buffer: Tensor<2>,
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Layer {
    #[fsdp(key = "intermediate.dense")]
    up: Linear,
    #[fsdp(key = "output.dense")]
    down: Linear,
    #[fsdp(key = "")]
    norm: LayerNorm,
    scale: Param<Tensor<1>>,
    pair: (Linear, [Linear; 2]),
    activation: Gelu,
    #[fsdp(leaf, key = "gate")]
    vendor: Vendor,
    #[module(skip)]
    counters: Counters,
    dropout: f64,
}

#[fsdp_unit]
impl Layer {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(self.activation.forward(self.up.forward(x)))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root, tie("embeddings.word" = "decoder"), tie("embeddings.type.weight" = "heads.1"))]
pub struct Model {
    embeddings: Embeddings,
    layers: Vec<Layer>,
    decoder: Linear,
    heads: Vec<Option<Linear>>,
    encoder: TransformerEncoder,
    image: (Conv2d, BatchNorm),
    recurrent: Lstm,
    constants: Constants,
    nothing: Nothing,
    tuple: Pair,
    #[fsdp(key = "a.b")]
    one: Option<Vec<Linear>>,
    #[fsdp(key = "a.b")]
    two: Option<LayerNorm>,
}

#[fsdp_unit]
impl Model {
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embeddings.word.forward(ids);
        self.layers.iter().fold(x, |x, layer| layer.forward(x))
    }
}

fn show(node: &Node, depth: usize) {
    for child in node.children {
        println!("{:depth$}{} {:?}: {}", "", child.name, child.key, child.node.ty);
        show(child.node, depth + 2);
    }
}

#[test]
fn every_form_of_struct() {
    const UNITS: &[UnitType] = unit_types![Layer, Model];
    assert_eq!(UNITS.iter().map(|unit| unit.name()).collect::<Vec<_>>(), ["Layer", "Model"]);
    let layout = &Model::LAYOUT;
    assert_eq!(layout.kind, Kind::Unit { root: true });
    let names: Vec<_> = Layer::LAYOUT.children.iter().map(|child| child.name).collect();
    assert_eq!(names, ["up", "down", "norm", "scale", "pair", "activation", "vendor"]);
    let names: Vec<_> = Pair::LAYOUT.children.iter().map(|child| child.key_or_name()).collect();
    assert_eq!(names, ["0", "second"]);
    assert_eq!(layout.ties.len(), 2);
    show(layout, 0);
}
