//! LoRA adapters on the linear layers that a configuration names. They are attached before sharding.
//!
//! Order of the files: `config` ← `pattern` ← `survey`, `attach` ← `apply`.

mod apply;
mod attach;
mod config;
mod pattern;
mod survey;

pub use self::config::LoraConfig;
pub(crate) use self::pattern::Scales;
