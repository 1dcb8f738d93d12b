//! The ranks that receive, or provide, a full state.

use crate::error::ShardError;
use crate::layout::{Rank, WorldSize};

/// Ranks that receive, or provide, a full state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipient {
    /// One rank receives or provides the state. The other ranks make the same call and have an
    /// empty state.
    Only(Rank),
    /// Every rank receives or provides the state.
    All,
}

impl Recipient {
    /// Returns whether `rank` is one of these ranks.
    pub(super) fn is(self, rank: Rank) -> bool {
        self == Self::All || self == Self::Only(rank)
    }

    /// Checks that a single rank is one of `world`.
    pub(super) fn check(self, world: WorldSize) -> Result<(), ShardError> {
        match self {
            Self::Only(rank) if rank.index() >= world.size() => Err(ShardError::InvalidOption {
                option: "Recipient::Only",
                value: rank.to_string(),
                expected: format!("use a rank of this world of {world}"),
            }),
            _ => Ok(()),
        }
    }
}
