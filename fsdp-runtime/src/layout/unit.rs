//! Where the matrices of one unit lie: a flat range for each type of elements.
//!
//! A buffer has one type of elements, and so has what a collective moves: matrices of several types
//! cannot share a flat range. Those of one type do, in declaration order; the ranges come in the
//! order in which their types first appear, which is the same on every rank. A matrix is known by
//! its number in the unit, whichever range it lies in, so that only who moves or holds whole flat
//! ranges needs to know that there are several.

use std::ops::Range;

use burn::tensor::DType;

use crate::layout::FlatLayout;
use crate::layout::{Rank, WorldSize};

/// The matrices of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FlatRange {
    /// The type in which they are gathered.
    pub(crate) dtype: DType,
    /// Where they lie.
    pub(crate) layout: FlatLayout,
}

/// Where each matrix of one unit lies, and which part each rank owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnitLayout {
    ranges: Vec<FlatRange>,
    /// The range of each matrix, and its number there.
    matrices: Vec<(usize, usize)>,
}

impl UnitLayout {
    /// Lays out matrices of the given types and element counts, in order.
    pub(crate) fn new(
        matrices: impl IntoIterator<Item = (DType, usize)>,
        world: WorldSize,
    ) -> Self {
        let mut numels: Vec<(DType, Vec<usize>)> = Vec::new();
        let place = |(dtype, numel): (DType, usize)| {
            let known = numels.iter().position(|(other, _)| *other == dtype);
            let range = known.unwrap_or_else(|| {
                numels.push((dtype, Vec::new()));
                numels.len() - 1
            });
            numels[range].1.push(numel);
            (range, numels[range].1.len() - 1)
        };
        let matrices = matrices.into_iter().map(place).collect();
        let lay_out = |(dtype, numels)| FlatRange { dtype, layout: FlatLayout::new(numels, world) };
        Self { ranges: numels.into_iter().map(lay_out).collect(), matrices }
    }

    /// The flat ranges, in the order in which they are gathered.
    pub(crate) fn ranges(&self) -> &[FlatRange] {
        &self.ranges
    }

    /// The one type of its matrices; `None` where they have several, or there are none.
    pub(crate) fn dtype(&self) -> Option<DType> {
        match self.ranges.as_slice() {
            [range] => Some(range.dtype),
            _ => None,
        }
    }

    /// Which flat range a matrix lies in.
    pub(crate) fn range_of(&self, matrix: usize) -> usize {
        self.matrices[matrix].0
    }

    /// Where a matrix lies in its flat range.
    pub(crate) fn segment(&self, matrix: usize) -> Range<usize> {
        let (range, index) = self.matrices[matrix];
        self.ranges[range].layout.segment(index)
    }

    /// What `rank` owns of a matrix, in elements of that matrix.
    pub(crate) fn shard_of(&self, matrix: usize, rank: Rank) -> Range<usize> {
        let (range, index) = self.matrices[matrix];
        self.ranges[range].layout.shard_of(index, rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::ALIGNMENT;

    const HALF: DType = DType::BF16;
    const FULL: DType = DType::F32;

    fn world(size: usize) -> WorldSize {
        WorldSize::new(size).expect("tests use worlds of at least one rank")
    }

    #[test]
    fn matrices_of_one_type_lie_as_in_one_flat_layout() {
        let numels = [300, 7, 64, 1];
        for size in 1..=5 {
            let flat = FlatLayout::new(numels, world(size));
            let unit = UnitLayout::new(numels.map(|numel| (HALF, numel)), world(size));
            assert_eq!(unit.dtype(), Some(HALF));
            for matrix in 0..numels.len() {
                assert_eq!(unit.segment(matrix), flat.segment(matrix));
                for rank in world(size).ranks() {
                    assert_eq!(unit.shard_of(matrix, rank), flat.shard_of(matrix, rank));
                }
            }
            assert_eq!(unit.ranges(), [FlatRange { dtype: HALF, layout: flat }]);
        }
    }

    #[test]
    fn matrices_of_several_types_lie_in_a_range_for_each() {
        let matrices = [(FULL, 300), (HALF, 7), (FULL, 65), (DType::F16, 40), (HALF, 9)];
        let unit = UnitLayout::new(matrices, world(3));
        assert_eq!(unit.dtype(), None);
        let found: Vec<_> = unit.ranges().iter().map(|range| range.dtype).collect();
        assert_eq!(found, [FULL, HALF, DType::F16], "in the order in which they appear");
        let of: Vec<_> = (0..matrices.len()).map(|matrix| unit.range_of(matrix)).collect();
        assert_eq!(of, [0, 1, 0, 2, 1]);
        let second = 300_usize.next_multiple_of(ALIGNMENT);
        assert_eq!(unit.segment(2), second..second + 65);
        assert_eq!(unit.segment(4), ALIGNMENT..ALIGNMENT + 9);
        let lens: Vec<_> = unit.ranges().iter().map(|range| range.layout.padded_len()).collect();
        assert_eq!(lens, [387, 75, 42], "each is padded on its own");
        for (matrix, &(_, numel)) in matrices.iter().enumerate() {
            let held = world(3).ranks().map(|rank| unit.shard_of(matrix, rank).len());
            assert_eq!(held.sum::<usize>(), numel, "all of matrix {matrix}");
        }
    }

    #[test]
    fn a_unit_without_matrices_has_no_range() {
        let unit = UnitLayout::new([], world(2));
        assert!(unit.ranges().is_empty());
        assert_eq!(unit.dtype(), None);
    }
}
