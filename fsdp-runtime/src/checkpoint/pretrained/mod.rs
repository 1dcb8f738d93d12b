//! Pretrained weights: safetensors files in another framework's names and layouts, and Burn's own
//! records. Checkpoints to resume training from are in [`checkpoint`](crate::checkpoint).
//!
//! A save gathers parameters one by one to rank 0, which streams them to the file. A load
//! memory-maps the files, checks everything, and then copies the elements of each rank's shards.
//!
//! Imports: file_names, options, local_values ← source, safetensors_file ← matching, weights_files,
//! merge_safetensors ← load_values ← load, save,
//! burnpack ← peft.

mod burnpack;
mod file_names;
mod load;
mod load_values;
mod local_values;
mod matching;
mod merge_safetensors;
mod options;
mod peft;
pub(super) mod safetensors_file;
mod save;
mod source;
pub(super) mod weights_files;

pub use self::load::from_pretrained;
pub use self::merge_safetensors::merge_safetensors;
pub use self::options::{LoadOptions, LoadReport, SaveDtype, SavePretrained};
pub use self::peft::SaveAdapters;
