//! Collectives that did not complete.

use std::time::Duration;

use crate::layout::Rank;

/// A collective that did not complete. Every rank of the group gets the same one.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// Ranks that did not join in time.
    #[error(
        "{op} of {unit}: rank {missing} did not join within {waited:?}; it is slower than the \
         time-out, or took another branch",
        missing = join(missing)
    )]
    Timeout {
        /// The operation.
        op: &'static str,
        /// The unit, or what else the collective was for.
        unit: String,
        /// The ranks that were waited for.
        missing: Vec<Rank>,
        /// How long.
        waited: Duration,
    },
    /// Ranks that have ended their run, as thread ranks do, while others go on.
    #[error(
        "{op} of {unit}: rank {ended} has ended its run; every rank must take as many steps, and so be \
         given as many batches",
        ended = join(ended)
    )]
    Ended {
        /// The operation.
        op: &'static str,
        /// The unit, or what else the collective was for.
        unit: String,
        /// The ranks that are gone.
        ended: Vec<Rank>,
    },
    /// Ranks that issued different collectives.
    #[error(
        "rank {rank} issued {found} where rank {peer} issued {expected}; ranks must run the same \
         units in the same order"
    )]
    Mismatch {
        /// The rank that came later.
        rank: Rank,
        /// What it issued.
        found: String,
        /// The rank that came first.
        peer: Rank,
        /// What that one issued.
        expected: String,
    },
    /// Another rank failed.
    #[error("rank {rank} failed: {reason}")]
    PeerFailed {
        /// The rank that failed first.
        rank: Rank,
        /// Its error, or its panic's message.
        reason: String,
    },
    /// The engine refused a call, or delivered what cannot be read.
    #[error("rank {rank}, {op} of {unit}: {reason}")]
    Transport {
        /// The rank whose call it was.
        rank: Rank,
        /// The operation.
        op: &'static str,
        /// The unit, or what else the collective was for.
        unit: String,
        /// The engine's reason.
        reason: String,
    },
    /// The rank's communication thread is gone.
    #[error("the communication thread of rank {rank} has ended; the group cannot be used any more")]
    Closed {
        /// The rank.
        rank: Rank,
    },
}

impl CollectiveError {
    /// The rank at fault, where one is.
    pub(crate) fn failed_rank(&self) -> Option<Rank> {
        match self {
            Self::Timeout { missing, .. } => missing.first().copied(),
            Self::PeerFailed { rank, .. } | Self::Transport { rank, .. } => Some(*rank),
            Self::Mismatch { .. } | Self::Ended { .. } | Self::Closed { .. } => None,
        }
    }
}

pub(super) fn join(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
}
