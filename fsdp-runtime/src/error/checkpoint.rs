//! Errors of writing and reading checkpoints.

use std::time::Duration;

use burn::tensor::DType;

use super::text::{lines, names};
use crate::layout::Rank;

/// A failure to write or read a checkpoint. File names include their paths.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A failed file operation, such as a write to a full disk.
    #[error("cannot {action} {file}: {reason}")]
    Io {
        /// The operation that failed: `write`, `read`, `create`, ...
        action: &'static str,
        /// Path of the file or folder.
        file: String,
        /// Kind of the operating system's error: `StorageFull`, `PermissionDenied`, ...
        kind: std::io::ErrorKind,
        /// The operating system's error message.
        reason: String,
    },
    /// A checkpoint with a missing file.
    #[error("{file} is missing, so the checkpoint is incomplete; load another checkpoint")]
    MissingFile {
        /// Path of the file.
        file: String,
    },
    /// A folder with a save that did not complete.
    #[error(
        "{folder} has no manifest, because its save did not complete; load an earlier checkpoint"
    )]
    Torn {
        /// Path of the folder.
        folder: String,
    },
    /// A save to a path where something other than a checkpoint exists.
    #[error(
        "{path} exists and is no checkpoint, and saving there would delete it; choose another folder"
    )]
    NotACheckpoint {
        /// Path of the existing file or folder.
        path: String,
    },
    /// A folder that contains no complete checkpoint.
    #[error(
        "{folder} contains no complete checkpoint{}",
        listed("; saves that did not complete", torn)
    )]
    NoCheckpoint {
        /// Path of the folder.
        folder: String,
        /// Names of the folder's saves that did not complete.
        torn: Vec<String>,
    },
    /// A file that cannot be parsed as a manifest.
    #[error("{file} is not the manifest of a checkpoint: {reason}")]
    NotAManifest {
        /// Path of the file.
        file: String,
        /// Description of the fault.
        reason: String,
    },
    /// A manifest that a later version of this crate wrote.
    #[error(
        "{file} has format version {found}, but this program reads versions up to {supported}; \
         use a newer version of `fsdp-runtime`"
    )]
    LaterVersion {
        /// Path of the file.
        file: String,
        /// Format version of the manifest.
        found: u64,
        /// Latest format version that this program reads.
        supported: u64,
    },
    /// A manifest that contradicts itself.
    #[error("{file} contradicts itself:{}", lines(problems))]
    Inconsistent {
        /// Path of the file.
        file: String,
        /// Descriptions of all contradictions.
        problems: Vec<String>,
    },
    /// A rank's file that differs from its description in the manifest.
    #[error("{file} is damaged: {reason}; load another checkpoint")]
    Damaged {
        /// Path of the file.
        file: String,
        /// Description of the damage.
        reason: String,
    },
    /// A checkpoint that does not fit the model, optimizer or scheduler.
    #[error("{folder} does not fit this program:{}", lines(differences))]
    Mismatch {
        /// Path of the checkpoint.
        folder: String,
        /// All differences, one line each.
        differences: Vec<String>,
    },
    /// A state in memory that does not fit the model.
    #[error("the state does not fit the model:{}", lines(differences))]
    StateMismatch {
        /// All differences, one line each.
        differences: Vec<String>,
    },
    /// A filter of a state dict that does not fit the model.
    #[error("the filter of a state dict does not fit the model: {reason}")]
    Filter {
        /// Description of the fault, with the nearest paths of the model.
        reason: String,
    },
    /// A model that is not in the checkpoint, or a missing name where there are several models.
    #[error("{}; it holds {}", no_model(folder, asked), names(models))]
    NoSuchModel {
        /// Path of the checkpoint.
        folder: String,
        /// Name of the requested model, if one was given.
        asked: Option<String>,
        /// Names of the models in the checkpoint.
        models: Vec<String>,
    },
    /// Optimizer state whose shape differs from the shape of its parameter.
    #[error(
        "the optimizer's `{tensor}` has the shape {found:?}, but its parameter's shard has \
         {expected:?}, and only state of the parameter's shape can be sharded; wrap the optimizer in \
         `WholeParam` and name it with `whole_optimizer`, or use NO_SHARD"
    )]
    NotElementwise {
        /// Name of the parameter, followed by the name of the state.
        tensor: String,
        /// Shape of the parameter's shard.
        expected: Vec<usize>,
        /// Shape of the state.
        found: Vec<usize>,
    },
    /// Optimizer state of a whole matrix on a rank that does not step the matrix.
    ///
    /// This happens when the state was loaded from a record with another layout.
    #[error(
        "the optimizer's `{tensor}` is on rank {rank} of the shard group, but rank {owner} steps \
         this matrix; load the state with `Restore::whole_optimizer`, which gives it to the owner"
    )]
    MisplacedState {
        /// Name of the parameter, followed by the name of the state.
        tensor: String,
        /// Rank within the shard group that has the state.
        rank: usize,
        /// Rank within the shard group that steps the matrix.
        owner: usize,
    },
    /// A tensor of a dtype that checkpoints do not support.
    #[error(
        "`{tensor}` is {dtype:?}, which checkpoints do not support; use a float or integer dtype"
    )]
    UnsupportedDtype {
        /// Name of the tensor.
        tensor: String,
        /// Dtype of the tensor.
        dtype: DType,
    },
    /// An optimizer with state for parameters that belong to no model in the checkpoint.
    #[error(
        "optimizer `{optimizer}` has state for {count} parameters that belong to no model in this \
         checkpoint; add the models that the optimizer steps"
    )]
    ForeignState {
        /// Name of the optimizer in the checkpoint.
        optimizer: String,
        /// Number of such parameters.
        count: usize,
    },
    /// An optimizer record that cannot be written or read.
    #[error("the record of optimizer `{optimizer}` cannot be written or read: {reason}")]
    Record {
        /// Name of the optimizer in the checkpoint.
        optimizer: String,
        /// Burn's error message, or a description of the fault.
        reason: String,
    },
    /// Ranks that save or load different objects.
    #[error(
        "rank {rank} has {found} where rank 0 has {expected}; save or load the same objects on every \
         rank"
    )]
    RanksDiffer {
        /// Rank that differs from rank 0.
        rank: Rank,
        /// The objects that rank 0 saves or loads.
        expected: String,
        /// The objects that `rank` saves or loads.
        found: String,
    },
    /// A background save that waited too long for the file of another rank.
    #[error(
        "rank {rank} did not finish its file in {folder} within {waited:?}; look for an error of this \
         rank, and save again"
    )]
    Timeout {
        /// Rank that did not finish.
        rank: usize,
        /// Path of the folder being written.
        folder: String,
        /// Time for which the save waited.
        waited: Duration,
    },
}

/// Returns the first half of the text of [`CheckpointError::NoSuchModel`].
fn no_model(folder: &str, asked: &Option<String>) -> String {
    match asked {
        Some(name) => format!("{folder} holds no model `{name}`"),
        None => format!("name one of the models in {folder}"),
    }
}

/// Returns the title and the names, or nothing where there are no names.
fn listed(title: &str, names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!("{title}: {}", names.join(", ")) }
}
