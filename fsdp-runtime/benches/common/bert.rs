//! A BERT with a classifier, and rows to train it on.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use fsdp_runtime::nn::{
    AttentionOptions, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearActivation, LinearConfig, attention,
};
use fsdp_runtime::options::MixedPrecisionPolicy;
use fsdp_runtime::prelude::*;

/// Sizes of the model and of a rank's batch.
#[derive(Clone, Debug, clap::Args)]
pub struct Sizes {
    /// Rows on each rank.
    #[arg(long, default_value_t = 4)]
    pub batch: usize,
    /// Tokens a row.
    #[arg(long, default_value_t = 128)]
    pub length: usize,
    /// Width of the model.
    #[arg(long, default_value_t = 384)]
    pub hidden: usize,
    /// Number of layers.
    #[arg(long, default_value_t = 6)]
    pub layers: usize,
    /// Attention heads.
    #[arg(long, default_value_t = 12)]
    pub heads: usize,
    /// Width of the feed-forward part.
    #[arg(long, default_value_t = 1536)]
    pub inner: usize,
}

/// The policy of the comparison with PyTorch: products in bf16, reductions and the loss in f32.
pub const BF16: MixedPrecisionPolicy = MixedPrecisionPolicy::new()
    .with_param_dtype(FloatDType::BF16)
    .with_reduce_dtype(FloatDType::F32)
    .with_output_dtype(FloatDType::F32);

pub const VOCABULARY: usize = 30_522;
pub const POSITIONS: usize = 512;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    up: Linear,
    down: Linear,
    norm1: LayerNorm,
    norm2: LayerNorm,
    heads: usize,
}

#[fsdp_unit]
impl Layer {
    /// Runs the layer on the tokens of all rows, `[rows * length, hidden]`: one matrix product for
    /// all rows, as `torch.nn.Linear` computes it.
    pub fn forward(&self, x: Tensor<2>, length: usize) -> Tensor<2> {
        let [tokens, hidden] = x.dims();
        let (batch, width) = (tokens / length, hidden / self.heads);
        let heads = |x: Tensor<2>| x.reshape([batch, length, self.heads, width]).swap_dims(1, 2);
        let layers = [&self.query, &self.key, &self.value];
        let [query, key, value] = Linear::forward_each(layers, x.clone()).map(heads);
        let context = attention(query, key, value, AttentionOptions::new());
        let context = self.output.forward(context.swap_dims(1, 2).reshape([tokens, hidden]));
        let (_, x) = self.norm1.forward_residual(x, context);
        let inner = self.up.forward_activated(x.clone(), LinearActivation::Gelu);
        let (_, x) = self.norm2.forward_residual(x, self.down.forward(inner));
        x
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Bert {
    tokens: Embedding,
    positions: Embedding,
    norm: LayerNorm,
    layers: Vec<Layer>,
    classifier: Linear,
}

#[fsdp_unit]
impl Bert {
    pub fn forward(&self, ids: Tensor<2, Int>, positions: Tensor<2, Int>) -> Tensor<2> {
        let x = self.tokens.forward(ids) + self.positions.forward(positions);
        let [batch, length, hidden] = x.dims();
        let x = self.norm.forward(x.reshape([batch * length, hidden]));
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x, length));
        let x = x.reshape([batch, length, hidden]);
        self.classifier.forward(x.narrow(1, 0, 1).squeeze_dim(1))
    }
}

impl Bert {
    pub fn new(sizes: &Sizes, device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let norm = || LayerNormConfig::new(sizes.hidden).init(device);
        let layer = |_| Layer {
            query: linear(sizes.hidden, sizes.hidden),
            key: linear(sizes.hidden, sizes.hidden),
            value: linear(sizes.hidden, sizes.hidden),
            output: linear(sizes.hidden, sizes.hidden),
            up: linear(sizes.hidden, sizes.inner),
            down: linear(sizes.inner, sizes.hidden),
            norm1: norm(),
            norm2: norm(),
            heads: sizes.heads,
        };
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, sizes.hidden).init(device),
            positions: EmbeddingConfig::new(POSITIONS, sizes.hidden).init(device),
            norm: norm(),
            layers: (0..sizes.layers).map(layer).collect(),
            classifier: linear(sizes.hidden, 2),
        }
    }
}

/// The rows of one rank, the same in each step.
pub struct Batch {
    ids: Tensor<2, Int>,
    positions: Tensor<2, Int>,
    labels: Tensor<1, Int>,
}

impl Batch {
    pub fn new(sizes: &Sizes, rank: usize, device: &Device) -> Self {
        let shape = [sizes.batch, sizes.length];
        let id = |at: usize| ((at * 7919 + rank * 104_729) % 30_000) as i32;
        let ids: Vec<i32> = (0..sizes.batch * sizes.length).map(id).collect();
        let positions: Vec<i32> = (0..sizes.length as i32).collect();
        Self {
            ids: Tensor::from_data(TensorData::new(ids, shape), device),
            positions: Tensor::from_data(TensorData::new(positions, [1, sizes.length]), device),
            labels: Tensor::zeros([sizes.batch], device),
        }
    }

    pub fn loss(&self, model: &Bert) -> Tensor<1> {
        let logits = model.forward(self.ids.clone(), self.positions.clone());
        let device = logits.device();
        CrossEntropyLossConfig::new().init(&device).forward(logits, self.labels.clone())
    }
}
