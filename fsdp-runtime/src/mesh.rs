//! Ranks and world sizes, as types that cannot be swapped for one another.

use std::fmt;

use crate::error::ShardError;

/// The number of ranks of a group; at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorldSize(usize);

impl WorldSize {
    /// A group of `size` ranks.
    ///
    /// # Errors
    ///
    /// [`ShardError::EmptyWorld`] for a size of 0.
    pub fn new(size: usize) -> Result<Self, ShardError> {
        if size == 0 {
            return Err(ShardError::EmptyWorld);
        }
        Ok(Self(size))
    }

    /// The number of ranks.
    pub const fn size(self) -> usize {
        self.0
    }

    /// All ranks of the group, in order.
    pub fn ranks(self) -> impl ExactSizeIterator<Item = Rank> {
        (0..self.0).map(Rank)
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A process or thread of a group, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank(usize);

impl Rank {
    /// The rank that broadcasts weights and collects full states.
    pub const ZERO: Self = Self(0);

    /// The rank's position in its group.
    pub const fn index(self) -> usize {
        self.0
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A 1-D mesh: every rank of `world` holds one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// This process's place.
    pub rank: Rank,
    /// The number of shards.
    pub world: WorldSize,
}
