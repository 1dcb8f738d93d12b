//! A [`CollectiveError`] as it goes from process to process.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::CollectiveError;
use crate::layout::{Rank, WorldSize};

/// What has ended the world, with ranks as numbers and operations as text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Failure {
    Timeout { op: String, unit: String, missing: Vec<usize>, waited: Duration },
    Mismatch { rank: usize, found: String, peer: usize, expected: String },
    Other { rank: usize, reason: String },
}

impl Failure {
    /// To send, from `rank`.
    pub(crate) fn sent(failure: &CollectiveError, rank: Rank) -> Self {
        match failure {
            CollectiveError::Timeout { op, unit, missing, waited } => Self::Timeout {
                op: (*op).to_string(),
                unit: unit.clone(),
                missing: missing.iter().map(|rank| rank.index()).collect(),
                waited: *waited,
            },
            CollectiveError::Mismatch { rank, found, peer, expected } => Self::Mismatch {
                rank: rank.index(),
                found: found.clone(),
                peer: peer.index(),
                expected: expected.clone(),
            },
            CollectiveError::PeerFailed { rank, reason } => {
                Self::Other { rank: rank.index(), reason: reason.clone() }
            }
            other => Self::Other { rank: rank.index(), reason: other.to_string() },
        }
    }

    /// As it has arrived, in a world of that size.
    pub(crate) fn received(self, world: WorldSize) -> CollectiveError {
        let rank = |index: usize| world.ranks().nth(index).unwrap_or(Rank::ZERO);
        match self {
            Self::Timeout { op, unit, missing, waited } => CollectiveError::Timeout {
                op: known(&op),
                unit,
                missing: missing.into_iter().map(rank).collect(),
                waited,
            },
            Self::Mismatch { rank: later, found, peer, expected } => {
                CollectiveError::Mismatch { rank: rank(later), found, peer: rank(peer), expected }
            }
            Self::Other { rank: failed, reason } => {
                CollectiveError::PeerFailed { rank: rank(failed), reason }
            }
        }
    }
}

/// The name of an operation, as the program has it.
pub(crate) fn known(op: &str) -> &'static str {
    const NAMES: [&str; 8] = [
        "all_gather",
        "all_reduce",
        "barrier",
        "broadcast",
        "gather",
        "reduce_scatter",
        "scatter",
        "split",
    ];
    NAMES.into_iter().find(|&name| name == op).unwrap_or("a collective")
}
