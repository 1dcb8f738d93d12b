//! `config.json` of a Hugging Face model: `model_type` llama, mistral, qwen2 and qwen3.
//!
//! A key that the model here does not have in transformers either is ignored, as transformers ignores it. A
//! setting that would change a number and that this program does not have is an error.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fsdp_runtime::nn::RotaryScaling;
use serde_json::Value;

/// Kind of model: the `model_type` of transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelType {
    /// Llama, and the many models with its architecture.
    Llama,
    /// Mistral: Llama, with an optional sliding window in all layers.
    Mistral,
    /// Qwen 2 and 2.5: Llama, with biases of query, key and value.
    Qwen2,
    /// Qwen 3: Llama, with norms of the heads of query and key.
    Qwen3,
}

/// Names of the supported kinds.
const MODEL_TYPES: [(&str, ModelType); 4] = [
    ("llama", ModelType::Llama),
    ("mistral", ModelType::Mistral),
    ("qwen2", ModelType::Qwen2),
    ("qwen3", ModelType::Qwen3),
];

/// A setting of `config.json` that this program does not have.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{file}: `{key}` is {value}; {expected}")]
pub struct ConfigError {
    /// Path of the file.
    pub file: String,
    /// Name of the setting.
    pub key: String,
    /// Its value, as JSON.
    pub value: String,
    /// What would be right.
    pub expected: String,
}

/// Sizes and settings of a model. Fields have the names of `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Kind of model.
    pub model_type: ModelType,
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width within the feed-forward block.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of heads of queries.
    pub num_attention_heads: usize,
    /// Number of heads of keys and values.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Maximum number of tokens in a row.
    pub max_position_embeddings: usize,
    /// Number that norms add to the mean of the squares.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: Option<RotaryScaling>,
    /// Whether the output weight is the embedding's.
    pub tie_word_embeddings: bool,
    /// Standard deviation of new matrices.
    pub initializer_range: f64,
    /// Id whose embedding gets no gradient from lookups.
    pub pad_token_id: Option<usize>,
    /// Number of keys that a query sees at most, for each layer.
    pub windows: Vec<Option<usize>>,
}

impl ModelConfig {
    /// Reads `config.json` in a folder.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or is no JSON, and [`ConfigError`] for a setting that is missing or not
    /// supported.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text, &path)
    }

    /// Parses the text of a `config.json`. `path` is named in errors.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let json =
            serde_json::from_str(text).with_context(|| format!("{} is no JSON", path.display()))?;
        Ok(Settings { json, path: path.to_path_buf() }.config()?)
    }

    /// Returns whether query, key and value have a bias.
    pub fn has_projection_bias(&self) -> bool {
        self.model_type == ModelType::Qwen2
    }

    /// Returns whether the heads of query and key are normalized.
    pub fn has_head_norms(&self) -> bool {
        self.model_type == ModelType::Qwen3
    }

    /// Returns the elements that a layer keeps of a token for backward: inputs of the norms and of the linear
    /// layers, query, key, value and output of the attention with a number for each head, and both factors of
    /// the gated feed-forward block.
    pub fn activations(&self) -> usize {
        let queries = self.num_attention_heads * self.head_dim;
        let keys = self.num_key_value_heads * self.head_dim;
        let normed = if self.has_head_norms() { queries + keys } else { 0 };
        let attention = 3 * queries + 2 * keys + self.num_attention_heads + normed;
        4 * self.hidden_size + attention + 3 * self.intermediate_size
    }

    /// Returns the number of keys that a query of a layer sees at most.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer).copied().flatten()
    }
}

/// The settings of a file.
struct Settings {
    json: Value,
    path: PathBuf,
}

impl Settings {
    /// Returns the configuration of the model.
    fn config(&self) -> Result<ModelConfig, ConfigError> {
        let model_type = self.model_type()?;
        self.check_fixed_settings()?;
        let heads = self.count("num_attention_heads", None)?;
        let hidden_size = self.count("hidden_size", None)?;
        let head_dim = match model_type {
            ModelType::Qwen3 => self.count("head_dim", Some(128))?,
            _ => self.count("head_dim", hidden_size.checked_div(heads))?,
        };
        let num_key_value_heads = self.count("num_key_value_heads", Some(heads))?;
        if !heads.is_multiple_of(num_key_value_heads) {
            let expected = format!("it must divide `num_attention_heads`, {heads}");
            return Err(self.error("num_key_value_heads", expected));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(self.error("head_dim", "it must be even, as pairs are rotated".into()));
        }
        let layers = self.count("num_hidden_layers", None)?;
        let (rope_theta, rope_scaling) = self.rotary()?;
        let vocab_size = self.count("vocab_size", None)?;
        Ok(ModelConfig {
            model_type,
            vocab_size,
            hidden_size,
            intermediate_size: self.count("intermediate_size", None)?,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads,
            head_dim,
            max_position_embeddings: self.count("max_position_embeddings", None)?,
            rms_norm_eps: self.number("rms_norm_eps", 1e-6)?,
            rope_theta,
            rope_scaling,
            tie_word_embeddings: self.flag("tie_word_embeddings", false)?,
            initializer_range: self.number("initializer_range", 0.02)?,
            pad_token_id: self.pad_token_id(vocab_size)?,
            windows: self.windows(model_type, layers)?,
        })
    }

    /// Returns the id of padding. A negative number counts from the end of the vocabulary, as in PyTorch.
    fn pad_token_id(&self, vocab_size: usize) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get("pad_token_id") else { return Ok(None) };
        let tokens = vocab_size as i64;
        let id = value.as_i64().filter(|id| (-tokens..tokens).contains(id));
        let expected = || {
            let ids = format!("it must be an id from 0 to {}, or from -{tokens} to -1", tokens - 1);
            self.error("pad_token_id", ids)
        };
        Ok(Some(id.ok_or_else(expected)?.rem_euclid(tokens) as usize))
    }

    fn model_type(&self) -> Result<ModelType, ConfigError> {
        let name = self.get("model_type").and_then(Value::as_str);
        let found = MODEL_TYPES.iter().find(|(known, _)| Some(*known) == name);
        found.map(|(_, model_type)| *model_type).ok_or_else(|| {
            let names = MODEL_TYPES.map(|(name, _)| name).join(", ");
            self.error("model_type", format!("supported are {names}"))
        })
    }

    /// Checks the settings of which this program has one value.
    fn check_fixed_settings(&self) -> Result<(), ConfigError> {
        let fixed: [(&str, &[Value]); 8] = [
            ("hidden_act", &["silu".into(), "swish".into()]),
            ("attention_bias", &[false.into()]),
            ("mlp_bias", &[false.into()]),
            ("attention_dropout", &[0.into(), (0.0).into()]),
            ("pretraining_tp", &[1.into()]),
            ("num_local_experts", &[]),
            ("num_experts", &[]),
            ("quantization_config", &[]),
        ];
        for (key, allowed) in fixed {
            if self.get(key).is_some_and(|value| !allowed.contains(value)) {
                let allowed: Vec<_> = allowed.iter().map(Value::to_string).collect();
                let expected = match allowed.is_empty() {
                    true => "this program does not have this setting; remove it".into(),
                    false => format!("supported is {}", allowed.join(" or ")),
                };
                return Err(self.error(key, expected));
            }
        }
        Ok(())
    }

    /// Returns the base of the rotary frequencies, and their scaling. transformers 5 writes
    /// `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`.
    fn rotary(&self) -> Result<(f32, Option<RotaryScaling>), ConfigError> {
        let key =
            ["rope_scaling", "rope_parameters"].into_iter().find(|key| self.get(key).is_some());
        let parameters = key.and_then(|key| self.get(key));
        let theta =
            parameters.and_then(|it| it.get("rope_theta")).or_else(|| self.get("rope_theta"));
        let theta = match theta {
            None => 10_000.0,
            Some(theta) => theta
                .as_f64()
                .filter(|theta| *theta > 0.0 && theta.is_finite())
                .ok_or_else(|| self.error("rope_theta", "it must be a number above 0".into()))?,
        };
        let (Some(key), Some(parameters)) = (key, parameters) else {
            return Ok((theta as f32, None));
        };
        if parameters
            .get("partial_rotary_factor")
            .is_some_and(|factor| factor.as_f64() != Some(1.0))
        {
            let expected = "supported is a `partial_rotary_factor` of 1.0";
            return Err(self.error(key, expected.into()));
        }
        let mut parameters = parameters.clone();
        // Files before 2024 call the field `type`.
        if let Some(object) = parameters.as_object_mut()
            && let Some(kind) = object.remove("type")
        {
            object.entry("rope_type").or_insert(kind);
        }
        if parameters.get("rope_type").is_none_or(|kind| kind == "default") {
            return Ok((theta as f32, None));
        }
        // A scaling that does not name it has that of the model.
        if let (Some(object), Some(positions)) =
            (parameters.as_object_mut(), self.get("max_position_embeddings"))
        {
            let key = "original_max_position_embeddings";
            if object.get(key).is_none_or(Value::is_null) {
                object.insert(key.into(), positions.clone());
            }
        }
        let scaling = serde_json::from_value(parameters).map_err(|error| {
            self.error(key, format!("supported are default, linear, llama3 and yarn ({error})"))
        })?;
        Ok((theta as f32, Some(scaling)))
    }

    /// Returns the sliding window of each layer.
    fn windows(&self, model: ModelType, layers: usize) -> Result<Vec<Option<usize>>, ConfigError> {
        let window = match model {
            ModelType::Llama => None,
            ModelType::Mistral => self.get("sliding_window").is_some().then_some(()),
            ModelType::Qwen2 | ModelType::Qwen3 => {
                self.flag("use_sliding_window", false)?.then_some(())
            }
        };
        let Some(()) = window else { return Ok(vec![None; layers]) };
        let window = Some(self.count("sliding_window", Some(4096))?);
        if model == ModelType::Mistral {
            return Ok(vec![window; layers]);
        }
        let Some(types) = self.get("layer_types") else {
            let first = self.whole("max_window_layers", 28)?;
            return Ok((0..layers).map(|at| window.filter(|_| at >= first)).collect());
        };
        let types = types.as_array().filter(|types| types.len() == layers).ok_or_else(|| {
            self.error("layer_types", format!("it must have an entry for each of {layers} layers"))
        })?;
        let of_layer = |kind: &Value| match kind.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") => Ok(window),
            _ => {
                let expected = "supported are full_attention and sliding_attention";
                Err(self.error("layer_types", expected.into()))
            }
        };
        types.iter().map(of_layer).collect()
    }

    /// Returns the value of a key; `None` for a key that is missing or null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    /// Returns a number from 1 on. Without a default the key must be there.
    fn count(&self, key: &str, default: Option<usize>) -> Result<usize, ConfigError> {
        match (self.get(key), default) {
            (None, Some(default)) if default > 0 => Ok(default),
            (None, _) => Err(self.error(key, "the file must have it".into())),
            (Some(value), _) => {
                let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
                let expected = || self.error(key, "it must be a whole number from 1".into());
                count.filter(|count| *count > 0).ok_or_else(expected)
            }
        }
    }

    fn whole(&self, key: &str, default: usize) -> Result<usize, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        count.ok_or_else(|| self.error(key, "it must be a whole number from 0".into()))
    }

    fn number(&self, key: &str, default: f64) -> Result<f64, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let number = value.as_f64().filter(|number| *number > 0.0 && number.is_finite());
        number.ok_or_else(|| self.error(key, "it must be a number above 0".into()))
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.error(key, "it must be true or false".into()))
    }

    fn error(&self, key: &str, expected: String) -> ConfigError {
        let value = self.json.get(key).unwrap_or(&Value::Null).to_string();
        ConfigError {
            file: self.path.display().to_string(),
            key: key.into(),
            value: if self.json.get(key).is_some() { value } else { "missing".into() },
            expected,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}"#;

    /// Parses the file above with some keys changed; null removes a key.
    fn parse(changes: Value) -> Result<ModelConfig> {
        let mut json: Value = serde_json::from_str(LLAMA).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            json[key] = value.clone();
        }
        ModelConfig::parse(&json.to_string(), Path::new("folder/config.json"))
    }

    #[test]
    fn defaults_are_those_of_transformers() {
        let config = parse(serde_json::json!({})).unwrap();
        assert_eq!((config.head_dim, config.rope_theta, config.rope_scaling), (8, 1e4, None));
        assert!(!config.tie_word_embeddings && config.windows == [None; 3]);
        let qwen3 = parse(serde_json::json!({"model_type": "qwen3"})).unwrap();
        assert_eq!(qwen3.head_dim, 128);
    }

    #[test]
    fn both_forms_of_rotary_settings_are_read() {
        let scaling = serde_json::json!({"type": "linear", "factor": 2.0});
        let old = serde_json::json!({"rope_theta": 5e5, "rope_scaling": scaling});
        let new = serde_json::json!({
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
        });
        for form in [old, new] {
            let config = parse(form).unwrap();
            let expected = Some(RotaryScaling::Linear { factor: 2.0 });
            assert_eq!((config.rope_theta, config.rope_scaling), (5e5, expected));
        }
        let plain =
            serde_json::json!({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}});
        assert_eq!(parse(plain).unwrap().rope_scaling, None);
    }

    #[test]
    fn padding_is_counted_from_either_end() {
        let padding = |id: Value| parse(serde_json::json!({ "pad_token_id": id })).unwrap();
        for (id, expected) in [(0, 0), (95, 95), (-1, 95), (-96, 0)] {
            assert_eq!(padding(id.into()).pad_token_id, Some(expected));
        }
        assert_eq!(padding(Value::Null).pad_token_id, None);
    }

    #[test]
    fn windows_are_those_of_the_layers() {
        let mistral = serde_json::json!({"model_type": "mistral", "sliding_window": 5});
        assert_eq!(parse(mistral).unwrap().windows, [Some(5); 3]);
        let qwen = |more: Value| {
            let mut json = serde_json::json!({"model_type": "qwen2", "sliding_window": 5});
            for (key, value) in more.as_object().unwrap() {
                json[key] = value.clone();
            }
            parse(json).unwrap().windows
        };
        assert_eq!(qwen(serde_json::json!({})), [None; 3]);
        let on = serde_json::json!({"use_sliding_window": true, "max_window_layers": 2});
        assert_eq!(qwen(on), [None, None, Some(5)]);
        let types = ["sliding_attention", "full_attention", "sliding_attention"];
        let listed = serde_json::json!({"use_sliding_window": true, "layer_types": types});
        assert_eq!(qwen(listed), [Some(5), None, Some(5)]);
    }

    #[test]
    fn a_setting_that_changes_a_number_is_refused_by_name_and_value() {
        for (key, value) in [
            ("model_type", serde_json::json!("gpt2")),
            ("hidden_act", serde_json::json!("gelu")),
            ("attention_bias", serde_json::json!(true)),
            ("mlp_bias", serde_json::json!(true)),
            ("attention_dropout", serde_json::json!(0.1)),
            ("num_local_experts", serde_json::json!(8)),
            ("quantization_config", serde_json::json!({"bits": 4})),
            ("rope_scaling", serde_json::json!({"rope_type": "longrope", "factor": 2.0})),
            ("num_key_value_heads", serde_json::json!(3)),
            ("head_dim", serde_json::json!(7)),
            ("vocab_size", serde_json::json!("many")),
            ("pad_token_id", serde_json::json!(96)),
        ] {
            let error = parse(serde_json::json!({ key: value.clone() })).unwrap_err();
            let error = error.downcast_ref::<ConfigError>().unwrap();
            assert_eq!((error.key.as_str(), &error.value), (key, &value.to_string()), "{error}");
            assert!(error.to_string().starts_with("folder/config.json: "), "{error}");
        }
        let missing = parse(serde_json::json!({"hidden_size": null})).unwrap_err().to_string();
        assert!(missing.contains("hidden_size"), "{missing}");
    }
}
