//! What `--save` writes: weights or adapters, and the files with which transformers and PEFT load them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{SaveAdapters, SaveDtype, SavePretrained};
use serde_json::Value;

use crate::cli::SaveType;
use crate::common::tokenizers::read_files;
use crate::model::CausalLm;

/// Hugging Face's names of the files next to the weights, besides `config.json`.
pub const FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
];
const CONFIG: &str = "config.json";

/// Directory of an exported model, and the files next to its weights.
#[derive(Clone, Debug)]
pub struct Export {
    folder: PathBuf,
    dtype: SaveType,
    /// Names and contents of the files.
    files: Vec<(String, Vec<u8>)>,
    /// Directory of the base model, if adapters are saved.
    base: Option<PathBuf>,
}

impl Export {
    /// Creates the directory and collects the files. With `base`, the directory of a base model, adapters
    /// are saved.
    ///
    /// It is called before training, so that a wrong path is found before the work is done.
    ///
    /// # Errors
    ///
    /// If the directory cannot be created, or if a file of the model cannot be read.
    pub fn new(
        folder: &Path,
        dtype: SaveType,
        files: Vec<(String, Vec<u8>)>,
        base: Option<PathBuf>,
    ) -> Result<Self> {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("--save: cannot create {}", folder.display()))?;
        let files = files.into_iter().map(|(name, contents)| {
            let contents = if name == CONFIG { with_dtype(&contents, dtype)? } else { contents };
            Ok((name, contents))
        });
        let files = files.collect::<Result<_>>()?;
        Ok(Self { folder: folder.to_path_buf(), dtype, files, base })
    }

    /// Writes the model, or its adapters. Every rank calls it.
    ///
    /// # Errors
    ///
    /// If a file cannot be written, or if a peer fails.
    pub fn save(&self, model: &Fsdp<CausalLm>) -> Result<()> {
        let context = || format!("--save: cannot write to {}", self.folder.display());
        let dtype = match self.dtype {
            SaveType::F32 => SaveDtype::F32,
            SaveType::Bf16 => SaveDtype::Bf16,
            SaveType::F16 => SaveDtype::F16,
        };
        let files = || self.files.iter().cloned();
        if let Some(base) = &self.base {
            let options = SaveAdapters::new().with_task_type("CAUSAL_LM").with_dtype(dtype);
            let options = options.with_base_model(base.display().to_string());
            let files = files().filter(|(name, _)| name != CONFIG);
            let options =
                files.fold(options, |options, (name, file)| options.with_file(name, file));
            return model.state().save_adapters(&self.folder, &options).with_context(context);
        }
        let options = SavePretrained::new().with_dtype(dtype).with_merged_adapters(true);
        let options = files().fold(options, |options, (name, file)| options.with_file(name, file));
        model.state().save_pretrained(&self.folder, &options).with_context(context)
    }
}

/// Reads the files next to the weights of a model.
///
/// # Errors
///
/// If a file cannot be read.
pub fn files_of(folder: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let names: Vec<&str> = FILES.into_iter().chain([CONFIG]).collect();
    read_files(folder, &names)
}

/// Returns a `config.json` that names the type of the weights next to it.
fn with_dtype(config: &[u8], dtype: SaveType) -> Result<Vec<u8>> {
    let mut config: Value = serde_json::from_slice(config)?;
    let name = match dtype {
        SaveType::F32 => "float32",
        SaveType::Bf16 => "bfloat16",
        SaveType::F16 => "float16",
    };
    // transformers 4 calls the key `torch_dtype`.
    let key = if config.get("torch_dtype").is_some() { "torch_dtype" } else { "dtype" };
    config[key] = name.into();
    let mut text = serde_json::to_vec_pretty(&config)?;
    text.push(b'\n');
    Ok(text)
}
