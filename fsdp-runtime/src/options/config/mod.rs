//! The configuration file, with the keys of Hugging Face Accelerate.
//!
//! A file that `accelerate config` wrote for FSDP is read as it is. A key without effect is
//! returned as a [`Note`]. An unknown key or value is an error with its line and the nearest known
//! one; all errors of a file are reported at once. `fsdp-runtime/docs/config.md` lists every key.
//!
//! ```
//! use fsdp_runtime::config::Config;
//!
//! let text = "num_processes: 2\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHRAD\n";
//! let error = Config::parse(text, "fsdp.yaml").unwrap_err();
//! assert_eq!(
//!     error.to_string(),
//!     "fsdp.yaml: line 3: unknown value `FULL_SHRAD` for `fsdp_sharding_strategy`; did you mean \
//!      `FULL_SHARD`?"
//! );
//! ```
#![cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::config) is about this module.")]

// The files in order. Each uses only those before it; this file only re-exports.

// Text: the place of a key, the YAML tree, the nearest known word.
mod nearest;
mod place;
mod yaml;

// Data: errors and notes, the values and the names of keys, the configuration and its section
// `fsdp_config`.
mod error;
mod keys;
mod section;
mod types;
mod values;

// What is made of a configuration: shard groups, the runtime's options, the text of a file.
mod options;
mod shard_groups;
mod write;

// Reading: values of the command line, the text of a file to a configuration, whole files, and
// older files in today's keys.
mod file;
mod overrides;
mod read;
mod trainer;
mod update;

#[cfg(test)]
mod note_tests;
#[cfg(test)]
mod tests;

pub use self::error::{ConfigError, Note, Problem, ProblemKind};
pub use self::overrides::{OVERRIDES_VARIABLE, Overrides};
pub use self::place::Place;
pub use self::section::FsdpSection;
pub use self::types::{CONFIG_VARIABLE, Config, DEFAULT_MIN_NUM_PARAMS, MpirunConfig};
pub use self::update::{Update, update};
pub use self::values::{AutoWrapPolicy, MixedPrecision, StateDictType};
pub use crate::launch::DEBUG_VARIABLE;
// For `fsdp-cli`, whose flags and questions are those of the table, and for the tests of the guide.
#[doc(hidden)]
pub use crate::options::table::{FileKey, Keys, OptionRow, Question, TABLE, file_key, file_keys};
