//! What may differ between a file and the model, and how a model is written.

/// What may differ between a file and the model.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct LoadOptions {
    pub(super) base_prefix: Option<String>,
    pub(super) missing: Vec<String>,
    pub(super) unexpected: Vec<String>,
    /// Endings in the model, and what a file may have in their place.
    pub(super) renamed: Vec<(String, String)>,
}

impl LoadOptions {
    /// The file holds the model's keys, no more and no less.
    pub fn new() -> Self {
        Self::default()
    }

    /// A first segment that keys may have in the model and lack in the file, or the other way
    /// round: `bert` where the file holds the bare encoder.
    pub fn with_base_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.base_prefix = Some(prefix.into());
        self
    }

    /// Keys of the model that begin so may be missing, and keep their values: a new head.
    pub fn with_allowed_missing(mut self, prefix: impl Into<String>) -> Self {
        self.missing.push(prefix.into());
        self
    }

    /// Keys of the file that begin so are passed over: the head of another task.
    pub fn with_allowed_unexpected(mut self, prefix: impl Into<String>) -> Self {
        self.unexpected.push(prefix.into());
        self
    }

    /// A key that ends in `in_model` may end in `in_file` instead.
    pub fn with_renamed_suffix(
        mut self,
        in_file: impl Into<String>,
        in_model: impl Into<String>,
    ) -> Self {
        self.renamed.push((in_model.into(), in_file.into()));
        self
    }

    /// The names that layer norms have in checkpoints converted from TensorFlow:
    /// `LayerNorm.gamma` for `LayerNorm.weight`, `LayerNorm.beta` for `LayerNorm.bias`.
    pub fn with_legacy_layer_norm(self) -> Self {
        self.with_renamed_suffix("LayerNorm.gamma", "LayerNorm.weight")
            .with_renamed_suffix("LayerNorm.beta", "LayerNorm.bias")
    }

    /// The names a key may have in the file, the model's own first.
    pub(super) fn candidates(&self, key: &str) -> Vec<String> {
        let mut names = vec![key.to_string()];
        if let Some(prefix) = &self.base_prefix {
            match key.strip_prefix(prefix.as_str()).and_then(|rest| rest.strip_prefix('.')) {
                Some(bare) => names.push(bare.to_string()),
                None => names.push(format!("{prefix}.{key}")),
            }
        }
        for index in 0..names.len() {
            for (in_model, in_file) in &self.renamed {
                // A whole segment or more: `norm.weight` is no ending of `layernorm.weight`.
                if let Some(start) = names[index].strip_suffix(in_model.as_str())
                    && (start.is_empty() || start.ends_with('.'))
                {
                    names.push(format!("{start}{in_file}"));
                }
            }
        }
        names
    }
}

/// What a load found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// How many parameters were loaded.
    pub loaded: usize,
    /// Keys of the model that the file lacks, as allowed.
    pub missing: Vec<String>,
    /// Keys of the file that were passed over, as allowed.
    pub unexpected: Vec<String>,
}

/// The element type of a saved file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SaveDtype {
    /// As trained.
    #[default]
    F32,
    /// Rounded to the nearest bfloat16.
    Bf16,
    /// Rounded to the nearest half; beyond 65,504 it is infinite.
    F16,
}

/// How [`Fsdp::save_pretrained`](crate::Fsdp::save_pretrained) writes a model.
#[derive(Clone, Debug)]
#[must_use]
pub struct SavePretrained {
    pub(super) max_shard_size: u64,
    pub(super) dtype: SaveDtype,
    pub(super) files: Vec<(String, Vec<u8>)>,
}

impl Default for SavePretrained {
    fn default() -> Self {
        Self::new()
    }
}

impl SavePretrained {
    /// In f32, in files of at most 5 GB, without additional files.
    pub fn new() -> Self {
        Self { max_shard_size: 5_000_000_000, dtype: SaveDtype::F32, files: Vec::new() }
    }

    /// The most bytes of tensors in one file. A larger model is written as
    /// `model-00001-of-000NN.safetensors` and so on, with `model.safetensors.index.json`; one
    /// tensor that is larger has a file to itself.
    pub fn with_max_shard_size(mut self, bytes: u64) -> Self {
        self.max_shard_size = bytes;
        self
    }

    /// The element type to write.
    pub fn with_dtype(mut self, dtype: SaveDtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// `config.json`, which says of what architecture and sizes the model is.
    pub fn with_config(self, json: impl Into<Vec<u8>>) -> Self {
        self.with_file("config.json", json)
    }

    /// A file to write beside the weights, such as `tokenizer.json`. Rank 0's contents count.
    pub fn with_file(mut self, name: impl Into<String>, contents: impl Into<Vec<u8>>) -> Self {
        self.files.push((name.into(), contents.into()));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_its_own_name_first_and_legacy_ones_after() {
        let options = LoadOptions::new().with_base_prefix("bert").with_legacy_layer_norm();
        assert_eq!(
            options.candidates("bert.embeddings.LayerNorm.weight"),
            [
                "bert.embeddings.LayerNorm.weight",
                "embeddings.LayerNorm.weight",
                "bert.embeddings.LayerNorm.gamma",
                "embeddings.LayerNorm.gamma",
            ]
        );
        assert_eq!(
            options.candidates("classifier.bias"),
            ["classifier.bias", "bert.classifier.bias"]
        );
        let norm = LoadOptions::new().with_renamed_suffix("gamma", "weight");
        assert_eq!(norm.candidates("reweight"), ["reweight"]);
    }
}
