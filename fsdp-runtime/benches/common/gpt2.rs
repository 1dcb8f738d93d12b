//! GPT-2 without dropout, and rows of random words to train it on.

use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Int, Tensor};
use fsdp_runtime::nn::{
    AttentionOptions, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearActivation, LinearConfig, LinearCrossEntropyOptions, attention, linear_cross_entropy,
};
use fsdp_runtime::prelude::*;

/// Layers, width, heads, words and positions of the model of 124 M parameters.
const LAYERS: usize = 12;
const WIDTH: usize = 768;
const HEADS: usize = 12;
const WORDS: usize = 50_257;
const POSITIONS: usize = 1024;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    norm_1: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm_2: LayerNorm,
    up: Linear,
    down: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [rows, length, width] = x.dims();
        let layers = [&self.query, &self.key, &self.value];
        let parts = Linear::forward_each(layers, self.norm_1.forward(x.clone()));
        let heads = |x: Tensor<3>| x.reshape([rows, length, HEADS, width / HEADS]).swap_dims(1, 2);
        let [query, key, value] = parts.map(heads);
        let context = attention(query, key, value, AttentionOptions::new().with_causal(true));
        let context = context.swap_dims(1, 2).reshape([rows, length, width]);
        let x = x + self.output.forward(context);
        let normed = self.norm_2.forward(x.clone());
        let wide = self.up.forward_activated(normed, LinearActivation::GeluTanh);
        x + self.down.forward(wide)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root, tie("words" = "output"))]
pub struct Gpt2 {
    words: Embedding,
    output: Param<Tensor<2>>,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

#[fsdp_unit]
impl Gpt2 {
    /// Returns the mean loss of the next words. `ids` is `[rows, length]`, `targets` `[rows * length]`.
    pub fn forward(&self, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
        let [rows, length] = ids.dims();
        let positions = Tensor::arange(0..length as i64, &ids.device()).unsqueeze();
        let x = self.words.forward(ids) + self.positions.forward(positions);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        let hidden = self.norm.forward(x).reshape([rows * length, WIDTH]);
        let options = LinearCrossEntropyOptions::new();
        linear_cross_entropy(hidden, self.output.val(), targets, options)
    }
}

impl Gpt2 {
    pub fn new(device: &Device) -> Self {
        let init = || Initializer::Normal { mean: 0.0, std: 0.02 };
        let linear = |from, to| LinearConfig::new(from, to).with_initializer(init()).init(device);
        let norm = || LayerNormConfig::new(WIDTH).init(device);
        let embedding =
            |rows| EmbeddingConfig::new(rows, WIDTH).with_initializer(init()).init(device);
        let block = |_| Block {
            norm_1: norm(),
            query: linear(WIDTH, WIDTH),
            key: linear(WIDTH, WIDTH),
            value: linear(WIDTH, WIDTH),
            output: linear(WIDTH, WIDTH),
            norm_2: norm(),
            up: linear(WIDTH, 4 * WIDTH),
            down: linear(4 * WIDTH, WIDTH),
        };
        let words = embedding(WORDS);
        Self {
            output: words.weight.clone(),
            words,
            positions: embedding(POSITIONS),
            blocks: (0..LAYERS).map(block).collect(),
            norm: norm(),
        }
    }
}

/// Returns one row of words, and the words after each of them.
pub fn batch(length: usize, device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
    let words: Vec<i32> = (0..=length).map(|at| (at * 7919 % 50_021) as i32).collect();
    let ids = Tensor::<1, Int>::from_data(&words[..length], device).reshape([1, length]);
    (ids, Tensor::from_data(&words[1..], device))
}
