//! BERT for sentence classification, in plain Burn, with annotations for sharding.
//!
//! `#[fsdp_unit]` marks a unit: a module whose parameters are gathered with one all-gather. `key`
//! gives the name of a parameter in a Hugging Face checkpoint. The rest does not depend on FSDP:
//! without the annotations the same code trains the model unsharded.
//!
//! The dropout is the one of `fsdp_runtime`, whose masks are reproducible if ranks are threads. So are
//! the attention, which keeps no matrix of scores for backward, and layer norm and linear layers, which
//! are faster than Burn's on a CPU.

use burn::module::{Initializer, Module};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use fsdp_runtime::nn::{
    AttentionOptions, Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm,
    LayerNormConfig, Linear, LinearActivation, LinearConfig, attention,
};
use fsdp_runtime::prelude::*;

use crate::batch::Padded;
use crate::bert_config::{BertConfig, HiddenAct};

/// BERT with a linear classifier on the pooled hidden state of the first position. The outermost
/// unit.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct BertForSequenceClassification {
    #[fsdp(key = "bert.embeddings")]
    embeddings: BertEmbeddings,
    #[fsdp(key = "bert.encoder")]
    encoder: BertEncoder,
    #[fsdp(key = "bert.pooler.dense")]
    pooler: Linear,
    dropout: Dropout,
    classifier: Linear,
}

/// Sum of word, position and token type embeddings, with layer normalization and dropout.
#[derive(Module, Debug)]
#[fsdp_unit]
pub struct BertEmbeddings {
    #[fsdp(key = "word_embeddings")]
    word: Embedding,
    #[fsdp(key = "position_embeddings")]
    position: Embedding,
    #[fsdp(key = "token_type_embeddings")]
    token_type: Embedding,
    #[fsdp(key = "LayerNorm")]
    norm: LayerNorm,
    dropout: Dropout,
}

/// Encoder layers in sequence. Not a unit: each layer is.
#[derive(Module, FsdpModule, Debug)]
pub struct BertEncoder {
    #[fsdp(key = "layer")]
    layers: Vec<BertLayer>,
}

/// Encoder layer: self-attention and a feed-forward block, each with a residual connection and
/// layer normalization after it.
#[derive(Module, Debug)]
#[fsdp_unit]
pub struct BertLayer {
    attention: BertAttention,
    #[fsdp(key = "intermediate.dense")]
    up: Linear,
    #[module(skip)]
    activation: HiddenAct,
    #[fsdp(key = "output.dense")]
    down: Linear,
    #[fsdp(key = "output.LayerNorm")]
    norm: LayerNorm,
    dropout: Dropout,
}

/// Multi-head self-attention with a residual connection and layer normalization.
#[derive(Module, FsdpModule, Debug)]
pub struct BertAttention {
    #[fsdp(key = "self.query")]
    query: Linear,
    #[fsdp(key = "self.key")]
    key: Linear,
    #[fsdp(key = "self.value")]
    value: Linear,
    #[fsdp(key = "output.dense")]
    output: Linear,
    #[fsdp(key = "output.LayerNorm")]
    norm: LayerNorm,
    attention_dropout: Dropout,
    dropout: Dropout,
    heads: usize,
}

/// Batch on a device.
#[derive(Clone, Debug)]
pub struct BertInput {
    /// Word-piece ids, `[batch, length]`.
    pub ids: Tensor<2, Int>,
    /// Token types, `[batch, length]`.
    pub types: Tensor<2, Int>,
    /// Whether a position is padding, `[batch, length]`; `None` if no position is.
    pub padding: Option<Tensor<2, Bool>>,
    /// Classes, `[batch]`.
    pub labels: Tensor<1, Int>,
}

impl BertInput {
    /// Copies a batch to a device.
    pub fn new(batch: Padded, device: &Device) -> Self {
        let [rows, length] = batch.shape;
        let padding = batch.is_padded().then(|| {
            let data = TensorData::new(batch.padding, [rows, length]);
            Tensor::from_data(data, device)
        });
        Self {
            ids: Tensor::from_data(TensorData::new(batch.ids, batch.shape), device),
            types: Tensor::from_data(TensorData::new(batch.types, batch.shape), device),
            padding,
            labels: Tensor::from_data(TensorData::new(batch.labels, [rows]), device),
        }
    }
}

#[fsdp_unit]
impl BertForSequenceClassification {
    /// Computes a logit per class for each row.
    ///
    /// # Shapes
    ///
    /// - `ids`, `types`: `[batch, length]`
    /// - `padding`: `[batch, length]`
    /// - output: `[batch, classes]`
    pub fn forward(
        &self,
        ids: Tensor<2, Int>,
        types: Tensor<2, Int>,
        padding: Option<Tensor<2, Bool>>,
    ) -> Tensor<2> {
        let hidden = self.embeddings.forward(ids, types);
        let hidden = self.encoder.forward(hidden, padding);
        let first = hidden.narrow(1, 0, 1).squeeze_dim(1);
        let pooled = self.pooler.forward(first).tanh();
        self.classifier.forward(self.dropout.forward(pooled))
    }
}

#[fsdp_unit]
impl BertEmbeddings {
    /// Embeds word pieces.
    ///
    /// # Shapes
    ///
    /// - `ids`, `types`: `[batch, length]`
    /// - output: `[batch, length, hidden]`
    pub fn forward(&self, ids: Tensor<2, Int>, types: Tensor<2, Int>) -> Tensor<3> {
        let [_, length] = ids.dims();
        let positions = Tensor::arange(0..length as i64, &ids.device()).unsqueeze();
        let sum = self.word.forward(ids)
            + self.position.forward(positions)
            + self.token_type.forward(types);
        self.dropout.forward(self.norm.forward(sum))
    }
}

impl BertEncoder {
    /// Applies the layers.
    ///
    /// # Shapes
    ///
    /// - `hidden` and output: `[batch, length, hidden]`
    /// - `padding`: `[batch, length]`
    pub fn forward(&self, hidden: Tensor<3>, padding: Option<Tensor<2, Bool>>) -> Tensor<3> {
        let layers = self.layers.iter();
        layers.fold(hidden, |hidden, layer| layer.forward(hidden, padding.clone()))
    }
}

#[fsdp_unit]
impl BertLayer {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - `hidden` and output: `[batch, length, hidden]`
    /// - `padding`: `[batch, length]`
    pub fn forward(&self, hidden: Tensor<3>, padding: Option<Tensor<2, Bool>>) -> Tensor<3> {
        let hidden = self.attention.forward(hidden, padding);
        let wide = self.up.forward_activated(hidden.clone(), self.activation.into());
        let narrow = self.dropout.forward(self.down.forward(wide));
        self.norm.forward_residual(narrow, hidden).0
    }
}

impl BertAttention {
    /// Applies the attention.
    ///
    /// # Shapes
    ///
    /// - `hidden` and output: `[batch, length, hidden]`
    /// - `padding`: `[batch, length]`
    pub fn forward(&self, hidden: Tensor<3>, padding: Option<Tensor<2, Bool>>) -> Tensor<3> {
        let [batch, length, width] = hidden.dims();
        let head_width = width / self.heads;
        let layers = [&self.query, &self.key, &self.value];
        let [query, key, value] = Linear::forward_each(layers, hidden.clone()).map(|projected| {
            projected.reshape([batch, length, self.heads, head_width]).swap_dims(1, 2)
        });
        let mut options = AttentionOptions::new().with_dropout(&self.attention_dropout);
        if let Some(padding) = padding {
            options = options.with_padding_mask(padding);
        }
        let context = attention(query, key, value, options);
        let context = context.swap_dims(1, 2).reshape([batch, length, width]);
        let context = self.dropout.forward(self.output.forward(context));
        self.norm.forward_residual(context, hidden).0
    }
}

impl From<HiddenAct> for LinearActivation {
    fn from(activation: HiddenAct) -> Self {
        match activation {
            HiddenAct::Gelu => Self::Gelu,
            HiddenAct::GeluTanh => Self::GeluTanh,
            HiddenAct::Relu => Self::Relu,
        }
    }
}

impl BertConfig {
    /// Builds the model. Matrices are initialised from a normal distribution, as in BERT. The
    /// initialisation is lazy: `fully_shard` runs it for one parameter after another.
    pub fn init(&self, classes: usize, device: &Device) -> BertForSequenceClassification {
        let init = Init { config: self, device };
        BertForSequenceClassification {
            embeddings: BertEmbeddings {
                word: init.embedding(self.vocab_size),
                position: init.embedding(self.max_position_embeddings),
                token_type: init.embedding(self.type_vocab_size),
                norm: init.norm(),
                dropout: init.dropout(),
            },
            encoder: BertEncoder {
                layers: (0..self.num_hidden_layers).map(|_| init.layer()).collect(),
            },
            pooler: init.linear(self.hidden_size, self.hidden_size),
            dropout: init.dropout(),
            classifier: init.linear(self.hidden_size, classes),
        }
    }
}

/// Builds the modules of a model.
struct Init<'a> {
    config: &'a BertConfig,
    device: &'a Device,
}

impl Init<'_> {
    fn layer(&self) -> BertLayer {
        let BertConfig { hidden_size: hidden, intermediate_size: wide, hidden_act, .. } =
            *self.config;
        BertLayer {
            attention: BertAttention {
                query: self.linear(hidden, hidden),
                key: self.linear(hidden, hidden),
                value: self.linear(hidden, hidden),
                output: self.linear(hidden, hidden),
                norm: self.norm(),
                attention_dropout: DropoutConfig::new(self.config.attention_probs_dropout_prob)
                    .init(),
                dropout: self.dropout(),
                heads: self.config.num_attention_heads,
            },
            up: self.linear(hidden, wide),
            activation: hidden_act,
            down: self.linear(wide, hidden),
            norm: self.norm(),
            dropout: self.dropout(),
        }
    }

    fn embedding(&self, rows: usize) -> Embedding {
        EmbeddingConfig::new(rows, self.config.hidden_size)
            .with_initializer(self.matrix())
            .init(self.device)
    }

    fn linear(&self, from: usize, to: usize) -> Linear {
        let linear = LinearConfig::new(from, to).with_initializer(self.matrix()).init(self.device);
        Linear { bias: Some(Initializer::Zeros.init([to], self.device)), ..linear }
    }

    fn norm(&self) -> LayerNorm {
        LayerNormConfig::new(self.config.hidden_size)
            .with_epsilon(self.config.layer_norm_eps)
            .init(self.device)
    }

    fn dropout(&self) -> Dropout {
        DropoutConfig::new(self.config.hidden_dropout_prob).init()
    }

    fn matrix(&self) -> Initializer {
        Initializer::Normal { mean: 0.0, std: self.config.initializer_range }
    }
}

#[cfg(test)]
mod tests {
    use fsdp_runtime::__private::{Child, Kind, Node};

    use super::*;
    use crate::batch::Padding;
    use crate::common::device::DeviceName;
    use crate::tokenizer::Encoded;

    fn model() -> (BertForSequenceClassification, Device) {
        let device = DeviceName::Auto.resolve().unwrap();
        let config = BertConfig {
            hidden_size: 16,
            num_attention_heads: 4,
            intermediate_size: 32,
            initializer_range: 0.5,
            ..BertConfig::small(20, 12)
        };
        (config.init(3, &device), device)
    }

    fn logits(model: &BertForSequenceClassification, device: &Device, rows: &[usize]) -> Vec<f32> {
        let example =
            |ids: &[u32]| Encoded { ids: ids.to_vec(), types: vec![0; ids.len()], label: 0 };
        let examples = [example(&[2, 7, 8, 3]), example(&[2, 9, 4, 11, 12, 13, 14, 15, 3])];
        let padded = Padded::new(&examples, rows, Padding::to_longest(0));
        let input = BertInput::new(padded, device);
        let logits = model.forward(input.ids, input.types, input.padding);
        assert_eq!(logits.dims(), [rows.len(), 3]);
        logits.into_data().try_into_vec_as().unwrap()
    }

    #[test]
    fn padding_changes_no_logit() {
        let (model, device) = model();
        let (alone, together) = (logits(&model, &device, &[0]), logits(&model, &device, &[0, 1]));
        for (one, other) in alone.iter().zip(&together) {
            assert!((one - other).abs() < 1e-4, "{alone:?} {together:?}");
        }
        assert!(alone.iter().any(|score| score.abs() > 1e-3), "{alone:?}");
    }

    /// Returns the checkpoint key of every parameter below `node`, with `{}` for the index in a
    /// list.
    fn keys(node: &Node, prefix: &str) -> Vec<String> {
        if matches!(node.kind, Kind::Param { .. }) {
            return vec![prefix.to_string()];
        }
        let below = |child: &Child| {
            let segment = if node.kind == Kind::List { "{}" } else { child.key_or_name() };
            let segments = [prefix, segment].into_iter().filter(|segment| !segment.is_empty());
            keys(child.node, &segments.collect::<Vec<_>>().join("."))
        };
        node.children.iter().flat_map(below).collect()
    }

    #[test]
    fn parameters_have_their_hugging_face_names() {
        let embeddings = ["word_embeddings", "position_embeddings", "token_type_embeddings"];
        let sublayers = [
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
            "attention.output.LayerNorm",
            "intermediate.dense",
            "output.dense",
            "output.LayerNorm",
        ];
        let both = |module: String| ["weight", "bias"].map(|name| format!("{module}.{name}"));
        let mut expected: Vec<_> =
            embeddings.map(|name| format!("bert.embeddings.{name}.weight")).into();
        expected.extend(both("bert.embeddings.LayerNorm".into()));
        expected.extend(
            sublayers.into_iter().flat_map(|name| both(format!("bert.encoder.layer.{{}}.{name}"))),
        );
        expected.extend(both("bert.pooler.dense".into()));
        expected.extend(both("classifier".into()));
        let layout = &<BertForSequenceClassification as FsdpModule>::LAYOUT;
        assert_eq!(keys(layout, ""), expected);
    }
}
