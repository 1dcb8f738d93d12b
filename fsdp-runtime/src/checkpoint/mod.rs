//! Checkpoints: folders that each rank writes its part of, and that any world size, strategy and
//! wrapping reads.
//!
//! A folder holds `rank-00000.safetensors` and so on, each rank's elements of models and
//! optimizers, and `manifest.json`, which says whose they are and which elements of the full
//! tensors, with checksums. What a rank of another world needs lies in several files: it reads the
//! byte ranges it needs, memory-mapped.
//!
//! ```ignore
//! let mut checkpoints = CheckpointManager::new("runs/a", &worker).with_keep_last(3);
//! if let Some(folder) = checkpoints.latest()? {
//!     let restore = Restore::new().model("model", &mut model).optimizer("adamw", &mut optimizer);
//!     step = restore.load(&worker, folder)?.progress.step;
//! }
//! // every so many steps
//! checkpoints.save(&Checkpoint::new(step).model("model", &model).optimizer("adamw", &optimizer))?;
//! ```
//!
//! Imports point one way: scalar ← manifest ← rank file ← reading (`read`, `restore`) and writing
//! (`write`, `save`); `model`, `optimizer`, `own` and `scheduler` are what is read from and put back
//! into. `merge` needs neither model nor ranks.

mod folder;
mod grad_scaler;
mod handle;
mod manifest;
mod merge;
pub(crate) mod model;
pub(crate) mod optimizer;
pub(crate) mod own;
pub(crate) mod pretrained;
mod rank_file;
pub(crate) mod ranks;
pub(crate) mod read;
mod restore;
mod save;
mod scalar;
mod scheduler;
mod seal;
mod sink;
pub(crate) mod state_dict;
mod write;

use std::path::Path;

pub use crate::error::CheckpointError;
pub use folder::{Listing, list};
pub use handle::{State, StateMut};
pub use manifest::{
    BLOCK, Dtype, KeyEntry, MANIFEST, Manifest, MeshShape, ModelEntry, OptimizerEntry,
    ParameterEntry, Piece, Progress, RandomState, TensorEntry, UnitEntry, VERSION,
};
pub use merge::{MergeOptions, Merged, merge};
pub use restore::{Restore, Restored};
pub use save::{Checkpoint, CheckpointManager, Saved};
pub use scalar::{Scalar, Scalars};
#[doc(hidden)]
pub use seal::seal;

/// Names the file, and what was done to it, in an error of the system's.
fn io(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> CheckpointError + use<> {
    let file = path.display().to_string();
    move |error| CheckpointError::Io {
        action,
        file: file.clone(),
        kind: error.kind(),
        reason: error.to_string(),
    }
}
