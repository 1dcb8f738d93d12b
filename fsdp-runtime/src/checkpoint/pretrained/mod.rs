//! Pretrained weights: safetensors files and files of PyTorch in another framework's names and
//! layouts, and Burn's own records. Checkpoints to resume training from are in [`checkpoint`](crate::checkpoint).
//!
//! A save gathers parameters one by one to rank 0, which streams them to the file. A load
//! memory-maps the files, checks everything, and then copies the elements of each rank's shards.
//!
//! Imports: file_names, mapped ← options, local_values ← torch ← source, safetensors_file ←
//! matching, weights_files,
//! merge_safetensors ← load_values ← frozen, merged_adapters ← load, save, burnpack ← peft
//! ← parse_bytes.

mod burnpack;
mod file_names;
mod frozen;
mod load;
mod load_values;
mod local_values;
mod mapped;
mod matching;
mod merge_safetensors;
mod merged_adapters;
mod options;
pub(super) mod parse_bytes;
mod peft;
pub(super) mod safetensors_file;
mod save;
mod source;
mod torch;
pub(super) mod weights_files;

pub use self::load::from_pretrained;
pub use self::merge_safetensors::merge_safetensors;
pub use self::options::{LoadOptions, SaveDtype, SavePretrained};
pub use self::peft::SaveAdapters;
