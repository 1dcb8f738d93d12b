//! Errors of reading and writing pretrained weights.

use super::text::lines;

/// A failure to load weights into a model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file that cannot be read.
    #[error("cannot read {file}: {reason}")]
    Io {
        /// Path of the file.
        file: String,
        /// The operating system's error message.
        reason: String,
    },
    /// A file whose contents do not match its format.
    #[error("{file} is not a valid {format}: {reason}")]
    Format {
        /// Path of the file.
        file: String,
        /// Name of the expected format.
        format: &'static str,
        /// Description of the fault.
        reason: String,
    },
    /// A pickle that imports a Python name that weights do not need. It was not run.
    #[error(
        "{file} would import `{global}`, which weights do not need, and which may run code: it was \
         not read; ask its author for safetensors, or for `torch.save(model.state_dict(), ..)`"
    )]
    UnsafePickle {
        /// Path of the file.
        file: String,
        /// Python name, as `module.name`.
        global: String,
    },
    /// A filter that does not fit the model.
    #[error("the filter of a load does not fit the model: {reason}")]
    Filter {
        /// Description of the fault.
        reason: String,
    },
    /// An index that does not match the files that it lists.
    #[error("{file} does not match the files that it lists:{}", lines(problems))]
    Index {
        /// Path of the index.
        file: String,
        /// All differences, one entry per file or tensor.
        problems: Vec<String>,
    },
    /// Weights that do not fit the model. The lists name all differences.
    #[error("{file} does not fit the model:{}", differences(missing, unexpected, misshapen))]
    Mismatch {
        /// Path of the file or folder.
        file: String,
        /// Keys of the model that the file lacks.
        missing: Vec<String>,
        /// Keys of the file that the model lacks.
        unexpected: Vec<String>,
        /// Keys whose shape or dtype differs, each with a description of the difference.
        misshapen: Vec<String>,
    },
    /// Two tensors for a parameter that the model ties, which differ.
    #[error(
        "{file} holds two weights for a tied parameter, `{first}` and `{second}`, that differ at element \
         {element}: load a model that does not tie them, as by `\"tie_word_embeddings\": false` in a \
         `config.json`, or remove `{second}` from the file"
    )]
    TiedCopies {
        /// Path of the file or folder.
        file: String,
        /// Key of the parameter that owns the weight.
        first: String,
        /// Key of the parameter that is tied to it.
        second: String,
        /// Number of the first element that differs, in the flattened parameter of the model.
        element: usize,
    },
    /// A setting of PEFT that has no equivalent here.
    #[error("{file} sets `{setting}` to {value}, which is not supported: {reason}")]
    Setting {
        /// Path of the file.
        file: String,
        /// Name of the setting.
        setting: String,
        /// Value of the setting, as JSON.
        value: String,
        /// The reason why the value is refused.
        reason: String,
    },
    /// Adapters in PEFT's format that the model cannot take.
    #[error("{file} does not fit the adapters of the model: {reason}")]
    Adapters {
        /// Path of the file.
        file: String,
        /// Description of the difference.
        reason: String,
    },
}

/// A failure to save weights.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// A file or folder that cannot be written.
    #[error("cannot write {file}: {reason}")]
    Io {
        /// Path of the file.
        file: String,
        /// The operating system's error message.
        reason: String,
    },
    /// An additional file whose name points outside the folder, or is a name of a weights file.
    #[error("`{name}` cannot be the name of an additional file: {reason}")]
    FileName {
        /// Name of the additional file.
        name: String,
        /// The reason why the name is refused.
        reason: &'static str,
    },
    /// A filter that does not fit the model.
    #[error("the filter of a save does not fit the model: {reason}")]
    Filter {
        /// Description of the fault.
        reason: String,
    },
    /// Two parameters with the same key.
    #[error(
        "`{first}` and `{second}` would both be saved as `{key}`; give one of them another \
         `#[fsdp(key = \"..\")]`"
    )]
    DuplicateKey {
        /// Key that both parameters have.
        key: String,
        /// Path of the first parameter.
        first: String,
        /// Path of the second parameter.
        second: String,
    },
    /// A model whose adapters PEFT's format cannot hold.
    #[error("the adapters cannot be saved in PEFT's format: {reason}")]
    Adapters {
        /// The reason why they cannot be saved.
        reason: String,
    },
    /// A tied matrix with an adapter of its own, which a save with merged adapters would lose.
    #[error(
        "`{path}` is tied to another parameter, under whose name it is saved, and has an adapter of its \
         own, which cannot be merged; save without `with_merged_adapters`"
    )]
    TiedAdapter {
        /// Module path of the matrix.
        path: String,
    },
    /// A sharded model that `burn-store` was asked to collect or save.
    ///
    /// Its snapshot has the tensors that this rank stores, which are shards.
    #[error(
        "burn-store would save the shards of this rank in place of the model; call \
         `model.state().save_burnpack(path)`, whose file burn-store reads, or \
         `model.state().save_pretrained(folder, &options)`, on every rank"
    )]
    Snapshot,
}

/// Returns every difference on a line of its own, each with its kind.
fn differences(missing: &[String], unexpected: &[String], misshapen: &[String]) -> String {
    let mut text = String::new();
    for (title, names) in
        [("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen)]
    {
        for name in names {
            text.push_str(&format!("\n  {title}: {name}"));
        }
    }
    text
}
