//! LoRA adapters alone, in the files of Hugging Face's PEFT: `adapter_model.safetensors` and
//! `adapter_config.json`.
//!
//! Order of the files: `names` ← `plan`, `options`, `config` ← `save`, `load`.

mod config;
mod load;
mod names;
mod options;
mod plan;
mod save;

pub use self::options::SaveAdapters;

/// Name of the file of tensors.
const WEIGHTS: &str = "adapter_model.safetensors";
/// Name of the file of settings.
const CONFIG: &str = "adapter_config.json";
