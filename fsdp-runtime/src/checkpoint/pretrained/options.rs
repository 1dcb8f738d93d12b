//! Options of loading and saving pretrained weights.

use crate::checkpoint::filter::ParamFilter;

/// Allowed differences between a file and the model that loads it.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct LoadOptions {
    base_prefix: Option<String>,
    /// Prefixes of the model's keys that a file may lack.
    pub(super) missing: Vec<String>,
    /// Prefixes of the file's keys that the model may lack.
    pub(super) unexpected: Vec<String>,
    /// Suffixes of keys in the model, each with the suffix that a file may have instead.
    renamed: Vec<(String, String)>,
    /// Whether a file may lack the factors of LoRA adapters.
    pub(super) new_adapters: bool,
    pub(super) filter: ParamFilter,
    /// Whether differences beyond the allowed ones are listed in the report, and no error.
    pub(super) lenient: bool,
}

impl LoadOptions {
    /// Returns the default options: the file must have exactly the model's keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allows a first segment of keys that only the model has, or that only the file has: `bert`
    /// for a file of the bare encoder.
    pub fn with_base_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.base_prefix = Some(prefix.into());
        self
    }

    /// Allows the file to lack the model's keys that begin with `prefix`, such as a new head. These
    /// parameters keep their values.
    pub fn with_allowed_missing(mut self, prefix: impl Into<String>) -> Self {
        self.missing.push(prefix.into());
        self
    }

    /// Allows the file to lack the factors of all LoRA adapters, as the file of a base model does.
    /// The factors keep their values.
    pub fn with_new_adapters(mut self) -> Self {
        self.new_adapters = true;
        self
    }

    /// Skips the file's keys that begin with `prefix`, such as the head of another task, where the
    /// model has no such parameter.
    pub fn with_allowed_unexpected(mut self, prefix: impl Into<String>) -> Self {
        self.unexpected.push(prefix.into());
        self
    }

    /// Loads the parameters that `filter` selects. The others keep their values, and their keys in
    /// the file are skipped.
    pub fn with_filter(mut self, filter: ParamFilter) -> Self {
        self.filter = filter;
        self
    }

    /// Sets whether the file must fit the model, as it must by default. With `false` everything that
    /// fits is loaded: keys that are missing, unexpected or of another shape or dtype are listed in
    /// the [`LoadReport`](crate::state::LoadReport), and such parameters keep their values. PyTorch's
    /// `load_state_dict(strict=False)`, which refuses other shapes.
    pub fn with_strict(mut self, strict: bool) -> Self {
        self.lenient = !strict;
        self
    }

    /// Allows a key that ends in `in_model` in the model to end in `in_file` in the file. A suffix
    /// is one or more whole segments.
    pub fn with_renamed_suffix(
        mut self,
        in_file: impl Into<String>,
        in_model: impl Into<String>,
    ) -> Self {
        self.renamed.push((in_model.into(), in_file.into()));
        self
    }

    /// Allows the names of layer norms in weights that were converted from TensorFlow:
    /// `LayerNorm.gamma` for `LayerNorm.weight`, and `LayerNorm.beta` for `LayerNorm.bias`.
    pub fn with_legacy_layer_norm(self) -> Self {
        self.with_renamed_suffix("LayerNorm.gamma", "LayerNorm.weight")
            .with_renamed_suffix("LayerNorm.beta", "LayerNorm.bias")
    }

    /// Returns the names that a key may have in the file, beginning with the key itself.
    pub(super) fn candidates(&self, key: &str) -> Vec<String> {
        let mut names = vec![key.to_string()];
        if let Some(prefix) = &self.base_prefix {
            match key.strip_prefix(prefix.as_str()).and_then(|key| key.strip_prefix('.')) {
                Some(bare) => names.push(bare.to_string()),
                None => names.push(format!("{prefix}.{key}")),
            }
        }
        for index in 0..names.len() {
            for (in_model, in_file) in &self.renamed {
                // Whole segments only: `norm.weight` is no suffix of `layernorm.weight`.
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

/// The element type of a saved file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SaveDtype {
    /// 32-bit float, the dtype in which parameters are stored during training.
    #[default]
    F32,
    /// bfloat16, rounded to nearest.
    Bf16,
    /// IEEE half precision, rounded to nearest. Magnitudes above 65,504 become infinite.
    F16,
}

/// Options of [`State::save_pretrained`](crate::checkpoint::State::save_pretrained).
#[derive(Clone, Debug)]
#[must_use]
pub struct SavePretrained {
    pub(super) max_shard_size: u64,
    pub(super) dtype: SaveDtype,
    pub(super) files: Vec<(String, Vec<u8>)>,
    pub(super) filter: ParamFilter,
    /// Whether LoRA adapters are added to their matrices.
    pub(super) merged_adapters: bool,
}

impl Default for SavePretrained {
    fn default() -> Self {
        Self::new()
    }
}

impl SavePretrained {
    /// Returns the default options: f32, files of at most 5 GB, no additional files, and adapters apart
    /// from their matrices.
    pub fn new() -> Self {
        Self {
            max_shard_size: 5_000_000_000,
            dtype: SaveDtype::F32,
            files: Vec::new(),
            filter: ParamFilter::new(),
            merged_adapters: false,
        }
    }

    /// Sets the maximum number of bytes of tensors in one file. A larger model is written as
    /// `model-00001-of-000NN.safetensors` and so on, with `model.safetensors.index.json`. A tensor
    /// larger than the maximum gets a file of its own.
    pub fn with_max_shard_size(mut self, bytes: u64) -> Self {
        self.max_shard_size = bytes;
        self
    }

    /// Writes the parameters that `filter` selects. By default all are written.
    pub fn with_filter(mut self, filter: ParamFilter) -> Self {
        self.filter = filter;
        self
    }

    /// Sets whether LoRA adapters are added to the matrices that they adapt, and not written as tensors of
    /// their own. transformers then loads the folder as a model without adapters. Rank 0 adds them in f32,
    /// one matrix at a time; a matrix that is stored in bf16, 8 or 4 bits is converted to f32 first.
    /// For a filter a matrix with an adapter counts as trainable, and factors are not there.
    /// Default: false. PEFT's `merge_and_unload`.
    pub fn with_merged_adapters(mut self, merged: bool) -> Self {
        self.merged_adapters = merged;
        self
    }

    /// Sets the element type to write.
    pub fn with_dtype(mut self, dtype: SaveDtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// Adds `config.json`, which describes the model's architecture and sizes to transformers.
    pub fn with_config(self, json: impl Into<Vec<u8>>) -> Self {
        self.with_file("config.json", json)
    }

    /// Adds a file to write next to the weights, such as `tokenizer.json`. Rank 0's contents are
    /// written.
    pub fn with_file(mut self, name: impl Into<String>, contents: impl Into<Vec<u8>>) -> Self {
        self.files.push((name.into(), contents.into()));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_begin_with_the_key_and_end_with_legacy_names() {
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
