//! Saving checkpoints.
//!
//! Rank 0 creates a temporary folder next to the final one. Each rank writes its file and its part
//! of the manifest there, without waiting for other ranks' data. Rank 0 merges the parts, writes
//! the manifest last and renames the folder. A background save runs the same two steps on a thread
//! of each rank, where rank 0's thread polls for the parts. [`CheckpointManager::finish`] exchanges
//! the outcomes later, so that no collective runs concurrently with those of training.
//!
//! Imports: contents, manifest_part, policy, sink, written_range ← outline, per_rank ← elements ← steps ←
//! background ← manager.

mod background;
mod contents;
mod elements;
mod manager;
mod manifest_part;
mod outline;
mod per_rank;
mod policy;
mod sink;
mod steps;
mod written_range;

pub use self::contents::Checkpoint;
pub use self::manager::{CheckpointManager, Saved};
pub use self::policy::{OnSaveError, SaveOutcome, WhenBusy};
