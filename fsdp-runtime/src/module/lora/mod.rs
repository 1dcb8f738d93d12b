//! LoRA adapters on the linear layers that a configuration names. They are attached before sharding.
//!
//! Order of the files: `survey` and `attach` ← `config`.

mod attach;
mod config;
mod survey;

pub use self::config::LoraConfig;
