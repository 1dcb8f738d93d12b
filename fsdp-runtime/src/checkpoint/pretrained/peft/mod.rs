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

/// Reads the text of a file of settings, for [`parse_bytes`](super::parse_bytes).
pub(super) fn parse_config(text: &[u8]) -> bool {
    let json = serde_json::from_slice(text);
    json.is_ok_and(|json| config::PeftConfig::parse(&json, String::new()).is_ok())
}

/// Name of the file of tensors.
const WEIGHTS: &str = "adapter_model.safetensors";
/// Name of the file of tensors that `torch.save` wrote, which older versions of PEFT did.
const WEIGHTS_BIN: &str = "adapter_model.bin";
/// Name of the file of settings.
const CONFIG: &str = "adapter_config.json";
