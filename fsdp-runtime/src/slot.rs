//! The reusable buffers that unsharded parameters live in, and which unit uses which.
//!
//! Units of one nesting level and one type of elements share a ring of `slots` buffers, assigned in turn in layout order, so
//! that a unit always unshards into the *same* buffer: the autodiff graph may keep views of it from
//! forward, and they hold this unit's parameters again before its backward runs. A buffer is as
//! large as the largest unit assigned to it, so that one huge embedding enlarges one buffer.

use std::collections::HashMap;

use burn::tensor::{DType, Shape};

use crate::backend::{Float, ShardBackend};

/// One buffer and the unit that uses it.
#[derive(Debug)]
pub(crate) struct Slot<B: ShardBackend> {
    memory: B::Memory,
    numel: usize,
    dtype: DType,
}

impl<B: ShardBackend> Slot<B> {
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
pub(crate) struct SlotPlan {
    /// The buffer of each unit, in layout order; `None` for a unit without matrices.
    pub(crate) slot_of: Vec<Option<usize>>,
    /// Elements of each buffer, and their type.
    pub(crate) slots: Vec<(usize, DType)>,
}

impl SlotPlan {
    /// Assigns buffers to units, given each one's nesting level, padded length in elements and
    /// their type. The outermost level has one buffer, every other `slots`.
    pub(crate) fn new(units: &[(usize, usize, DType)], slots: usize) -> Self {
        let mut plan = Self { slot_of: Vec::with_capacity(units.len()), slots: Vec::new() };
        // The buffers of each ring, and how many units of it were assigned.
        let mut rings: HashMap<(usize, DType), (Vec<usize>, usize)> = HashMap::new();
        for &(level, numel, dtype) in units {
            if numel == 0 {
                plan.slot_of.push(None);
                continue;
            }
            let size = if level == 0 { 1 } else { slots };
            let (ring, turn) = rings.entry((level, dtype)).or_default();
            if ring.len() < size {
                ring.push(plan.slots.len());
                plan.slots.push((0, dtype));
            }
            let slot = ring[*turn % size];
            *turn += 1;
            plan.slots[slot].0 = plan.slots[slot].0.max(numel);
            plan.slot_of.push(Some(slot));
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_take_the_buffers_of_their_level_in_turn() {
        let units = [(0, 10), (1, 100), (1, 7), (1, 9), (1, 8), (2, 3)];
        let plan = SlotPlan::new(&units.map(|(level, numel)| (level, numel, DType::F32)), 2);
        assert_eq!(plan.slot_of, [Some(0), Some(1), Some(2), Some(1), Some(2), Some(3)]);
        let numels: Vec<usize> = plan.slots.iter().map(|(numel, _)| *numel).collect();
        assert_eq!(numels, [10, 100, 8, 3], "a huge unit enlarges one buffer");
    }

    #[test]
    fn a_unit_without_matrices_takes_none() {
        let units = [(0, 0), (1, 5), (1, 0), (1, 6)];
        let plan = SlotPlan::new(&units.map(|(level, numel)| (level, numel, DType::F32)), 2);
        assert_eq!(plan.slot_of, [None, Some(0), None, Some(1)]);
    }

    #[test]
    fn units_of_different_types_share_no_buffer() {
        let (half, full) = (DType::BF16, DType::F32);
        let plan = SlotPlan::new(&[(1, 4, half), (1, 5, full), (1, 6, half), (1, 7, full)], 1);
        assert_eq!(plan.slot_of, [Some(0), Some(1), Some(0), Some(1)]);
        assert_eq!(plan.slots, [(6, half), (7, full)]);
    }
}
