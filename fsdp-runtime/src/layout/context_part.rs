//! The part of each row that a context parallel rank has.

use std::ops::Range;

use burn::tensor::kind::Basic;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_kernels::Places;

/// The positions of each row that a [context parallel](crate::FsdpOptions::with_context_parallel) rank has.
///
/// A row of `length` positions is cut into `2 · ranks` blocks of equal length. Rank `r` has block `r` and block
/// `2 · ranks - 1 - r`. So each rank has the same work under causal attention, where late positions see more keys
/// than early ones. A single rank has the whole row.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use fsdp_runtime::{Mesh, Rank, WorldSize};
///
/// # fn main() -> Result<(), fsdp_runtime::errors::MeshError> {
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let world = WorldSize::new(2)?;
/// let rank = world.rank(1).expect("two ranks");
/// // In training, `model.stats().mesh()`.
/// let part = Mesh::new(rank, world).context_parallel(2)?.context_part(8)?;
/// let row = Tensor::<1>::from_floats([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &device);
/// let own = part.of(row, 0).into_data();
/// own.assert_eq(&[2.0_f32, 3.0, 4.0, 5.0].into(), true);
/// assert_eq!(part.blocks(), [2..4, 4..6]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextPart {
    length: usize,
    ranks: usize,
    rank: usize,
}

impl ContextPart {
    /// Returns a rank's part of rows of `length` positions, which `2 · ranks` divides unless there is one rank.
    pub(super) const fn new(length: usize, ranks: usize, rank: usize) -> Self {
        Self { length, ranks, rank }
    }

    /// Returns the part of another rank.
    pub(crate) const fn of_rank(self, rank: usize) -> Self {
        Self { rank, ..self }
    }

    /// Returns the parts of all ranks, in the order in which a ring passes them to this one: first its own, then that
    /// of the rank before, and so on.
    pub(crate) fn around(self) -> impl Iterator<Item = Self> {
        let ranks = self.ranks;
        (0..ranks).map(move |step| self.of_rank((self.rank + ranks - step) % ranks))
    }

    /// Returns the number of the part's positions before a position of the row.
    pub(crate) fn before(&self, position: usize) -> usize {
        let in_block = |block: Range<usize>| position.clamp(block.start, block.end) - block.start;
        self.blocks().into_iter().map(in_block).sum()
    }

    /// Returns the number of positions of a whole row.
    pub const fn length(&self) -> usize {
        self.length
    }

    /// Returns the number of positions of the part.
    pub const fn len(&self) -> usize {
        self.length / self.ranks
    }

    /// Returns whether rows have no positions.
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the positions of the part, as two blocks in ascending order. The second block of a single rank is
    /// empty.
    pub fn blocks(&self) -> [Range<usize>; 2] {
        let ranks = self.ranks;
        if ranks == 1 {
            return [0..self.length, self.length..self.length];
        }
        let block = self.length / (2 * ranks);
        [self.rank, 2 * ranks - 1 - self.rank].map(|at| at * block..(at + 1) * block)
    }

    /// Returns the places of the part's positions in a row.
    pub(crate) fn places(&self) -> Places {
        Places::blocks(self.length, self.blocks())
    }

    /// Returns the positions of the part, in ascending order.
    pub fn indices(&self) -> impl Iterator<Item = usize> + use<> {
        self.blocks().into_iter().flatten()
    }

    /// Returns the positions of the part, in ascending order: `[len]`. For tables of positions such as those of
    /// GPT-2.
    pub fn positions(&self, device: &Device) -> Tensor<1, Int> {
        let positions: Vec<i64> = self.indices().map(|at| at as i64).collect();
        let shape = [positions.len()];
        Tensor::from_data(TensorData::new(positions, shape), device)
    }

    /// Returns the part of a tensor that has whole rows along dimension `dim`.
    ///
    /// # Panics
    ///
    /// If the tensor does not have [`length`](Self::length) elements along the dimension.
    pub fn of<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, dim: usize) -> Tensor<D, K> {
        let found = tensor.dims()[dim];
        assert_eq!(found, self.length, "dimension {dim} must have all positions of a row");
        let [first, second] = self.blocks();
        let block = |block: &Range<usize>| tensor.clone().narrow(dim, block.start, block.len());
        if first.end == second.start {
            return tensor.clone().narrow(dim, first.start, self.len());
        }
        Tensor::cat(vec![block(&first), block(&second)], dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_all_ranks_are_the_row() {
        for (ranks, length) in [(1, 7), (2, 8), (3, 18), (4, 8)] {
            let part = ContextPart::new(length, ranks, 0);
            let mut all: Vec<_> =
                (0..ranks).flat_map(|rank| part.of_rank(rank).indices()).collect();
            assert_eq!(all.len(), length);
            all.sort_unstable();
            assert!(all.into_iter().eq(0..length));
            for rank in 0..ranks {
                let own: Vec<_> = part.of_rank(rank).indices().collect();
                assert!(own.is_sorted() && own.len() == part.len());
            }
        }
    }

    #[test]
    fn a_ring_passes_each_part_once() {
        let part = ContextPart::new(24, 4, 1);
        let ranks: Vec<_> = part.around().map(|part| part.rank).collect();
        assert_eq!(ranks, [1, 0, 3, 2]);
        for part in part.around() {
            for position in 0..=24 {
                let expected = part.indices().filter(|at| *at < position).count();
                assert_eq!(part.before(position), expected);
            }
        }
    }

    /// Positions see the keys up to their own.
    #[test]
    fn causal_work_is_equal() {
        let part = ContextPart::new(48, 4, 0);
        let work = |rank| part.of_rank(rank).indices().map(|at| at + 1).sum::<usize>();
        assert!((1..4).all(|rank| work(rank) == work(0)));
    }
}
