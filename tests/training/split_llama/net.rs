//! A Llama of two blocks, whose matrices and rows ranks split, and rows to train it on.

use burn::module::Module;
use burn::nn::loss::Reduction;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_runtime::nn::{
    AttentionOptions, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear, LinearActivation,
    LinearConfig, LinearCrossEntropyOptions, LmHead, LmHeadConfig, RmsNorm, RmsNormConfig,
    RotaryEncoding, RotaryEncodingConfig, attention, swiglu,
};
use fsdp_runtime::prelude::*;

pub(crate) const WORDS: usize = 40;
pub(crate) const HIDDEN: usize = 32;
pub(crate) const HEADS: usize = 16;
pub(crate) const KEY_HEADS: usize = 8;
pub(crate) const HEAD_WIDTH: usize = 8;
pub(crate) const WIDE: usize = 48;
pub(crate) const ROWS: usize = 8;
pub(crate) const LENGTH: usize = 16;
/// Word without a loss.
pub(crate) const IGNORED: i64 = 7;

/// Attention with grouped queries. Each rank has a part of the heads.
#[derive(Module, FsdpModule, Debug)]
pub(crate) struct Attention {
    #[fsdp(column)]
    query: Linear,
    #[fsdp(column)]
    key: Linear,
    #[fsdp(column)]
    value: Linear,
    #[fsdp(row)]
    output: Linear,
    /// Norm of each head, as in Qwen 3.
    #[fsdp(shared)]
    head_norm: RmsNorm,
    /// Dropout of the weights.
    #[fsdp(column)]
    dropout: Dropout,
}

impl Attention {
    pub(crate) fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            query: linear(HIDDEN, HEADS * HEAD_WIDTH),
            key: linear(HIDDEN, KEY_HEADS * HEAD_WIDTH),
            value: linear(HIDDEN, KEY_HEADS * HEAD_WIDTH),
            output: linear(HEADS * HEAD_WIDTH, HIDDEN),
            head_norm: RmsNormConfig::new(HEAD_WIDTH).init(device),
            dropout: dropout(),
        }
    }

    pub(crate) fn forward(
        &self,
        x: Tensor<3>,
        rotary: &RotaryEncoding,
        sight: &AttentionOptions,
    ) -> Tensor<3> {
        let heads = |x: Tensor<3>| {
            let [rows, length, width] = x.dims();
            x.reshape([rows, length, width / HEAD_WIDTH, HEAD_WIDTH]).swap_dims(1, 2)
        };
        let [query, key, value] = Linear::forward_each([&self.query, &self.key, &self.value], x);
        let [query, key, value] = [query, key, value].map(heads);
        let [query, key] = [query, key].map(|heads| self.head_norm.forward(heads));
        let (query, key) = (rotary.forward(query), rotary.forward(key));
        let options = sight.clone().with_dropout(&self.dropout);
        let mixed = attention(query, key, value, options).swap_dims(1, 2);
        let [rows, length, heads, _] = mixed.dims();
        self.output.forward(mixed.reshape([rows, length, heads * HEAD_WIDTH]))
    }
}

/// A gated feed-forward block, and one with an activation in the sum.
#[derive(Module, FsdpModule, Debug)]
pub(crate) struct FeedForward {
    #[fsdp(column)]
    gate: Linear,
    #[fsdp(column)]
    up: Linear,
    #[fsdp(column)]
    dropout: Dropout,
    #[fsdp(row)]
    down: Linear,
    #[fsdp(column, gather)]
    last: Linear,
}

/// Returns dropout that drops nothing.
fn dropout() -> Dropout {
    DropoutConfig::new(0.0).init()
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub(crate) struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    norm: RmsNorm,
    feed_forward: FeedForward,
    /// Dropout of whole values.
    dropout: Dropout,
}

#[fsdp_unit]
impl Block {
    pub(crate) fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let norm = || RmsNormConfig::new(HIDDEN).init(device);
        Self {
            attention_norm: norm(),
            attention: Attention::new(device),
            norm: norm(),
            feed_forward: FeedForward {
                gate: linear(HIDDEN, WIDE),
                up: linear(HIDDEN, WIDE),
                dropout: dropout(),
                down: linear(WIDE, HIDDEN),
                last: LinearConfig::new(HIDDEN, HIDDEN).with_bias(false).init(device),
            },
            dropout: dropout(),
        }
    }

    pub(crate) fn forward(
        &self,
        x: Tensor<3>,
        rotary: &RotaryEncoding,
        sight: &AttentionOptions,
    ) -> Tensor<3> {
        let normed = self.attention_norm.forward(x.clone());
        let x = x + self.dropout.forward(self.attention.forward(normed, rotary, sight));
        let FeedForward { gate, up, dropout, down, last } = &self.feed_forward;
        let [gated, value] = Linear::forward_each([gate, up], self.norm.forward(x.clone()));
        let hidden = dropout.forward(swiglu(gated, value));
        let hidden = down.forward_activated(hidden, LinearActivation::Gelu);
        x + self.dropout.forward(last.forward(hidden))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root, tie("words" = "head", if_shared))]
pub(crate) struct Net {
    #[fsdp(vocab)]
    words: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    #[fsdp(vocab)]
    head: LmHead,
    rotary: RotaryEncoding,
    dropout: Dropout,
}

#[fsdp_unit]
impl Net {
    pub(crate) fn new(tied: bool, device: &Device) -> Self {
        let words = EmbeddingConfig::new(WORDS, HIDDEN).init(device);
        let head = match tied {
            true => LmHead { weight: words.weight.clone() },
            false => LmHeadConfig::new(HIDDEN, WORDS).init(device),
        };
        Self {
            words,
            blocks: (0..2).map(|_| Block::new(device)).collect(),
            norm: RmsNormConfig::new(HIDDEN).init(device),
            head,
            rotary: RotaryEncodingConfig::new(LENGTH + 1, HEAD_WIDTH).init(device),
            dropout: dropout(),
        }
    }

    /// Returns the model with dropout of whole values, of values that ranks split, and of attention weights.
    pub(crate) fn with_dropout(mut self, prob: f64) -> Self {
        self.dropout.prob = prob;
        for block in &mut self.blocks {
            let layers =
                [&mut block.dropout, &mut block.attention.dropout, &mut block.feed_forward.dropout];
            layers.into_iter().for_each(|layer| layer.prob = prob);
        }
        self
    }

    fn hidden(&self, ids: Tensor<2, Int>, sight: &AttentionOptions) -> Tensor<2> {
        let x = self.dropout.forward(self.words.forward(ids));
        let block = |x, block: &Block| block.forward(x, &self.rotary, sight);
        let x = self.blocks.iter().fold(x, block);
        self.head.gather_sequence(self.norm.forward(x)).flatten(0, 1)
    }

    pub(crate) fn forward(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        self.head.forward(self.hidden(ids, &AttentionOptions::new().with_causal(true)))
    }

    pub(crate) fn forward_loss(
        &self,
        ids: Tensor<2, Int>,
        targets: Tensor<1, Int>,
        sight: AttentionOptions,
    ) -> Tensor<1> {
        let options = LinearCrossEntropyOptions::new()
            .with_chunk_rows(5)
            .with_ignore_index(IGNORED)
            .with_label_smoothing(0.1)
            .with_reduction(Reduction::Sum);
        self.head.cross_entropy(self.hidden(ids, &sight), targets, options)
    }
}

/// Returns rows of words with the word after each row's last, `[rows, LENGTH + 1]`.
pub(crate) fn ids(step: usize, rows: std::ops::Range<usize>, device: &Device) -> Tensor<2, Int> {
    let id =
        |row: usize, at: usize| ((step * 31 + row * 7 + at * at * 5 + row * at) % WORDS) as i32;
    let all: Vec<i32> =
        rows.clone().flat_map(|row| (0..LENGTH + 1).map(move |at| id(row, at))).collect();
    Tensor::from_data(TensorData::new(all, [rows.len(), LENGTH + 1]), device)
}
