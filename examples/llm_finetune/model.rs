//! Decoder of the Llama family, in plain Burn, with annotations for sharding.
//!
//! `#[fsdp_unit]` marks a unit: a module whose parameters are gathered with one all-gather. Here each
//! layer is a unit, and embedding, last norm and head belong to the outermost unit (`root`). `key` gives
//! the name of a parameter in a Hugging Face checkpoint. `tie(.., if_shared)` says that embedding and head
//! may be one parameter: [`ModelConfig::init`] decides, by `tie_word_embeddings` of `config.json`. `column`, `row`
//! and `vocab` say how tensor parallel ranks split matrices, and `shared` that they use a norm with parts. The rest
//! does not depend on FSDP: without the annotations the same code trains the model unsharded.

use burn::module::{Initializer, Module};
use burn::nn::loss::Reduction;
use burn::tensor::{Device, Int, Tensor};
use fsdp_runtime::nn::{
    AttentionOptions, Embedding, EmbeddingConfig, Linear, LinearConfig, LinearCrossEntropyOptions,
    LmHead, RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig, RotaryPairs, attention,
    swiglu,
};
use fsdp_runtime::prelude::*;

use crate::config::ModelConfig;
use crate::data::IGNORED;

/// Decoder that predicts the next token at every position.
#[derive(Module, Debug)]
#[fsdp_unit(root, tie("tokens" = "head", if_shared))]
pub struct CausalLm {
    #[fsdp(key = "model.embed_tokens", vocab)]
    tokens: Embedding,
    #[fsdp(key = "model.layers")]
    layers: Vec<DecoderLayer>,
    #[fsdp(key = "model.norm")]
    norm: RmsNorm,
    #[fsdp(key = "lm_head", vocab)]
    head: LmHead,
    rotary: RotaryEncoding,
}

/// Causal self-attention and a gated feed-forward block, each with a norm before it and a residual
/// connection.
#[derive(Module, Debug)]
#[fsdp_unit]
pub struct DecoderLayer {
    #[fsdp(key = "input_layernorm")]
    attention_norm: RmsNorm,
    #[fsdp(key = "self_attn")]
    attention: Attention,
    #[fsdp(key = "post_attention_layernorm")]
    norm: RmsNorm,
    #[fsdp(key = "mlp")]
    feed_forward: FeedForward,
}

/// Self-attention with grouped queries: several heads of queries share a head of keys and values.
#[derive(Module, FsdpModule, Debug)]
pub struct Attention {
    #[fsdp(key = "q_proj", column)]
    query: Linear,
    #[fsdp(key = "k_proj", column)]
    key: Linear,
    #[fsdp(key = "v_proj", column)]
    value: Linear,
    #[fsdp(key = "o_proj", row)]
    output: Linear,
    /// Norm of each head of the query; `None` but in Qwen 3.
    #[fsdp(key = "q_norm", shared)]
    query_norm: Option<RmsNorm>,
    /// Norm of each head of the key; `None` but in Qwen 3.
    #[fsdp(key = "k_norm", shared)]
    key_norm: Option<RmsNorm>,
    head_width: usize,
    /// Number of keys that a query sees at most.
    window: Option<usize>,
}

/// SwiGLU and a linear layer.
#[derive(Module, FsdpModule, Debug)]
pub struct FeedForward {
    #[fsdp(key = "gate_proj", column)]
    gate: Linear,
    #[fsdp(key = "up_proj", column)]
    up: Linear,
    #[fsdp(key = "down_proj", row)]
    down: Linear,
}

/// A batch of rows on a device.
#[derive(Clone, Debug)]
pub struct Rows {
    /// Token ids, `[rows, length]`.
    pub ids: Tensor<2, Int>,
    /// Position of each token in its conversation, `[rows, length]`.
    pub positions: Tensor<2, Int>,
    /// Which tokens a token may see: causal, and within its own conversation.
    pub sight: AttentionOptions,
}

/// Labels of the positions whose predictions count.
#[derive(Clone, Debug)]
pub struct Labels {
    /// Indices of the positions among `rows * length`, `[counted]`.
    pub at: Tensor<1, Int>,
    /// Id of the token that follows each of them, `[counted]`.
    pub ids: Tensor<1, Int>,
}

#[fsdp_unit]
impl CausalLm {
    /// Computes the logits of the next token at every position.
    ///
    /// # Shapes
    ///
    /// - `rows`: `[rows, length]`
    /// - output: `[rows * length, vocabulary]`
    pub fn forward(&self, rows: Rows) -> Tensor<2> {
        self.logits(self.hidden(rows))
    }

    /// Computes the sum of the losses at the positions that have a label. The others need no product with
    /// the head, and never all logits exist at once.
    ///
    /// # Shapes
    ///
    /// - `rows`: `[rows, length]`
    /// - `labels`: `[counted]`
    /// - output: `[1]`
    pub fn forward_loss(&self, rows: Rows, labels: Labels) -> Tensor<1> {
        let hidden = self.hidden(rows).select(0, labels.at);
        let options = LinearCrossEntropyOptions::new()
            .with_reduction(Reduction::Sum)
            .with_ignore_index(i64::from(IGNORED));
        self.head.cross_entropy(hidden, labels.ids, options)
    }
}

impl CausalLm {
    /// Computes the hidden values that the logits are made of, `[rows * length, width]`.
    fn hidden(&self, rows: Rows) -> Tensor<2> {
        let Rows { ids, positions, sight } = rows;
        let [count, length] = ids.dims();
        let x = self.layers.iter().fold(self.tokens.forward(ids), |x, layer| {
            layer.forward(x, positions.clone(), &self.rotary, &sight)
        });
        let [.., width] = x.dims();
        self.head.gather_sequence(self.norm.forward(x)).reshape([count * length, width])
    }

    fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
        self.head.forward(hidden)
    }

    /// Computes the logits of the token after `ids`, which follow those in the cache, and adds them to the
    /// cache.
    ///
    /// It is no forward of the sharded model: all units must be kept gathered.
    ///
    /// # Shapes
    ///
    /// - `ids`: `[1, length]`
    /// - output: `[1, vocabulary]`
    pub fn next_logits(&self, ids: Tensor<2, Int>, cache: &mut Cache) -> Tensor<2> {
        let [_, length] = ids.dims();
        let mut x = self.tokens.forward(ids);
        cache.layers.resize(self.layers.len(), None);
        for (layer, layer_cache) in self.layers.iter().zip(&mut cache.layers) {
            let rotate = |query, key| {
                (self.rotary.apply(query, cache.len), self.rotary.apply(key, cache.len))
            };
            let normed = layer.attention_norm.forward(x.clone());
            let causal = AttentionOptions::new().with_causal(true);
            let attended = layer.attention.forward(normed, rotate, &causal, Some(layer_cache));
            let (normed, residual) = layer.norm.forward_residual(attended, x);
            x = residual + layer.feed_forward.forward(normed);
        }
        cache.len += length;
        let last = x.narrow(1, length - 1, 1);
        let [.., width] = last.dims();
        self.logits(self.norm.forward(last).reshape([1, width]))
    }
}

/// Keys and values of the tokens so far, so that only those of new ones are computed.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    layers: Vec<Option<KeyValue>>,
    len: usize,
}

/// Keys and values of a layer, `[rows, key_heads, length, head_width]`.
type KeyValue = (Tensor<4>, Tensor<4>);

impl Cache {
    /// Returns the number of tokens so far.
    pub fn len(&self) -> usize {
        self.len
    }
}

#[fsdp_unit]
impl DecoderLayer {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - `x` and output: `[rows, length, width]`
    /// - `positions`: `[rows, length]`
    pub fn forward(
        &self,
        x: Tensor<3>,
        positions: Tensor<2, Int>,
        rotary: &RotaryEncoding,
        sight: &AttentionOptions,
    ) -> Tensor<3> {
        let rotate = |query, key| rotary.forward_query_key(query, key, Some(positions.clone()));
        let normed = self.attention_norm.forward(x.clone());
        let attended = self.attention.forward(normed, rotate, sight, None);
        let (normed, residual) = self.norm.forward_residual(attended, x);
        residual + self.feed_forward.forward(normed)
    }
}

impl Attention {
    /// Applies the attention. With a cache, `x` follows the tokens in it, and is added to it.
    ///
    /// # Shapes
    ///
    /// - `x` and output: `[rows, length, width]`
    fn forward(
        &self,
        x: Tensor<3>,
        rotate: impl Fn(Tensor<4>, Tensor<4>) -> (Tensor<4>, Tensor<4>),
        sight: &AttentionOptions,
        cache: Option<&mut Option<KeyValue>>,
    ) -> Tensor<3> {
        let width = self.head_width as i32;
        let layers = [&self.query, &self.key, &self.value];
        let [query, key, mut value] = Linear::forward_each(layers, x).map(|x| {
            // Under sequence parallel `x` had a part of the length.
            let [rows, length, _] = x.dims().map(|size| size as i32);
            x.reshape([rows, length, -1, width]).swap_dims(1, 2)
        });
        let (query, mut key) = rotate(normed(&self.query_norm, query), normed(&self.key_norm, key));
        if let Some(cache) = cache {
            if let Some((keys, values)) = cache.take() {
                key = Tensor::cat(vec![keys, key], 2);
                value = Tensor::cat(vec![values, value], 2);
            }
            *cache = Some((key.clone(), value.clone()));
        }
        let sight = match self.window {
            Some(keys) => sight.clone().with_window(keys),
            None => sight.clone(),
        };
        let context = attention(query, key, value, sight);
        let [rows, _, length, _] = context.dims().map(|size| size as i32);
        self.output.forward(context.swap_dims(1, 2).reshape([rows, length, -1]))
    }
}

/// Normalizes each head, if there is a norm.
fn normed(norm: &Option<RmsNorm>, heads: Tensor<4>) -> Tensor<4> {
    match norm {
        Some(norm) => norm.forward(heads),
        None => heads,
    }
}

impl FeedForward {
    /// Applies the block.
    ///
    /// # Shapes
    ///
    /// - `x` and output: `[rows, length, width]`
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [gate, up] = Linear::forward_each([&self.gate, &self.up], x);
        self.down.forward(swiglu(gate, up))
    }
}

impl ModelConfig {
    /// Builds the model. Matrices are initialised from a normal distribution of `initializer_range`, as in
    /// transformers, and biases with zeros. The initialisation is lazy: `fully_shard` runs it for one
    /// parameter after another, and `from_pretrained` not at all.
    ///
    /// `positions` is the largest number of tokens in a row.
    pub fn init(&self, positions: usize, device: &Device) -> CausalLm {
        let embedding = || -> Embedding {
            EmbeddingConfig::new(self.vocab_size, self.hidden_size)
                .with_initializer(self.initializer())
                .with_padding_idx(self.pad_token_id)
                .init(device)
        };
        let tokens = embedding();
        let head =
            if self.tie_word_embeddings { tokens.weight.clone() } else { embedding().weight };
        let rotary = RotaryEncodingConfig::new(positions, self.head_dim)
            .with_theta(self.rope_theta)
            .with_pairs(RotaryPairs::Halves)
            .with_scaling(self.rope_scaling.clone());
        CausalLm {
            tokens,
            layers: (0..self.num_hidden_layers).map(|at| self.layer(at, device)).collect(),
            norm: self.norm(self.hidden_size, device),
            head: LmHead { weight: head },
            rotary: rotary.init(device),
        }
    }

    fn layer(&self, at: usize, device: &Device) -> DecoderLayer {
        let (width, wide) = (self.hidden_size, self.intermediate_size);
        let queries = self.num_attention_heads * self.head_dim;
        let keys = self.num_key_value_heads * self.head_dim;
        let linear = |from, to, bias: bool| {
            let linear = LinearConfig::new(from, to).with_bias(false);
            let linear = linear.with_initializer(self.initializer()).init(device);
            Linear { bias: bias.then(|| Initializer::Zeros.init([to], device)), ..linear }
        };
        let head_norm = || self.has_head_norms().then(|| self.norm(self.head_dim, device));
        let bias = self.has_projection_bias();
        DecoderLayer {
            attention_norm: self.norm(width, device),
            attention: Attention {
                query: linear(width, queries, bias),
                key: linear(width, keys, bias),
                value: linear(width, keys, bias),
                output: linear(queries, width, false),
                query_norm: head_norm(),
                key_norm: head_norm(),
                head_width: self.head_dim,
                window: self.window(at),
            },
            norm: self.norm(width, device),
            feed_forward: FeedForward {
                gate: linear(width, wide, false),
                up: linear(width, wide, false),
                down: linear(wide, width, false),
            },
        }
    }

    fn norm(&self, width: usize, device: &Device) -> RmsNorm {
        RmsNormConfig::new(width).with_epsilon(self.rms_norm_eps).init(device)
    }

    fn initializer(&self) -> Initializer {
        Initializer::Normal { mean: 0.0, std: self.initializer_range }
    }
}
