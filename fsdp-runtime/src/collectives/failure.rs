//! The form in which a [`CollectiveError`] is sent from process to process.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::CollectiveError;
use crate::layout::{Rank, WorldSize};

/// A [`CollectiveError`] that can be serialised: ranks are numbers, and operations are text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum FailureMessage {
    Timeout { op: String, unit: String, missing: Vec<usize>, waited: Duration },
    Mismatch { rank: usize, found: String, peer: usize, expected: String },
    Other { rank: usize, reason: String },
}

impl FailureMessage {
    /// Converts a failure so that `rank` can send it.
    pub(super) fn new(failure: &CollectiveError, rank: Rank) -> Self {
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

    /// Converts a received failure back, in a world of size `world`.
    pub(super) fn into_error(self, world: WorldSize) -> CollectiveError {
        let rank = |index: usize| world.rank(index).unwrap_or(Rank::ZERO);
        match self {
            Self::Timeout { op, unit, missing, waited } => CollectiveError::Timeout {
                op: static_name(&op),
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

/// Returns the program's own string for the name of an operation that another process has sent.
pub(super) fn static_name(op: &str) -> &'static str {
    const NAMES: [&str; 9] = [
        "all_gather",
        "all_reduce",
        "barrier",
        "broadcast",
        "gather",
        "reduce_scatter",
        "scatter",
        "send_recv",
        "split",
    ];
    NAMES.into_iter().find(|&name| name == op).unwrap_or("a collective")
}
