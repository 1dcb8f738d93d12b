//! Weights in and out of a sharded model: safetensors in another framework's names and layouts, and
//! Burn's own records.
//!
//! Out: parameters are gathered one by one to rank 0, which streams them to the file ([`save`],
//! [`burn`]). In: files are memory-mapped ([`source`]), everything is checked ([`fit`]), then each
//! rank copies the elements of its shards ([`load`]). [`merge`] needs no model. [`shards`] and
//! [`write`] serve checkpoints too. Checkpoints to
//! resume a training run from are not here.

mod burn;
mod fill;
mod fit;
mod load;
mod merge;
mod options;
mod save;
pub(crate) mod shards;
mod source;
pub(crate) mod write;

use crate::error::{LoadError, SaveError};
pub use load::from_pretrained;
pub use merge::merge_safetensors;
pub use options::{LoadOptions, LoadReport, SaveDtype, SavePretrained};

/// One file of weights, in transformers' name for it.
const SINGLE: &str = "model.safetensors";
/// What names the files of several.
const INDEX: &str = "model.safetensors.index.json";
