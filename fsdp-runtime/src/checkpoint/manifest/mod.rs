//! `manifest.json`: what a checkpoint holds, and which file holds each element.
//!
//! A reader trusts nothing in it. The text ends with a checksum of itself, so that any changed byte
//! is found. Numbers are checked for overflow, and the pieces of every tensor must tile the tensor
//! exactly.
//!
//! Imports: names, dtype ← entries ← document ← check ← text (with checksum); merge_parts uses
//! entries and document.

mod check;
mod checksum;
mod document;
mod dtype;
mod entries;
mod merge_parts;
mod names;
mod text;

pub use self::checksum::seal;
pub use self::document::{Manifest, VERSION};
pub use self::dtype::Dtype;
pub use self::entries::{
    BLOCK, KeyEntry, MeshShape, ModelEntry, OptimizerEntry, ParameterEntry, Piece, Progress,
    RandomState, SplitEntry, TensorEntry, UnitEntry,
};
pub use self::names::MANIFEST;
pub(super) use self::names::{model_tensor_name, optimizer_tensor_name, rank_file_name};
