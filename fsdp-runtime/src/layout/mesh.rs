//! Ranks and world sizes, as types that cannot be swapped for one another.

use std::fmt;

/// Numbers of ranks that form no mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// A process group without ranks.
    #[error("a world size of 0 has no rank to train on; use at least 1")]
    EmptyWorld,
    /// Shard groups whose size does not divide the number of ranks.
    #[error(
        "{world} ranks cannot be split into groups of {shard}; set `shard_size`, by default the ranks \
         of one machine, to a divisor of {world}"
    )]
    UnevenMesh {
        /// The number of ranks.
        world: WorldSize,
        /// The size asked for, in ranks.
        shard: usize,
    },
}

/// The number of ranks of a group; at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorldSize(usize);

impl WorldSize {
    /// A group of one.
    pub(crate) const ONE: Self = Self(1);

    /// A group of `size` ranks.
    ///
    /// # Errors
    ///
    /// [`MeshError::EmptyWorld`] for a size of 0.
    pub fn new(size: usize) -> Result<Self, MeshError> {
        if size == 0 {
            return Err(MeshError::EmptyWorld);
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

/// How ranks are laid out: in `replicas` groups of `shard_size` ranks each, row by row, as PyTorch's
/// device mesh `("replicate", "shard")` is. Parameters are sharded within a group, and every group
/// holds all of them. A 1-D mesh has one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// This process's place among all.
    pub rank: Rank,
    /// The number of ranks.
    pub world: WorldSize,
    shard: WorldSize,
}

impl Mesh {
    /// Every rank holds one shard.
    pub const fn new(rank: Rank, world: WorldSize) -> Self {
        Self { rank, world, shard: world }
    }

    /// Groups of `shard_size` ranks.
    ///
    /// # Errors
    ///
    /// [`MeshError::UnevenMesh`] where groups of that size do not fill the world, and
    /// [`MeshError::EmptyWorld`] for a size of 0.
    pub fn grouped(self, shard_size: usize) -> Result<Self, MeshError> {
        let shard = WorldSize::new(shard_size)?;
        if !self.world.size().is_multiple_of(shard_size) {
            return Err(MeshError::UnevenMesh { world: self.world, shard: shard_size });
        }
        Ok(Self { shard, ..self })
    }

    /// The number of ranks that share one copy of the parameters.
    pub const fn shard_size(self) -> WorldSize {
        self.shard
    }

    /// This rank's place in its group: which shard it holds.
    pub const fn shard_rank(self) -> Rank {
        Rank(self.rank.0 % self.shard.0)
    }

    /// The number of copies of the parameters.
    pub const fn replicas(self) -> WorldSize {
        WorldSize(self.world.0 / self.shard.0)
    }

    /// Which copy this rank holds a shard of.
    pub const fn replica(self) -> Rank {
        Rank(self.rank.0 / self.shard.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_fill_one_group_after_the_other() {
        let world = WorldSize::new(6).unwrap();
        let place = |rank| {
            let mesh = Mesh::new(Rank(rank), world).grouped(3).unwrap();
            (mesh.replica().index(), mesh.shard_rank().index())
        };
        let places: Vec<_> = (0..6).map(place).collect();
        assert_eq!(places, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
        let mesh = Mesh::new(Rank(4), world);
        assert_eq!((mesh.replicas().size(), mesh.shard_rank()), (1, Rank(4)));
    }

    #[test]
    fn a_group_size_that_leaves_ranks_over_is_an_error() {
        let mesh = Mesh::new(Rank(0), WorldSize::new(6).unwrap());
        let error = mesh.grouped(4).unwrap_err();
        assert!(matches!(error, MeshError::UnevenMesh { shard: 4, .. }), "{error}");
        assert_eq!(mesh.grouped(0), Err(MeshError::EmptyWorld));
    }
}
