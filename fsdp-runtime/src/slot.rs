//! The reusable buffers that unsharded parameters live in, and which unit uses which.
//!
//! Units of one nesting level share a ring of `slots` buffers, assigned in turn in layout order, so
//! that a unit always unshards into the *same* buffer: the autodiff graph may keep views of it from
//! forward, and they hold this unit's parameters again before its backward runs. A buffer is as
//! large as the largest unit assigned to it, so that one huge embedding enlarges one buffer.

use burn::tensor::Shape;

use crate::backend::{Float, ShardBackend};

/// One buffer and the unit that uses it.
#[derive(Debug)]
pub(crate) struct Slot<B: ShardBackend> {
    memory: B::Memory,
    numel: usize,
}

impl<B: ShardBackend> Slot<B> {
    /// A buffer of `numel` elements.
    pub(crate) fn new(device: &B::Device, numel: usize) -> Self {
        Self { memory: B::alloc(device, numel), numel }
    }

    /// The buffer's size in elements.
    pub(crate) fn numel(&self) -> usize {
        self.numel
    }

    /// The buffer's size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.numel * size_of::<f32>()
    }

    /// A parameter at `offset` (in elements) of the flat range.
    pub(crate) fn view(&self, offset: usize, shape: &[usize]) -> Float<B> {
        B::view(&self.memory, offset, Shape::from(shape.to_vec()))
    }

    /// Copies a fragment to its place in the flat range. Called by the communication thread alone.
    pub(crate) fn write(&self, offset: usize, fragment: Float<B>) {
        B::write(&self.memory, offset, fragment);
    }

    /// Its first element, where the host can write it without a copy.
    #[cfg(feature = "mpi")]
    pub(crate) fn host_memory(&self) -> Option<std::ptr::NonNull<f32>> {
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
    /// Elements of each buffer.
    pub(crate) numels: Vec<usize>,
}

impl SlotPlan {
    /// Assigns buffers to units, given each one's nesting level and padded length in elements.
    /// The outermost level has one buffer, every other `slots`.
    pub(crate) fn new(units: &[(usize, usize)], slots: usize) -> Self {
        let mut plan = Self { slot_of: Vec::with_capacity(units.len()), numels: Vec::new() };
        // The buffers of each level, and how many units of it were assigned.
        let mut rings: Vec<(Vec<usize>, usize)> = Vec::new();
        for &(level, numel) in units {
            if numel == 0 {
                plan.slot_of.push(None);
                continue;
            }
            while rings.len() <= level {
                rings.push((Vec::new(), 0));
            }
            let size = if level == 0 { 1 } else { slots };
            let (ring, turn) = &mut rings[level];
            if ring.len() < size {
                ring.push(plan.numels.len());
                plan.numels.push(0);
            }
            let slot = ring[*turn % size];
            *turn += 1;
            plan.numels[slot] = plan.numels[slot].max(numel);
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
        let plan = SlotPlan::new(&[(0, 10), (1, 100), (1, 7), (1, 9), (1, 8), (2, 3)], 2);
        assert_eq!(plan.slot_of, [Some(0), Some(1), Some(2), Some(1), Some(2), Some(3)]);
        assert_eq!(plan.numels, [10, 100, 8, 3], "a huge unit enlarges one buffer");
    }

    #[test]
    fn a_unit_without_matrices_takes_none() {
        let plan = SlotPlan::new(&[(0, 0), (1, 5), (1, 0), (1, 6)], 2);
        assert_eq!(plan.slot_of, [None, Some(0), None, Some(1)]);
    }
}
