//! What can go wrong when a checkpoint is written or read.

use std::time::Duration;

use burn::tensor::DType;

use crate::layout::Rank;

/// A checkpoint folder that cannot be written or read. Files are named with their paths.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The system refused: a full disk, no permission.
    #[error("cannot {action} {file}: {reason}")]
    Io {
        /// What was tried: `write`, `read`, `create`, ...
        action: &'static str,
        /// The file or folder.
        file: String,
        /// The system's error, by kind: `StorageFull`, `PermissionDenied`, ...
        kind: std::io::ErrorKind,
        /// The system's error, in its words.
        reason: String,
    },
    /// A file of the checkpoint that is not there.
    #[error("{file} is missing; the checkpoint is incomplete")]
    MissingFile {
        /// The file.
        file: String,
    },
    /// A folder whose save never ended.
    #[error("{folder} is a save that did not complete: it has no manifest; load an earlier one")]
    Torn {
        /// The folder.
        folder: String,
    },
    /// Something else where a checkpoint was to be saved.
    #[error("{path} is there and is no checkpoint; a save would delete it: name another folder")]
    NotACheckpoint {
        /// What is there.
        path: String,
    },
    /// A folder with no complete checkpoint in it.
    #[error(
        "{folder} holds no complete checkpoint{}",
        listed("; saves that did not complete", torn)
    )]
    NoCheckpoint {
        /// The folder.
        folder: String,
        /// Folders in it whose save never ended.
        torn: Vec<String>,
    },
    /// A manifest that is not one.
    #[error("{file} is not the manifest of a checkpoint: {reason}")]
    NotAManifest {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// A manifest of a later version of this crate.
    #[error("{file} has format version {found}; this program reads versions up to {supported}")]
    LaterVersion {
        /// The file.
        file: String,
        /// Its version.
        found: u64,
        /// The latest that can be read.
        supported: u64,
    },
    /// A manifest whose parts contradict each other.
    #[error("{file} contradicts itself:{}", lines(problems))]
    Inconsistent {
        /// The file.
        file: String,
        /// Every contradiction.
        problems: Vec<String>,
    },
    /// A rank's file that is not what the manifest says.
    #[error("{file} is damaged: {reason}")]
    Damaged {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A checkpoint of another model, optimizer or scheduler: all differences.
    #[error("{folder} does not fit:{}", lines(differences))]
    Mismatch {
        /// The checkpoint.
        folder: String,
        /// What differs, a line each.
        differences: Vec<String>,
    },
    /// A state in memory that does not fit: all differences.
    #[error("the state does not fit the model:{}", lines(differences))]
    StateMismatch {
        /// What differs, a line each.
        differences: Vec<String>,
    },
    /// A model that is not in a checkpoint, or none named where there are several.
    #[error("{}; it holds {}", no_model(folder, asked), names(models))]
    NoSuchModel {
        /// The checkpoint.
        folder: String,
        /// The model asked for.
        asked: Option<String>,
        /// Those there are.
        models: Vec<String>,
    },
    /// Optimizer state of another shape than its parameter's.
    #[error(
        "the optimizer's `{tensor}` is {found:?}, its parameter's shard {expected:?}; only \
         state of the parameter's shape can be sharded; wrap this optimizer in `WholeParam` and \
         name it with `whole_optimizer`, or use NO_SHARD"
    )]
    NotElementwise {
        /// The parameter's name and the state's.
        tensor: String,
        /// The shard's shape.
        expected: Vec<usize>,
        /// The state's shape.
        found: Vec<usize>,
    },
    /// State of a whole matrix on another rank than its owner: it was loaded from a record of
    /// another layout.
    #[error(
        "the optimizer's `{tensor}` lies on rank {rank} of those that share the model, and rank \
         {owner} steps this matrix; load such state with `Restore::whole_optimizer`, which gives \
         it to the owner"
    )]
    MisplacedState {
        /// The parameter's name and the state's.
        tensor: String,
        /// The rank within its shard group.
        rank: usize,
        /// The owner within the shard group.
        owner: usize,
    },
    /// A tensor of a dtype that checkpoints do not hold.
    #[error(
        "`{tensor}` is {dtype:?}, which a checkpoint cannot hold; use a float or integer dtype"
    )]
    UnsupportedDtype {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: DType,
    },
    /// An optimizer that has state for parameters of no model in the checkpoint.
    #[error(
        "optimizer `{optimizer}` has state for {count} parameters of no model in this checkpoint; \
         add the models it steps"
    )]
    ForeignState {
        /// The optimizer's name in the checkpoint.
        optimizer: String,
        /// How many parameters.
        count: usize,
    },
    /// An optimizer's record that Burn cannot write or read.
    #[error("optimizer `{optimizer}`: {reason}")]
    Record {
        /// The optimizer's name in the checkpoint.
        optimizer: String,
        /// Burn's reason.
        reason: String,
    },
    /// Ranks that save or load different things.
    #[error(
        "rank {rank} has {found} where rank 0 has {expected}; every rank must make the same call"
    )]
    RanksDiffer {
        /// The rank that differs.
        rank: Rank,
        /// What rank 0 has.
        expected: String,
        /// What that rank has.
        found: String,
    },
    /// A save in the background that waited for another rank's file in vain.
    #[error("rank {rank} did not finish its file in {folder} within {waited:?}")]
    Timeout {
        /// The rank's number.
        rank: usize,
        /// The folder being written.
        folder: String,
        /// How long.
        waited: Duration,
    },
}

fn no_model(folder: &str, asked: &Option<String>) -> String {
    match asked {
        Some(name) => format!("{folder} holds no model `{name}`"),
        None => format!("name the model of {folder} that is meant"),
    }
}

fn names(models: &[String]) -> String {
    let names: Vec<_> = models.iter().map(|name| format!("`{name}`")).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

fn lines(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n  {line}")).collect()
}

fn listed(title: &str, names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!("{title}: {}", names.join(", ")) }
}
