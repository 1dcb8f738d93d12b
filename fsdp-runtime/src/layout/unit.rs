//! Positions of a unit's matrices, in one flat range for each dtype and storage type.
//!
//! A gather buffer and a collective each have a single dtype, so matrices of several dtypes cannot
//! share a flat range, and neither can matrices that are stored differently. Matrices of one dtype
//! and storage type share a range, in declaration order. The ranges are ordered by the first
//! appearance of these, which is the same on every rank. Callers name a
//! matrix by its number in the unit, whichever range holds it; only code that gathers or stores
//! flat ranges has to deal with several of them.

use std::ops::Range;

use burn::tensor::DType;
use fsdp_kernels::StorageType;

use super::flat::FlatLayout;
use super::mesh::{Rank, WorldSize};

/// The flat range of a unit's matrices of one dtype and storage type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FlatRange {
    /// Dtype in which the matrices are gathered.
    pub(crate) dtype: DType,
    /// Form in which the matrices are stored.
    pub(crate) storage: StorageType,
    /// Form in which the matrices are sent.
    pub(crate) sent: StorageType,
    /// Positions of the matrices in the range.
    pub(crate) layout: FlatLayout,
}

/// The dtypes and forms that decide which matrices share a flat range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MatrixForm {
    /// Dtype in which the matrix is gathered.
    pub(crate) dtype: DType,
    /// Form in which the matrix is stored.
    pub(crate) storage: StorageType,
    /// Codes that the matrix is sent in, if it is sent in another form than it is stored in.
    pub(crate) codes: Option<StorageType>,
    /// Number of elements that are not divided among ranks, a power of two.
    pub(crate) record: usize,
}

/// Positions of a unit's matrices in the unit's flat ranges, and the part that each rank owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnitLayout {
    ranges: Vec<FlatRange>,
    /// For each matrix of the unit, the number of its flat range and its number in that range.
    matrices: Vec<(usize, usize)>,
}

impl UnitLayout {
    /// Lays out matrices of the given dtypes and element counts, which are stored in f32, in
    /// declaration order.
    #[cfg(test)]
    pub(crate) fn new(
        matrices: impl IntoIterator<Item = (DType, usize)>,
        world: WorldSize,
    ) -> Self {
        let plain = |dtype| MatrixForm { dtype, storage: StorageType::F32, codes: None, record: 1 };
        let matrices = matrices.into_iter();
        Self::stored_as(matrices.map(|(dtype, numel)| (plain(dtype), numel)), world)
    }

    /// Lays out matrices of the given forms and element counts, in declaration order.
    pub(crate) fn stored_as(
        matrices: impl IntoIterator<Item = (MatrixForm, usize)>,
        world: WorldSize,
    ) -> Self {
        let mut numels: Vec<(MatrixForm, Vec<usize>)> = Vec::new();
        let assign = |(key, numel): (MatrixForm, usize)| {
            let known = numels.iter().position(|(other, _)| *other == key);
            let range = known.unwrap_or_else(|| {
                numels.push((key, Vec::new()));
                numels.len() - 1
            });
            numels[range].1.push(numel);
            (range, numels[range].1.len() - 1)
        };
        let matrices = matrices.into_iter().map(assign).collect();
        let lay_out = |(form, numels): (MatrixForm, Vec<usize>)| {
            let MatrixForm { dtype, storage, codes, record } = form;
            let sent = codes.unwrap_or(storage);
            let record = record.max(storage.record_len()).max(sent.record_len());
            let layout = FlatLayout::in_records(numels, world, record);
            FlatRange { dtype, storage, sent, layout }
        };
        Self { ranges: numels.into_iter().map(lay_out).collect(), matrices }
    }

    /// Returns the flat ranges, in the order of their all-gathers.
    pub(crate) fn ranges(&self) -> &[FlatRange] {
        &self.ranges
    }

    /// Returns the dtype of the unit's matrices, or `None` if there are several dtypes or no
    /// matrix.
    pub(crate) fn dtype(&self) -> Option<DType> {
        let first = self.ranges.first()?.dtype;
        self.ranges.iter().all(|range| range.dtype == first).then_some(first)
    }

    /// Returns the number of the flat range that holds `matrix`.
    pub(crate) fn range_of(&self, matrix: usize) -> usize {
        self.matrices[matrix].0
    }

    /// Returns the elements of the flat range that hold `matrix`.
    pub(crate) fn segment(&self, matrix: usize) -> Range<usize> {
        let (range, index) = self.matrices[matrix];
        self.ranges[range].layout.segment(index)
    }

    /// Returns the part of `matrix` that `rank` owns, counted in elements of the matrix.
    pub(crate) fn shard_of(&self, matrix: usize, rank: Rank) -> Range<usize> {
        let (range, index) = self.matrices[matrix];
        self.ranges[range].layout.shard_of(index, rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::flat::ALIGNMENT;

    const HALF: DType = DType::BF16;
    const FULL: DType = DType::F32;

    fn world(size: usize) -> WorldSize {
        WorldSize::new(size).expect("tests use worlds of at least one rank")
    }

    #[test]
    fn matrices_of_one_dtype_share_one_flat_range() {
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
            let (storage, sent) = (StorageType::F32, StorageType::F32);
            assert_eq!(unit.ranges(), [FlatRange { dtype: HALF, storage, sent, layout: flat }]);
        }
    }

    #[test]
    fn matrices_of_several_dtypes_get_one_flat_range_each() {
        let matrices = [(FULL, 300), (HALF, 7), (FULL, 65), (DType::F16, 40), (HALF, 9)];
        let unit = UnitLayout::new(matrices, world(3));
        assert_eq!(unit.dtype(), None);
        let found: Vec<_> = unit.ranges().iter().map(|range| range.dtype).collect();
        assert_eq!(
            found,
            [FULL, HALF, DType::F16],
            "ranges are ordered by the first appearance of their dtype"
        );
        let range_of: Vec<_> = (0..matrices.len()).map(|matrix| unit.range_of(matrix)).collect();
        assert_eq!(range_of, [0, 1, 0, 2, 1]);
        let second = 300_usize.next_multiple_of(ALIGNMENT);
        assert_eq!(unit.segment(2), second..second + 65);
        assert_eq!(unit.segment(4), ALIGNMENT..ALIGNMENT + 9);
        let lens: Vec<_> = unit.ranges().iter().map(|range| range.layout.padded_len()).collect();
        assert_eq!(lens, [408, 96, 48], "each range is padded separately");
        for (matrix, &(_, numel)) in matrices.iter().enumerate() {
            let owned = world(3).ranks().map(|rank| unit.shard_of(matrix, rank).len());
            assert_eq!(owned.sum::<usize>(), numel, "the shards of matrix {matrix} cover it");
        }
    }

    #[test]
    fn matrices_of_one_dtype_that_are_stored_differently_share_no_flat_range() {
        let (coded, plain) = (StorageType::NF4, StorageType::F32);
        let form = |storage| MatrixForm { dtype: FULL, storage, codes: None, record: 1 };
        let matrices = [(form(coded), 5000), (form(plain), 70), (form(coded), 100)];
        let unit = UnitLayout::stored_as(matrices, world(2));
        assert_eq!(unit.dtype(), Some(FULL), "they are computed with in one dtype");
        let found: Vec<_> = unit.ranges().iter().map(|range| range.storage).collect();
        assert_eq!(found, [coded, plain]);
        let second = 5000_usize.next_multiple_of(coded.record_len());
        assert_eq!(unit.segment(2), second..second + 100);
        assert_eq!(unit.segment(1), 0..70);
    }

    #[test]
    fn matrices_that_are_sent_in_codes_begin_with_a_record() {
        let (storage, codes) = (StorageType::Bf16, Some(StorageType::Int8 { block: 128 }));
        let form = |codes, record| MatrixForm { dtype: FULL, storage, codes, record };
        let matrices = [(form(codes, 1), 100), (form(None, 256), 70), (form(codes, 1), 1000)];
        let unit = UnitLayout::stored_as(matrices, world(3));
        let found: Vec<_> = unit.ranges().iter().map(|range| (range.storage, range.sent)).collect();
        assert_eq!(found, [(storage, StorageType::Int8 { block: 128 }), (storage, storage)]);
        assert_eq!((unit.segment(2), unit.segment(1)), (128..1128, 0..70));
        let lens: Vec<_> = unit.ranges().iter().map(|range| range.layout.shard_len()).collect();
        assert_eq!(lens, [384, 256]);
    }

    #[test]
    fn a_unit_without_matrices_has_no_flat_range() {
        let unit = UnitLayout::new([], world(2));
        assert!(unit.ranges().is_empty());
        assert_eq!(unit.dtype(), None);
    }
}
