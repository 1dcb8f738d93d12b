//! LoRA adapters alone, in the files of Hugging Face's PEFT: `adapter_model.safetensors` and
//! `adapter_config.json`.
//!
//! Order of the files: `names` ← `shares`, `plan`, `options`, `ordered`, `refused` ← `config` ← `save`,
//! `load`.

mod config;
mod load;
mod names;
mod options;
mod ordered;
mod plan;
mod refused;
mod save;
mod shares;

pub use self::options::SaveAdapters;

/// Reads the text of a file of settings, for [`parse_bytes`](super::parse_bytes).
pub(super) fn parse_config(text: &[u8]) -> bool {
    config::PeftConfig::parse(text, String::new()).is_ok()
}

/// Name of the file of tensors.
const WEIGHTS: &str = "adapter_model.safetensors";
/// Name of the file of tensors that `torch.save` wrote, which older versions of PEFT did.
const WEIGHTS_BIN: &str = "adapter_model.bin";
/// Name of the file of settings.
const CONFIG: &str = "adapter_config.json";
