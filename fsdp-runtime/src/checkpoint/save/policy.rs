//! What a manager does about a save that fails, and about a save that is due while another runs.

use crate::checkpoint::ranks::Ranks;
use crate::error::{CheckpointError, CollectiveError, Error};

/// What a [`CheckpointManager`](super::CheckpointManager) does about a save that fails for a reason
/// outside of the program: a full disk, a missing permission, a disk that is no longer mounted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnSaveError {
    /// The error is returned on every rank.
    #[default]
    Fail,
    /// The error is logged as a warning and training continues. The checkpoints that are complete
    /// stay, and the next save is tried as usual.
    ///
    /// Errors of the program, such as ranks that save different things, are returned all the same.
    Warn,
}

/// What a [`CheckpointManager`](super::CheckpointManager) does about a background save that is due
/// while the previous one still runs.
///
/// At most one save is in flight in either case, so that host memory holds at most one copy of this
/// rank's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WhenBusy {
    /// Training waits for the previous save.
    #[default]
    Wait,
    /// The new save is skipped, on every rank. Training waits for the copy of a state only, however
    /// slow the disk is.
    Skip,
}

/// How a save has gone, as [`Saved`](super::Saved) reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SaveOutcome {
    /// The checkpoint is complete.
    Complete,
    /// The checkpoint is being written in the background.
    Started,
    /// No checkpoint is written, because the previous save still runs ([`WhenBusy::Skip`]).
    Skipped,
    /// The save has failed with this error ([`OnSaveError::Warn`]).
    Failed(String),
}

/// Agrees on whether training may continue after a save that has failed with `error`. Every rank
/// calls it with its own error, since a failed save is an error on every rank. Returns the text of the
/// error.
///
/// # Errors
///
/// `error`, if a rank has an error of another cause than the disk, or if the ranks cannot
/// communicate.
pub(super) fn tolerate(ranks: &Ranks, error: Error) -> Result<String, Error> {
    // `None`: another rank has the error.
    let of_disk = match &error {
        Error::Checkpoint(error) => Some(is_of_disk(error)),
        Error::Collective(CollectiveError::PeerFailed { .. }) => None,
        _ => Some(false),
    };
    let text = of_disk.map(|of_disk| (of_disk, error.to_string()));
    let Ok(all) = ranks.exchange("whether a failed save ends the run", text) else {
        return Err(error);
    };
    let mut causes = all.iter().filter_map(|cause| (**cause).clone());
    match causes.clone().any(|(of_disk, _)| !of_disk) {
        true => Err(error),
        false => causes.next().map(|(_, text)| text).ok_or(error),
    }
}

fn is_of_disk(error: &CheckpointError) -> bool {
    matches!(error, CheckpointError::Io { .. } | CheckpointError::Timeout { .. })
}
