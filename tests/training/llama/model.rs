//! A Llama of Burn's own modules, with two attributes and three derives: grouped queries, rotary
//! encoding, SwiGLU and RMS norms. The tables are handed to each block by reference.

use burn::module::Module;
use burn::nn::activation::{SwiGlu, SwiGluConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding,
    RotaryEncodingConfig,
};
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use fsdp_runtime::prelude::*;

pub const VOCABULARY: usize = 40;
/// Largest number of tokens in a row.
pub const TOKENS: usize = 12;
const WIDTH: usize = 16;
const HIDDEN: usize = 24;
const HEADS: usize = 4;
/// Number of heads of keys and values, each shared by two heads of queries.
const SHARED_HEADS: usize = 2;

#[derive(Module, FsdpModule, Debug)]
pub struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
}

impl Attention {
    fn new(device: &Device) -> Self {
        let linear = |to| LinearConfig::new(WIDTH, to).with_bias(false).init(device);
        let shared = WIDTH / HEADS * SHARED_HEADS;
        Self {
            query: linear(WIDTH),
            key: linear(shared),
            value: linear(shared),
            output: linear(WIDTH),
        }
    }

    /// Takes `x` of shape `[batch, tokens, width]` and a mask of shape `[TOKENS, TOKENS]`, which is true
    /// where a query may not see a key.
    fn forward(&self, x: Tensor<3>, rope: &RotaryEncoding, mask: &Tensor<2, Bool>) -> Tensor<3> {
        let [batch, tokens, width] = x.dims();
        let heads =
            |x: Tensor<3>, heads| x.reshape([batch, tokens, heads, width / HEADS]).swap_dims(1, 2);
        let query = rotated(rope, heads(self.query.forward(x.clone()), HEADS));
        let key = repeated(rotated(rope, heads(self.key.forward(x.clone()), SHARED_HEADS)));
        let value = repeated(heads(self.value.forward(x), SHARED_HEADS));
        let scores = query.matmul(key.transpose()) / ((width / HEADS) as f64).sqrt();
        let mask = mask.clone().slice([0..tokens, 0..tokens]).unsqueeze::<4>();
        let scores = scores.mask_fill(mask.expand([batch, HEADS, tokens, tokens]), -1e4);
        let mixed = softmax(scores, 3).matmul(value).swap_dims(1, 2);
        self.output.forward(mixed.reshape([batch, tokens, width]))
    }
}

/// Rotates `x` in f32: Burn's `RotaryEncoding` computes in the device's default dtype.
fn rotated(rope: &RotaryEncoding, x: Tensor<4>) -> Tensor<4> {
    let dtype = x.dtype();
    rope.forward(x.cast(DType::F32)).cast(dtype)
}

/// Repeats each shared head for the heads of queries that use it.
fn repeated(x: Tensor<4>) -> Tensor<4> {
    let [batch, heads, tokens, width] = x.dims();
    let times = HEADS / SHARED_HEADS;
    let x = x.unsqueeze_dim::<5>(2).repeat_dim(2, times);
    x.reshape([batch, heads * times, tokens, width])
}

#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    gated: SwiGlu,
    down: Linear,
}

impl FeedForward {
    fn new(device: &Device) -> Self {
        Self {
            gated: SwiGluConfig::new(WIDTH, HIDDEN).init(device),
            down: LinearConfig::new(HIDDEN, WIDTH).with_bias(false).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(self.gated.forward(x))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    norm: RmsNorm,
    feed_forward: FeedForward,
}

#[fsdp_unit]
impl Block {
    fn new(device: &Device) -> Self {
        let norm = || RmsNormConfig::new(WIDTH).init(device);
        Self {
            attention_norm: norm(),
            attention: Attention::new(device),
            norm: norm(),
            feed_forward: FeedForward::new(device),
        }
    }

    pub fn forward(
        &self,
        x: Tensor<3>,
        rope: &RotaryEncoding,
        mask: &Tensor<2, Bool>,
    ) -> Tensor<3> {
        let attended = self.attention.forward(self.attention_norm.forward(x.clone()), rope, mask);
        let x = x + attended;
        x.clone() + self.feed_forward.forward(self.norm.forward(x))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Llama {
    embedding: Embedding,
    pub blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
    pub rope: RotaryEncoding,
    mask: Tensor<2, Bool>,
}

#[fsdp_unit]
impl Llama {
    pub fn new(blocks: usize, device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            blocks: (0..blocks).map(|_| Block::new(device)).collect(),
            norm: RmsNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, VOCABULARY).with_bias(false).init(device),
            rope: RotaryEncodingConfig::new(TOKENS, WIDTH / HEADS).init(device),
            mask: Tensor::tril_mask([TOKENS, TOKENS], 0, device),
        }
    }

    /// Takes tokens of shape `[batch, tokens]`; returns logits of shape `[batch, tokens, VOCABULARY]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embedding.forward(tokens);
        let block = |x, block: &Block| block.forward(x, &self.rope, &self.mask);
        let x = self.blocks.iter().fold(x, block);
        self.head.forward(self.norm.forward(x))
    }
}
