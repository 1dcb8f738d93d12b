//! Errors of collectives.

use std::time::Duration;

use super::text::rank_list;
use crate::layout::Rank;

/// A collective that did not complete.
///
/// Every rank of the process group gets the same error.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// Ranks that did not join before the time-out.
    #[error(
        "{op} of {unit}: rank {missing} did not join within {waited:?}; raise the time-out if the \
         rank is slow, or else make every rank run the same units in the same order",
        missing = rank_list(missing)
    )]
    Timeout {
        /// Name of the collective operation.
        op: &'static str,
        /// The unit, or another description of what was communicated.
        unit: String,
        /// Ranks that did not join.
        missing: Vec<Rank>,
        /// Time for which the other ranks waited.
        waited: Duration,
    },
    /// Ranks that ended their run while others still take steps.
    ///
    /// Only ranks that are threads of one process report this error. Between processes it is a
    /// [`Timeout`](Self::Timeout) or a [`Transport`](Self::Transport) error.
    #[error(
        "{op} of {unit}: rank {ended} has ended its run; give every rank the same number of batches, \
         so that all ranks take the same number of steps",
        ended = rank_list(ended)
    )]
    Ended {
        /// Name of the collective operation.
        op: &'static str,
        /// The unit, or another description of what was communicated.
        unit: String,
        /// Ranks that ended their run.
        ended: Vec<Rank>,
    },
    /// Two ranks that issued different collectives.
    #[error(
        "rank {rank} issued {found} where rank {peer} issued {expected}; every rank must run the \
         same units in the same order"
    )]
    Mismatch {
        /// Rank that issued its collective later.
        rank: Rank,
        /// Collective that `rank` issued.
        found: String,
        /// Rank that issued its collective first.
        peer: Rank,
        /// Collective that `peer` issued.
        expected: String,
    },
    /// The failure of another rank.
    #[error("rank {rank} failed: {reason}")]
    PeerFailed {
        /// Rank that failed first.
        rank: Rank,
        /// Text of that rank's error, or message of its panic.
        reason: String,
    },
    /// A failed call of the communication engine, or a message that cannot be decoded.
    #[error("{op} of {unit} failed on rank {rank}: {reason}")]
    Transport {
        /// Rank whose call failed.
        rank: Rank,
        /// Name of the collective operation.
        op: &'static str,
        /// The unit, or another description of what was communicated.
        unit: String,
        /// The engine's description of the failure.
        reason: String,
    },
    /// A communication thread that has ended.
    #[error(
        "the communication thread of rank {rank} has ended, so its process group cannot be used; \
         look for an earlier error of this rank"
    )]
    Closed {
        /// Rank of the thread.
        rank: Rank,
    },
}

impl CollectiveError {
    /// Returns the rank that caused the error, if the error names one.
    pub(crate) fn failed_rank(&self) -> Option<Rank> {
        match self {
            Self::Timeout { missing, .. } => missing.first().copied(),
            Self::PeerFailed { rank, .. } | Self::Transport { rank, .. } => Some(*rank),
            Self::Mismatch { .. } | Self::Ended { .. } | Self::Closed { .. } => None,
        }
    }
}
