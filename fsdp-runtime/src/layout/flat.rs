//! The flat range of a unit's matrices of one dtype, its padding, and the part that each rank owns.
//!
//! The matrices form one flat range, in declaration order. Each matrix begins at a multiple of
//! [`ALIGNMENT`] elements, and the end of the range is padded so that all ranks own equally many
//! elements, a multiple of [`SHARD_ALIGNMENT`]. Rank `r` owns elements `[r·S, (r+1)·S)`, where `S`
//! is the padded length divided by the size of the group. A rank's *shard* of one matrix is the
//! part of that matrix inside the rank's elements.
//!
//! Codes are stored in records of several elements. Matrices and the ranks' parts of a range of codes
//! begin at multiples of a record.
//!
//! All numbers count elements. This file knows nothing of tensors, devices or dtypes. A unit whose
//! matrices have several dtypes or storage types has one flat range for each.

use std::ops::Range;

use super::mesh::{Rank, WorldSize};

/// Alignment of a matrix in its flat range, in elements.
///
/// 64 elements are 256 bytes in f32, the strictest alignment that a device requires of a buffer
/// view (WebGPU's `minStorageBufferOffsetAlignment`).
pub const ALIGNMENT: usize = 64;

/// Alignment of a rank's part of a flat range, in elements.
///
/// 8 elements are 16 bytes in half precision, the widest vector that kernels load. A part that
/// began between two vectors would be copied element by element.
pub const SHARD_ALIGNMENT: usize = 8;

/// Positions of a unit's matrices in one flat range, and the part of the range that each rank owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatLayout {
    world: WorldSize,
    segments: Vec<Range<usize>>,
    shard_len: usize,
}

impl FlatLayout {
    /// Lays out matrices of the given element counts, in order.
    pub fn new(numels: impl IntoIterator<Item = usize>, world: WorldSize) -> Self {
        Self::in_records(numels, world, 1)
    }

    /// Lays out matrices like [`new`](Self::new). Each matrix and each rank's part begins at a
    /// multiple of `record` elements, a power of two.
    pub(crate) fn in_records(
        numels: impl IntoIterator<Item = usize>,
        world: WorldSize,
        record: usize,
    ) -> Self {
        let mut end = 0usize;
        let segments = numels
            .into_iter()
            .map(|numel| {
                let start = end.next_multiple_of(ALIGNMENT.max(record));
                end = start + numel;
                start..end
            })
            .collect();
        // One rank needs no padding: its part begins with the range.
        let alignment = if world.size() == 1 { 1 } else { SHARD_ALIGNMENT };
        let shard_len = end.div_ceil(world.size()).next_multiple_of(alignment.max(record));
        Self { world, segments, shard_len }
    }

    /// Returns the number of matrices.
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// Returns whether the unit has no matrix.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Returns the number of elements that each rank owns, padding included.
    pub fn shard_len(&self) -> usize {
        self.shard_len
    }

    /// Returns the padded length of the flat range, which is also the length of the gather buffer.
    pub fn padded_len(&self) -> usize {
        self.shard_len * self.world.size()
    }

    /// Returns the elements of the flat range that hold matrix `index`.
    pub fn segment(&self, index: usize) -> Range<usize> {
        self.segments[index].clone()
    }

    /// Returns the elements of the flat range that `rank` owns.
    pub fn shard(&self, rank: Rank) -> Range<usize> {
        let start = rank.index() * self.shard_len;
        start..start + self.shard_len
    }

    /// Returns the part of matrix `index` that `rank` owns, counted in elements of the matrix.
    ///
    /// The range is empty where `rank` owns no element of the matrix.
    pub fn shard_of(&self, index: usize, rank: Rank) -> Range<usize> {
        let segment = &self.segments[index];
        let shard = self.shard(rank);
        let start = shard.start.clamp(segment.start, segment.end);
        let end = shard.end.clamp(start, segment.end);
        start - segment.start..end - segment.start
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn world(size: usize) -> WorldSize {
        WorldSize::new(size).expect("tests use worlds of at least one rank")
    }

    /// Returns element counts at the edges: 1, 3, 8 and primes, below and above the world size.
    fn numel() -> impl Strategy<Value = usize> {
        prop_oneof![
            Just(1usize),
            Just(3),
            Just(8),
            Just(127),
            Just(7919),
            1usize..200,
            1usize..100_000,
        ]
    }

    proptest! {
        #[test]
        fn shards_of_all_ranks_tile_every_matrix(
            numels in prop::collection::vec(numel(), 1..12),
            size in prop_oneof![Just(1usize), Just(2), Just(3), Just(8), 1usize..=128],
        ) {
            let layout = FlatLayout::new(numels.iter().copied(), world(size));
            for (index, &numel) in numels.iter().enumerate() {
                let mut covered = 0;
                for rank in world(size).ranks() {
                    let part = layout.shard_of(index, rank);
                    if part.is_empty() {
                        continue;
                    }
                    prop_assert_eq!(part.start, covered, "a gap or an overlap of shards");
                    covered = part.end;
                }
                prop_assert_eq!(covered, numel);
            }
        }

        #[test]
        fn shards_tile_the_padded_range(
            numels in prop::collection::vec(numel(), 1..12),
            size in 1usize..=128,
        ) {
            let layout = FlatLayout::new(numels.iter().copied(), world(size));
            prop_assert_eq!(layout.padded_len() % size, 0);
            let mut end = 0;
            for rank in world(size).ranks() {
                let shard = layout.shard(rank);
                prop_assert_eq!(shard.start, end);
                prop_assert_eq!(shard.len(), layout.shard_len());
                end = shard.end;
            }
            prop_assert_eq!(end, layout.padded_len());
            let last = layout.segment(numels.len() - 1).end;
            let most = if size == 1 { 1 } else { size * SHARD_ALIGNMENT };
            prop_assert!(last <= end && end - last < most, "the padding is as short as can be");
        }

        #[test]
        fn segments_are_aligned_and_in_order(numels in prop::collection::vec(numel(), 1..12)) {
            let layout = FlatLayout::new(numels.iter().copied(), world(2));
            let mut end = 0;
            for (index, &numel) in numels.iter().enumerate() {
                let segment = layout.segment(index);
                prop_assert_eq!(segment.start % ALIGNMENT, 0);
                prop_assert!(segment.start >= end && segment.start - end < ALIGNMENT);
                prop_assert_eq!(segment.len(), numel);
                end = segment.end;
            }
        }

        #[test]
        fn shards_lie_inside_the_elements_their_rank_owns(
            numels in prop::collection::vec(numel(), 1..6),
            size in 1usize..=128,
        ) {
            let layout = FlatLayout::new(numels.iter().copied(), world(size));
            for rank in world(size).ranks() {
                let shard = layout.shard(rank);
                let owned: usize = (0..numels.len()).map(|i| layout.shard_of(i, rank).len()).sum();
                prop_assert!(owned <= layout.shard_len());
                for index in 0..numels.len() {
                    let part = layout.shard_of(index, rank);
                    if !part.is_empty() {
                        let start = layout.segment(index).start;
                        prop_assert!(shard.start <= start + part.start);
                        prop_assert!(start + part.end <= shard.end);
                    }
                }
            }
        }
    }

    #[test]
    fn records_are_not_divided() {
        for size in 1..=5 {
            let numels = [64 * 9, 100, 7, 2048];
            let layout = FlatLayout::in_records(numels, world(size), 1024);
            for (index, numel) in numels.into_iter().enumerate() {
                assert_eq!(layout.segment(index).start % 1024, 0);
                let parts = world(size).ranks().map(|rank| layout.shard_of(index, rank));
                let parts: Vec<_> = parts.filter(|part| !part.is_empty()).collect();
                assert!(parts.iter().all(|part| part.start % 1024 == 0), "{parts:?}");
                assert_eq!(parts.iter().map(|part| part.len()).sum::<usize>(), numel);
            }
            assert_eq!(layout.shard_len() % 1024, 0);
        }
    }

    #[test]
    fn a_matrix_smaller_than_the_world_leaves_some_shards_empty() {
        let layout = FlatLayout::new([19], world(8));
        let lens: Vec<_> = world(8).ranks().map(|rank| layout.shard_of(0, rank).len()).collect();
        assert_eq!(lens, [8, 8, 3, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_unit_without_matrices_has_empty_shards() {
        let layout = FlatLayout::new([], world(4));
        assert_eq!((layout.len(), layout.padded_len()), (0, 0));
        assert!(layout.is_empty());
    }
}
