//! Configuration of a BERT model: read from a Hugging Face `config.json`, or the small default.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// Configuration of a BERT model, with the field names of Hugging Face's `config.json`. Other
/// fields of that file are ignored.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct BertConfig {
    /// Architecture. Only `bert` is supported. Default `bert`.
    #[serde(default = "bert")]
    pub model_type: String,
    /// Number of rows of the word embedding.
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Number of encoder layers.
    pub num_hidden_layers: usize,
    /// Number of attention heads; a divisor of `hidden_size`.
    pub num_attention_heads: usize,
    /// Width between the two linear layers of the feed-forward block.
    pub intermediate_size: usize,
    /// Number of rows of the position embedding: the length of the longest input.
    pub max_position_embeddings: usize,
    /// Number of rows of the token type embedding. Default 2: the segments of a sentence pair.
    #[serde(default = "two")]
    pub type_vocab_size: usize,
    /// Activation function of the feed-forward block. Default GELU.
    #[serde(default)]
    pub hidden_act: HiddenAct,
    /// Kind of position embedding. Only `absolute` is supported. Default `absolute`.
    #[serde(default = "absolute")]
    pub position_embedding_type: String,
    /// Dropout probability of the embeddings and of each sublayer's output. Default 0.1.
    #[serde(default = "tenth")]
    pub hidden_dropout_prob: f64,
    /// Dropout probability of the attention probabilities. Default 0.1.
    #[serde(default = "tenth")]
    pub attention_probs_dropout_prob: f64,
    /// Number added to the variance in every layer norm. Default 1e-12.
    #[serde(default = "epsilon")]
    pub layer_norm_eps: f64,
    /// Standard deviation of the initial matrices. Default 0.02.
    #[serde(default = "fiftieth")]
    pub initializer_range: f64,
}

/// Activation function between the two linear layers of the feed-forward block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum HiddenAct {
    /// Exact GELU, computed with the error function.
    #[default]
    #[serde(rename = "gelu")]
    Gelu,
    /// GELU approximated with the hyperbolic tangent.
    #[serde(rename = "gelu_new", alias = "gelu_pytorch_tanh")]
    GeluTanh,
    /// ReLU: `max(x, 0)`.
    #[serde(rename = "relu")]
    Relu,
}

fn bert() -> String {
    "bert".into()
}

fn absolute() -> String {
    "absolute".into()
}

fn two() -> usize {
    2
}

fn tenth() -> f64 {
    0.1
}

fn fiftieth() -> f64 {
    0.02
}

fn epsilon() -> f64 {
    1e-12
}

impl BertConfig {
    /// Returns a configuration small enough to train from scratch on two CPU cores in minutes.
    pub fn small(vocab_size: usize, max_length: usize) -> Self {
        Self {
            model_type: bert(),
            vocab_size,
            hidden_size: 128,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            intermediate_size: 512,
            max_position_embeddings: max_length,
            type_vocab_size: 2,
            hidden_act: HiddenAct::Gelu,
            position_embedding_type: absolute(),
            hidden_dropout_prob: 0.1,
            attention_probs_dropout_prob: 0.1,
            layer_norm_eps: 1e-12,
            // From the usual 0.02 a model of this size starts to learn late and unevenly.
            initializer_range: 0.05,
        }
    }

    /// Reads and checks a `config.json`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is not valid JSON, lacks a field or describes an unsupported
    /// model. The message names the file and the field.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the model's configuration {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("wrong model configuration {}", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let config: Self = serde_json::from_str(text)?;
        config.check()?;
        Ok(config)
    }

    /// Sets both dropout probabilities, if one is given.
    #[must_use]
    pub fn with_dropout(mut self, probability: Option<f64>) -> Self {
        if let Some(probability) = probability {
            self.hidden_dropout_prob = probability;
            self.attention_probs_dropout_prob = probability;
        }
        self
    }

    /// Checks that the embeddings have a row for each of `tokens` word pieces and `max_length`
    /// positions.
    ///
    /// # Errors
    ///
    /// If either embedding has too few rows.
    pub fn check_input(&self, tokens: usize, max_length: usize) -> Result<()> {
        ensure!(
            tokens <= self.vocab_size,
            "the tokenizer has {tokens} word pieces, the model only {} (`vocab_size`); \
             are they from the same directory?",
            self.vocab_size
        );
        ensure!(
            max_length <= self.max_position_embeddings,
            "--max-length {max_length} is beyond the model's {} positions \
             (`max_position_embeddings`)",
            self.max_position_embeddings
        );
        Ok(())
    }

    fn check(&self) -> Result<()> {
        ensure!(
            self.model_type == "bert",
            "`model_type` is `{}`; this example supports `bert`",
            self.model_type
        );
        ensure!(
            self.position_embedding_type == "absolute",
            "`position_embedding_type` is `{}`; this example supports `absolute`",
            self.position_embedding_type
        );
        for (name, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("intermediate_size", self.intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            ensure!(value > 0, "`{name}` is 0");
        }
        ensure!(
            self.type_vocab_size >= 2,
            "`type_vocab_size` is {}; sentence pairs need 2",
            self.type_vocab_size
        );
        ensure!(
            self.hidden_size.is_multiple_of(self.num_attention_heads),
            "`hidden_size` {} is not a multiple of `num_attention_heads` {}",
            self.hidden_size,
            self.num_attention_heads
        );
        for (name, value) in [
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
        ] {
            ensure!((0.0..1.0).contains(&value), "`{name}` is {value}; it must lie in [0, 1)");
        }
        for (name, value) in
            [("layer_norm_eps", self.layer_norm_eps), ("initializer_range", self.initializer_range)]
        {
            ensure!(value > 0.0 && value.is_finite(), "`{name}` is {value}; it must be above 0");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(field: &str, value: serde_json::Value) -> Result<BertConfig> {
        let mut json = serde_json::json!({
            "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 30522,
            "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
            "intermediate_size": 1536, "max_position_embeddings": 512, "type_vocab_size": 2,
            "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0
        });
        json[field] = value;
        BertConfig::parse(&json.to_string())
    }

    #[test]
    fn reads_hugging_face_names() {
        let config = with("hidden_act", "relu".into()).unwrap();
        assert_eq!((config.hidden_size, config.num_attention_heads), (384, 12));
        assert_eq!(config.hidden_act, HiddenAct::Relu);
        assert_eq!(config.hidden_dropout_prob, 0.1);
    }

    #[test]
    fn every_wrong_field_is_named() {
        for (field, value) in [
            ("model_type", serde_json::json!("roberta")),
            ("position_embedding_type", serde_json::json!("relative_key")),
            ("num_attention_heads", serde_json::json!(7)),
            ("hidden_size", serde_json::json!(0)),
            ("hidden_dropout_prob", serde_json::json!(1.5)),
            ("layer_norm_eps", serde_json::json!(-1.0)),
            ("type_vocab_size", serde_json::json!(1)),
        ] {
            let message = format!("{:#}", with(field, value).unwrap_err());
            assert!(message.contains(field), "{field}: {message}");
        }
    }

    #[test]
    fn an_unknown_activation_or_a_missing_field_is_an_error() {
        let message = format!("{:#}", with("hidden_act", "mish".into()).unwrap_err());
        assert!(message.contains("mish") && message.contains("gelu_new"), "{message}");
        let message = format!("{:#}", BertConfig::parse("{\"hidden_size\": 8}").unwrap_err());
        assert!(message.contains("vocab_size"), "{message}");
    }

    #[test]
    fn input_must_fit_the_embeddings() {
        let config = BertConfig::small(100, 64);
        assert!(config.check().is_ok());
        assert!(config.check_input(100, 64).is_ok());
        assert!(config.check_input(101, 64).is_err());
        assert!(config.check_input(100, 65).is_err());
    }
}
