//! Saved state: checkpoint folders, state dicts in memory, and pretrained weights in safetensors
//! files.
//!
//! A checkpoint is a folder that all ranks write together, and that can be loaded at any world
//! size, with any sharding strategy and wrapping. `rank-00000.safetensors` and so on hold each
//! rank's elements of models and optimizers. `manifest.json` says which elements of which full
//! tensors these are, with checksums. A rank of another world size reads the byte ranges that it
//! needs from several files, which are memory-mapped.
//!
//! ```no_run
//! use burn::optim::ModuleOptimizer;
//! use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Restore};
//! use fsdp_runtime::prelude::*;
//!
//! fn train<M: FsdpModule>(
//!     worker: &Worker,
//!     mut model: Fsdp<M>,
//!     mut optimizer: ModuleOptimizer,
//! ) -> Result<(), Error> {
//!     let mut step = 0;
//!     let mut checkpoints = CheckpointManager::new("runs/a", worker).with_keep_last(3);
//!     if let Some(folder) = checkpoints.latest()? {
//!         let restore = Restore::new()
//!             .with_model("model", &mut model)
//!             .with_optimizer("adamw", &mut optimizer);
//!         step = restore.load(worker, folder)?.progress.step;
//!     }
//!     while step < 1000 {
//!         // .. train a step ..
//!         step += 1;
//!         if step % 100 == 0 {
//!             let checkpoint = Checkpoint::new(step)
//!                 .with_model("model", &model)
//!                 .with_optimizer("adamw", &optimizer);
//!             checkpoints.save(&checkpoint)?;
//!         }
//!     }
//!     // A checkpoint of the model alone needs no manager.
//!     model.state().save("runs/a/final")?;
//!     model.state_mut().load("runs/a/final")?;
//!     Ok(())
//! }
//! ```
//!
//! Imports point one way: io_error, scalar, state, filter, load_report ← disk, manifest, ranks,
//! scheduler, grad_scaler ← folder, rank_file, sharded_model, optimizer_state ← reader,
//! optimizer_memory ← save, restore, state_dict, pretrained ← merge.
#![cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::checkpoints) is about this module.")]

mod disk;
pub(crate) mod filter;
mod folder;
mod grad_scaler;
mod io_error;
pub(crate) mod load_report;
mod manifest;
mod merge;
mod optimizer_memory;
mod optimizer_state;
pub(crate) mod pretrained;
mod rank_file;
mod ranks;
mod reader;
mod restore;
mod save;
mod scalar;
mod scheduler;
mod sharded_model;
mod state;
pub(crate) mod state_dict;

pub use self::folder::{Listing, list};
#[doc(hidden)]
pub use self::manifest::seal;
/// The readers of files, on bytes in the place of files: for fuzzers. Not a public interface.
#[doc(hidden)]
pub mod parse_bytes {
    pub use super::pretrained::parse_bytes::*;
    pub use super::rank_file::parse_bytes as rank_file;
}
pub use self::manifest::{
    BLOCK, Dtype, KeyEntry, MANIFEST, Manifest, MeshShape, ModelEntry, OptimizerEntry,
    ParameterEntry, Piece, Progress, RandomState, SplitEntry, TensorEntry, UnitEntry, VERSION,
};
pub use self::merge::{MergeOptions, Merged, merge};
pub use self::restore::{Restore, Restored};
pub use self::save::{Checkpoint, CheckpointManager, OnSaveError, SaveOutcome, Saved, WhenBusy};
pub use self::scalar::{Scalar, Scalars};
pub use self::state::{State, StateMut};
pub use crate::error::CheckpointError;
