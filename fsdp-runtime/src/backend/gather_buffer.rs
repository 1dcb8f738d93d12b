//! The reusable buffers that unsharded parameters live in, and which unit uses which.
//!
//! Units of one nesting level and one type of elements share a ring of `slots` buffers, assigned in
//! turn in layout order, so that a unit always unshards into the *same* buffer: the autodiff graph
//! may keep views of it from forward, and they hold this unit's parameters again before its backward
//! runs. A buffer is as large as the largest unit assigned to it, so that one huge embedding enlarges
//! one buffer. A unit of matrices of several types has a buffer of each type's ring, one for each of
//! its flat ranges; two units that follow each other in layout order meet in none of them.

use std::collections::HashMap;

use burn::tensor::{DType, Shape};

use crate::backend::{Float, ShardBackend};

/// One buffer and the unit that uses it.
#[derive(Debug)]
pub(crate) struct GatherBuffer<B: ShardBackend> {
    memory: B::Memory,
    numel: usize,
    dtype: DType,
}

impl<B: ShardBackend> GatherBuffer<B> {
    /// A buffer of `numel` elements of one type.
    pub(crate) fn new(device: &B::Device, numel: usize, dtype: DType) -> Self {
        Self { memory: B::alloc(device, numel, dtype), numel, dtype }
    }

    /// The type of its elements.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The buffer's size in elements.
    pub(crate) fn numel(&self) -> usize {
        self.numel
    }

    /// The buffer's size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.numel * self.dtype.size()
    }

    /// A parameter at `offset` (in elements) of the flat range.
    pub(crate) fn view(&self, offset: usize, shape: &[usize]) -> Float<B> {
        B::view(&self.memory, offset, Shape::from(shape.to_vec()))
    }

    /// Copies a tensor to its place in the buffer, rounded to the buffer's type. Called by the
    /// communication thread alone.
    pub(crate) fn write(&self, offset: usize, tensor: Float<B>) {
        self.write_all(vec![(offset, tensor)]);
    }

    /// [`write`](Self::write) of several tensors, which do not overlap: on a device small ones share
    /// launches.
    pub(crate) fn write_all(&self, parts: Vec<(usize, Float<B>)>) {
        B::write(&self.memory, parts);
    }

    /// Its first byte, where the host can write it without a copy.
    #[cfg(feature = "mpi")]
    pub(crate) fn host_memory(&self) -> Option<std::ptr::NonNull<u8>> {
        B::host_memory(&self.memory)
    }

    /// The buffer, for code outside Burn, once this thread's stream is done.
    #[cfg(feature = "nccl")]
    pub(crate) fn device_memory(&self) -> Result<crate::backend::DeviceMemory, String> {
        B::device_memory(&self.memory)
    }

    /// Called on reshard: later writes come after the reads issued until now, and in debug builds
    /// a read in between finds NaN.
    pub(crate) fn release(&self) {
        if cfg!(debug_assertions) {
            B::poison(&self.memory, self.numel);
        }
        B::release(&self.memory);
    }

    /// `tensor`, or a copy where it looks into this buffer: what may leave the unit.
    pub(crate) fn detach(&self, tensor: Float<B>) -> Float<B> {
        B::detach(&self.memory, tensor)
    }
}

/// Which buffer each unit uses, and how large each buffer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GatherBufferPlan {
    /// The buffers of each unit, in layout order: one for each of its flat ranges.
    pub(crate) slots_of: Vec<Vec<usize>>,
    /// Elements of each buffer, and their type.
    pub(crate) slots: Vec<(usize, DType)>,
}

impl GatherBufferPlan {
    /// Assigns buffers to units, given each one's nesting level and its flat ranges: the padded
    /// length of each in elements, and their type, which no other range of the unit has. The outermost
    /// level has one buffer of a type, every other `slots`.
    pub(crate) fn new(units: &[(usize, Vec<(usize, DType)>)], slots: usize) -> Self {
        let mut plan = Self { slots_of: Vec::with_capacity(units.len()), slots: Vec::new() };
        // The buffers of each ring, and how many units of it were assigned.
        let mut rings: HashMap<(usize, DType), (Vec<usize>, usize)> = HashMap::new();
        for (level, ranges) in units {
            let size = if *level == 0 { 1 } else { slots };
            let assign = |&(numel, dtype): &(usize, DType)| {
                let (ring, turn) = rings.entry((*level, dtype)).or_default();
                if ring.len() < size {
                    ring.push(plan.slots.len());
                    plan.slots.push((0, dtype));
                }
                let slot = ring[*turn % size];
                *turn += 1;
                plan.slots[slot].0 = plan.slots[slot].0.max(numel);
                slot
            };
            let assigned = ranges.iter().map(assign).collect();
            plan.slots_of.push(assigned);
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: DType = DType::F32;
    const HALF: DType = DType::BF16;

    fn of_one_type<const N: usize>(
        units: [(usize, usize); N],
    ) -> Vec<(usize, Vec<(usize, DType)>)> {
        units.map(|(level, numel)| (level, vec![(numel, FULL)])).to_vec()
    }

    #[test]
    fn units_take_the_buffers_of_their_level_in_turn() {
        let units = of_one_type([(0, 10), (1, 100), (1, 7), (1, 9), (1, 8), (2, 3)]);
        let plan = GatherBufferPlan::new(&units, 2);
        assert_eq!(plan.slots_of, [[0], [1], [2], [1], [2], [3]]);
        let numels: Vec<usize> = plan.slots.iter().map(|(numel, _)| *numel).collect();
        assert_eq!(numels, [10, 100, 8, 3], "a huge unit enlarges one buffer");
    }

    #[test]
    fn a_unit_without_matrices_takes_none() {
        let none = (1, Vec::new());
        let mut units = of_one_type([(1, 5), (1, 6)]);
        units.insert(1, none);
        let plan = GatherBufferPlan::new(&units, 2);
        assert_eq!(plan.slots_of, [vec![0], vec![], vec![1]]);
    }

    #[test]
    fn units_of_different_types_share_no_buffer() {
        let units = [(4, HALF), (5, FULL), (6, HALF), (7, FULL)].map(|range| (1, vec![range]));
        let plan = GatherBufferPlan::new(&units, 1);
        assert_eq!(plan.slots_of, [[0], [1], [0], [1]]);
        assert_eq!(plan.slots, [(6, HALF), (7, FULL)]);
    }

    #[test]
    fn a_unit_of_several_types_takes_a_buffer_of_each() {
        let both = |full, half| (1, vec![(full, FULL), (half, HALF)]);
        let units = [both(4, 5), (1, vec![(6, FULL)]), both(7, 8), (1, vec![(9, HALF)])];
        let plan = GatherBufferPlan::new(&units, 2);
        assert_eq!(plan.slots_of, [vec![0, 1], vec![2], vec![0, 3], vec![1]]);
        assert_eq!(plan.slots, [(7, FULL), (9, HALF), (6, FULL), (8, HALF)]);
        for pair in plan.slots_of.windows(2) {
            let shared = pair[0].iter().any(|slot| pair[1].contains(slot));
            assert!(!shared, "a prefetched unit needs no buffer of the one before it: {pair:?}");
        }
    }
}
