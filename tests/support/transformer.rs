//! A small transformer with every kind of parameter: tables, matrices, biases, norms and dropout.

use std::ops::Range;

use burn::module::{Initializer, Module, ModuleMapper, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, RmsNorm,
    RmsNormConfig,
};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_runtime::nn::{Dropout, DropoutConfig};
use fsdp_runtime::prelude::*;

pub const VOCABULARY: usize = 67;
/// Tokens in a row. A multiple of 32: Burn's `linear` then saves a reshaped view of its weight for
/// backward.
pub const LENGTH: usize = 32;
pub const WIDTH: usize = 24;
/// Width between the two matrices of a block: a size that no world divides.
pub const HIDDEN: usize = 3 * WIDTH + 5;
pub const CLASSES: usize = 3;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Embed {
    pub word: Embedding,
    pub position: Param<Tensor<2>>,
    pub norm: LayerNorm,
    pub dropout: Dropout,
}

#[fsdp_unit]
impl Embed {
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let word = self.word.forward(tokens);
        let position = self.position.val().unsqueeze::<3>();
        self.dropout.forward(self.norm.forward(word + position))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    pub norm: RmsNorm,
    pub up: Linear,
    pub down: Linear,
    pub dropout: Dropout,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let hidden = gelu(self.up.forward(self.norm.forward(x.clone())));
        x + self.dropout.forward(self.down.forward(hidden))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Net {
    pub embed: Embed,
    pub blocks: Vec<Block>,
    pub head: Linear,
}

#[fsdp_unit]
impl Net {
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let mut x = self.embed.forward(tokens);
        for block in &self.blocks {
            x = block.forward(x);
        }
        self.head.forward(x.mean_dim(1).squeeze_dim(1))
    }
}

impl Net {
    pub fn new(blocks: usize, dropout: f64, device: &Device) -> Self {
        let dropout = DropoutConfig::new(dropout);
        let block = |_| Block {
            norm: RmsNormConfig::new(WIDTH).init(device),
            up: LinearConfig::new(WIDTH, HIDDEN).init(device),
            down: LinearConfig::new(HIDDEN, WIDTH).init(device),
            dropout: dropout.init(),
        };
        let embed = Embed {
            word: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            position: Initializer::Normal { mean: 0.0, std: 0.02 }.init([LENGTH, WIDTH], device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            dropout: dropout.init(),
        };
        let head = LinearConfig::new(WIDTH, CLASSES).init(device);
        Self { embed, blocks: (0..blocks).map(block).collect(), head }
    }
}

/// Tokens `[rows, LENGTH]` and labels `[rows]`. A row has the same tokens in every batch that holds
/// it.
pub fn batch(step: usize, rows: Range<usize>, device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
    let token =
        |row: usize, at: usize| ((row * 7919 + step * 104_729 + at * 31) % VOCABULARY) as i32;
    let tokens: Vec<i32> =
        rows.clone().flat_map(|row| (0..LENGTH).map(move |at| token(row, at))).collect();
    let labels: Vec<i32> = rows.clone().map(|row| token(row, 3) % CLASSES as i32).collect();
    let shape = [rows.len(), LENGTH];
    (
        Tensor::from_data(TensorData::new(tokens, shape), device),
        Tensor::from_data(TensorData::new(labels, [rows.len()]), device),
    )
}

/// Mean cross-entropy over rows.
pub fn loss(logits: Tensor<2>, labels: Tensor<1, Int>) -> Tensor<1> {
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
}

/// Gives every parameter numbers that depend only on its position in the module.
#[derive(Debug)]
pub struct Numbered(pub u64);

impl ModuleMapper for Numbered {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let seed = self.0;
        param.map(|tensor| {
            let (shape, device) = (tensor.shape(), tensor.device());
            let number = |at: usize| {
                let mut x = (at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (seed << 32);
                x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                let unit = (x >> 40) as f32 / (1 << 23) as f32 - 1.0;
                unit * 0.2 + if D == 1 { 0.5 } else { 0.0 }
            };
            let numbers: Vec<f32> = (0..shape.num_elements()).map(number).collect();
            Tensor::<D>::from_data(TensorData::new(numbers, shape), &device).require_grad()
        })
    }
}
