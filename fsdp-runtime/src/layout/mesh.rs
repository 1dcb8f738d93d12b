//! Ranks, world sizes, and the mesh that arranges ranks in shard groups and replicas.
//!
//! [`Rank`] and [`WorldSize`] are separate types, so that a call cannot swap them.

use std::fmt;

use super::context_part::ContextPart;

/// A world size or shard size that cannot form a [`Mesh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// A process group of 0 ranks.
    #[error("a world size of 0 has no ranks to train on; use at least 1")]
    EmptyWorld,
    /// A shard group size that does not divide the number of ranks.
    #[error(
        "{world} ranks cannot be split into groups of {shard}; set `shard_size` to a divisor of \
         {world} (default: the number of ranks on one machine)"
    )]
    UnevenMesh {
        /// Number of all ranks.
        world: WorldSize,
        /// The requested size of a shard group, in ranks.
        shard: usize,
    },
    /// A number of tensor parallel ranks that does not divide the number of ranks.
    #[error(
        "{world} ranks cannot be split into groups of {tensor} tensor parallel ranks; set \
         `tensor_parallel` to a divisor of {world}"
    )]
    UnevenTensorParallel {
        /// Number of all ranks.
        world: WorldSize,
        /// The requested number of tensor parallel ranks.
        tensor: usize,
    },
    /// A number of context parallel ranks that does not divide the number of data parallel ranks.
    #[error(
        "{world} data parallel ranks cannot be split into groups of {context} context parallel ranks; set \
         `context_parallel` to a divisor of {world}"
    )]
    UnevenContextParallel {
        /// Number of data parallel ranks.
        world: WorldSize,
        /// The requested number of context parallel ranks.
        context: usize,
    },
    /// Rows that sequence parallel ranks cannot split in equal parts.
    #[error(
        "rows of {length} positions cannot be split over {tensor} tensor parallel ranks, as `sequence_parallel` \
         asks; pad rows to {} positions, a multiple of {tensor}",
        length.next_multiple_of(tensor.size())
    )]
    UnevenSequence {
        /// Number of positions of a row.
        length: usize,
        /// Number of tensor parallel ranks.
        tensor: WorldSize,
    },
    /// Rows that context parallel ranks cannot split in equal parts.
    #[error(
        "rows of {length} positions cannot be split over {context} context parallel ranks, each of which has \
         two blocks; pad rows to {} positions, a multiple of {}",
        length.next_multiple_of(2 * context.size()), 2 * context.size()
    )]
    UnevenRows {
        /// Number of positions of a row.
        length: usize,
        /// Number of context parallel ranks.
        context: WorldSize,
    },
}

/// Number of ranks of a process group, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorldSize(usize);

impl WorldSize {
    /// The size of a process group with a single rank.
    pub(crate) const ONE: Self = Self(1);

    /// Creates the size of a process group of `size` ranks.
    ///
    /// # Errors
    ///
    /// Returns [`MeshError::EmptyWorld`] for a size of 0.
    pub fn new(size: usize) -> Result<Self, MeshError> {
        if size == 0 {
            return Err(MeshError::EmptyWorld);
        }
        Ok(Self(size))
    }

    /// Returns the number of ranks.
    pub const fn size(self) -> usize {
        self.0
    }

    /// Returns the rank with a number; `None` for one that the process group does not have.
    pub fn rank(self, index: usize) -> Option<Rank> {
        (index < self.0).then_some(Rank(index))
    }

    /// Returns all ranks of the process group, in ascending order.
    pub fn ranks(self) -> impl ExactSizeIterator<Item = Rank> {
        (0..self.0).map(Rank)
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A member of a process group, a process or a thread, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank(usize);

/// Compares the rank's number: `worker.rank() == 0`.
impl PartialEq<usize> for Rank {
    fn eq(&self, index: &usize) -> bool {
        self.0 == *index
    }
}

/// Compares the rank's number: `worker.rank() < 2`.
impl PartialOrd<usize> for Rank {
    fn partial_cmp(&self, index: &usize) -> Option<std::cmp::Ordering> {
        self.0.partial_cmp(index)
    }
}

impl Rank {
    /// The rank that broadcasts initial weights and by default receives full state dicts.
    pub const ZERO: Self = Self(0);

    /// Returns the rank's number in its process group, from 0.
    pub const fn index(self) -> usize {
        self.0
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The arrangement of ranks for sharding: `replicas` groups of `shard_size` ranks each.
///
/// Ranks fill one shard group after the other, as in PyTorch's device mesh
/// `("replicate", "shard")`. The parameters are sharded within a shard group, and each group holds
/// a full copy of the model. A 1-D mesh has one group.
///
/// With [tensor parallel](crate::FsdpOptions::with_tensor_parallel) ranks, each coordinate of the mesh is
/// a group of them, neighbours among all ranks: `("replicate", "shard", "tensor")`.
///
/// [Context parallel](crate::FsdpOptions::with_context_parallel) ranks have parts of the same rows. They are data
/// parallel ranks, neighbours among these, and have shards of their own: `("replicate", "shard", "context",
/// "tensor")`, where parameters are sharded over `shard` and `context`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mesh {
    /// This rank's number among all ranks; with tensor parallel ranks, the number of its group of them.
    pub rank: Rank,
    /// Number of ranks in all; with tensor parallel ranks, the number of their groups.
    pub world: WorldSize,
    /// Number of ranks in a shard group.
    shard: WorldSize,
    /// Number of ranks that have parts of the same rows.
    context: WorldSize,
    /// Number of tensor parallel ranks.
    tensor: WorldSize,
    /// This rank's number among its tensor parallel ranks.
    tensor_rank: Rank,
    /// Whether each tensor parallel rank has a part of the positions outside of split layers.
    sequence: bool,
}

impl Mesh {
    /// Creates a 1-D mesh: all ranks form one shard group.
    pub const fn new(rank: Rank, world: WorldSize) -> Self {
        let one = WorldSize::ONE;
        let (tensor_rank, sequence) = (Rank::ZERO, false);
        Self { rank, world, shard: world, context: one, tensor: one, tensor_rank, sequence }
    }

    /// Returns the mesh of the groups of `ranks` tensor parallel ranks, in a 1-D mesh of all ranks.
    ///
    /// # Errors
    ///
    /// Returns [`MeshError::UnevenTensorParallel`] if `ranks` does not divide the number of ranks, and
    /// [`MeshError::EmptyWorld`] if it is 0.
    pub fn tensor_parallel(self, ranks: usize) -> Result<Self, MeshError> {
        let tensor = WorldSize::new(ranks)?;
        let Self { rank, world, .. } = self;
        if !world.size().is_multiple_of(ranks) {
            return Err(MeshError::UnevenTensorParallel { world, tensor: ranks });
        }
        let (rank, tensor_rank) = (Rank(rank.0 / ranks), Rank(rank.0 % ranks));
        Ok(Self { tensor, tensor_rank, ..Self::new(rank, WorldSize(world.0 / ranks)) })
    }

    /// Returns the 1-D mesh of all ranks, tensor parallel ones included.
    pub(crate) const fn of_all_ranks(self) -> Self {
        let Self { rank, tensor, tensor_rank, .. } = self;
        let rank = Rank(rank.0 * tensor.0 + tensor_rank.0);
        Self::new(rank, self.all_ranks())
    }

    /// Returns the number of all ranks, tensor parallel ones included.
    pub const fn all_ranks(self) -> WorldSize {
        WorldSize(self.world.0 * self.tensor.0)
    }

    /// Returns the number of tensor parallel ranks, each of which has a part of the split matrices.
    pub const fn tensor_size(self) -> WorldSize {
        self.tensor
    }

    /// Returns this rank's number among its tensor parallel ranks.
    pub const fn tensor_rank(self) -> Rank {
        self.tensor_rank
    }

    /// Returns this mesh with sequence parallel: whether each tensor parallel rank has a part of the positions
    /// outside of split layers.
    pub(crate) const fn sequence_parallel(self, on: bool) -> Self {
        Self { sequence: on, ..self }
    }

    /// Returns whether each of several tensor parallel ranks has a part of the positions outside of split layers.
    pub const fn splits_sequence(self) -> bool {
        self.sequence && self.tensor.0 > 1
    }

    /// Returns this mesh with groups of `ranks` context parallel ranks, which have parts of the same rows.
    ///
    /// # Errors
    ///
    /// Returns [`MeshError::UnevenContextParallel`] if `ranks` does not divide the number of data parallel ranks,
    /// and [`MeshError::EmptyWorld`] if it is 0.
    pub fn context_parallel(self, ranks: usize) -> Result<Self, MeshError> {
        let context = WorldSize::new(ranks)?;
        if !self.world.size().is_multiple_of(ranks) {
            return Err(MeshError::UnevenContextParallel { world: self.world, context: ranks });
        }
        Ok(Self { context, ..self })
    }

    /// Returns the number of context parallel ranks, each of which has a part of the same rows.
    pub const fn context_size(self) -> WorldSize {
        self.context
    }

    /// Returns this rank's number among its context parallel ranks.
    pub const fn context_rank(self) -> Rank {
        Rank(self.rank.0 % self.context.0)
    }

    /// Returns the number of ranks that take different rows: the data parallel ranks, of which those that have
    /// parts of the same rows count once.
    pub const fn batch_ranks(self) -> WorldSize {
        WorldSize(self.world.0 / self.context.0)
    }

    /// Returns this rank's number among those that take different rows. Context parallel ranks and tensor
    /// parallel ranks of one group have the same number.
    pub const fn batch_rank(self) -> Rank {
        Rank(self.rank.0 / self.context.0)
    }

    /// Returns the positions that this rank has of rows of `length` positions. It has all of them without
    /// context parallel ranks.
    ///
    /// # Errors
    ///
    /// Returns [`MeshError::UnevenRows`] if twice the number of context parallel ranks does not divide `length`.
    pub fn context_part(self, length: usize) -> Result<ContextPart, MeshError> {
        let context = self.context;
        if context != WorldSize::ONE && !length.is_multiple_of(2 * context.0) {
            return Err(MeshError::UnevenRows { length, context });
        }
        Ok(ContextPart::new(length, context.0, self.context_rank().0))
    }

    /// Returns this mesh with shard groups of `shard_size` ranks.
    ///
    /// # Errors
    ///
    /// Returns [`MeshError::UnevenMesh`] if `shard_size` does not divide the number of ranks, and
    /// [`MeshError::EmptyWorld`] if it is 0.
    pub fn grouped(self, shard_size: usize) -> Result<Self, MeshError> {
        let shard = WorldSize::new(shard_size)?;
        if !self.world.size().is_multiple_of(shard_size) {
            return Err(MeshError::UnevenMesh { world: self.world, shard: shard_size });
        }
        Ok(Self { shard, ..self })
    }

    /// Returns the number of ranks in a shard group, which together hold one copy of the
    /// parameters.
    pub const fn shard_size(self) -> WorldSize {
        self.shard
    }

    /// Returns this rank's number in its shard group, which is also the number of its shard.
    pub const fn shard_rank(self) -> Rank {
        Rank(self.rank.0 % self.shard.0)
    }

    /// Returns the number of shard groups, each of which holds one copy of the parameters.
    pub const fn replicas(self) -> WorldSize {
        WorldSize(self.world.0 / self.shard.0)
    }

    /// Returns the number of this rank's shard group.
    pub const fn replica(self) -> Rank {
        Rank(self.rank.0 / self.shard.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_fill_one_shard_group_after_the_other() {
        let world = WorldSize::new(6).unwrap();
        let coordinate = |rank| {
            let mesh = Mesh::new(Rank(rank), world).grouped(3).unwrap();
            (mesh.replica().index(), mesh.shard_rank().index())
        };
        let coordinates: Vec<_> = (0..6).map(coordinate).collect();
        assert_eq!(coordinates, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
        let mesh = Mesh::new(Rank(4), world);
        assert_eq!((mesh.replicas().size(), mesh.shard_rank()), (1, Rank(4)));
    }

    #[test]
    fn tensor_parallel_ranks_are_neighbours() {
        let world = WorldSize::new(8).unwrap();
        let coordinate = |rank| {
            let mesh = Mesh::new(Rank(rank), world).tensor_parallel(2).unwrap().grouped(2).unwrap();
            [mesh.replica(), mesh.shard_rank(), mesh.tensor_rank()].map(Rank::index)
        };
        let coordinates: Vec<_> = (0..8).map(coordinate).collect();
        let expected = [
            [0, 0, 0],
            [0, 0, 1],
            [0, 1, 0],
            [0, 1, 1],
            [1, 0, 0],
            [1, 0, 1],
            [1, 1, 0],
            [1, 1, 1],
        ];
        assert_eq!(coordinates, expected);
        let error = Mesh::new(Rank(0), world).tensor_parallel(3).unwrap_err();
        assert!(matches!(error, MeshError::UnevenTensorParallel { tensor: 3, .. }), "{error}");
    }

    #[test]
    fn context_parallel_ranks_are_neighbours_among_data_parallel_ranks() {
        let world = WorldSize::new(8).unwrap();
        let coordinate = |rank| {
            let mesh = Mesh::new(Rank(rank), world).tensor_parallel(2).unwrap();
            let mesh = mesh.context_parallel(2).unwrap();
            [mesh.batch_rank(), mesh.context_rank(), mesh.tensor_rank()].map(Rank::index)
        };
        let coordinates: Vec<_> = (2..6).map(coordinate).collect();
        assert_eq!(coordinates, [[0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 1]]);
        let mesh = Mesh::new(Rank(5), world);
        let error = mesh.context_parallel(3).unwrap_err();
        assert!(matches!(error, MeshError::UnevenContextParallel { context: 3, .. }), "{error}");
        let mesh = mesh.context_parallel(4).unwrap();
        assert_eq!((mesh.batch_ranks().size(), mesh.context_rank()), (2, Rank(1)));
        let text = mesh.context_part(90).unwrap_err().to_string();
        assert!(text.contains("pad rows to 96 positions, a multiple of 8"), "{text}");
        assert_eq!(mesh.context_part(96).unwrap().blocks(), [12..24, 72..84]);
        assert_eq!(Mesh::new(Rank(0), world).context_part(5).unwrap().blocks(), [0..5, 5..5]);
    }

    #[test]
    fn a_rank_is_compared_with_a_number() {
        let ranks: Vec<_> = WorldSize::new(3).unwrap().ranks().collect();
        assert!(ranks[0] == 0 && ranks[2] != 0 && ranks[1] < 2 && ranks[2] >= 2);
    }

    #[test]
    fn a_shard_size_that_does_not_divide_the_world_is_an_error() {
        let mesh = Mesh::new(Rank(0), WorldSize::new(6).unwrap());
        let error = mesh.grouped(4).unwrap_err();
        assert!(matches!(error, MeshError::UnevenMesh { shard: 4, .. }), "{error}");
        assert_eq!(mesh.grouped(0), Err(MeshError::EmptyWorld));
    }
}
