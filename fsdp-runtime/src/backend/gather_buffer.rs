//! Gather buffers: the reusable buffers that units are unsharded into, and their assignment to
//! units.
//!
//! Units of one nesting level and one dtype share a ring of buffers, which are assigned in turn in
//! layout order. So a unit is always unsharded into the same buffer: the autodiff graph keeps views
//! of it from forward, and these views hold the unit's parameters again when its backward runs.
//!
//! A buffer is as large as the largest unit assigned to it, so one huge embedding enlarges one
//! buffer only. A unit with matrices of several dtypes has one flat range for each dtype, and for
//! each flat range a buffer of that dtype's ring. With rings of two or more buffers, units that are
//! adjacent in layout order share none.
//!
//! Ranks that are threads of one process on Flex can also share buffers in which their shards lie.
//! Nothing is copied into such a *common buffer*: it always shows the gathered parameters. It is never
//! released, and each unit has its own.

use std::collections::HashMap;
use std::sync::OnceLock;

use burn::tensor::{DType, Shape};
use fsdp_kernels::Float;

use super::shard_backend::ShardBackend;
use crate::layout::StorageType;

/// Reusable buffer that a flat range of a unit is gathered into.
#[derive(Debug)]
pub(crate) struct GatherBuffer<B: ShardBackend> {
    /// Empty until the buffer is allocated.
    memory: OnceLock<B::Memory>,
    device: B::Device,
    numel: usize,
    dtype: DType,
}

impl<B: ShardBackend> GatherBuffer<B> {
    /// Allocates a buffer of `numel` zeros.
    pub(crate) fn new(device: &B::Device, numel: usize, dtype: DType) -> Self {
        let buffer = Self::unallocated(device, numel, dtype);
        buffer.memory();
        buffer
    }

    /// Returns a buffer of `numel` zeros that is allocated when it is used.
    pub(crate) fn unallocated(device: &B::Device, numel: usize, dtype: DType) -> Self {
        Self { memory: OnceLock::new(), device: device.clone(), numel, dtype }
    }

    /// Returns the memory, which is allocated if it is not yet.
    fn memory(&self) -> &B::Memory {
        self.memory.get_or_init(|| B::alloc(&self.device, self.numel, self.dtype))
    }

    /// Allocates the buffer if it is not allocated yet, and returns the bytes that this took.
    pub(crate) fn allocate(&self) -> usize {
        let before = self.bytes();
        self.memory();
        self.bytes() - before
    }

    /// Returns the type of the elements.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub(crate) fn numel(&self) -> usize {
        self.numel
    }

    /// Returns the size in bytes, which is zero until the buffer is allocated.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.get().map_or(0, |_| self.numel * self.dtype.size())
    }

    /// Returns a tensor of this shape over the elements from `offset` on, without a copy
    /// ([`ShardBackend::view`]).
    pub(crate) fn view(&self, offset: usize, shape: &[usize]) -> Float<B> {
        B::view(self.memory(), offset, Shape::from(shape.to_vec()))
    }

    /// Copies a tensor into the buffer from `offset` (in elements) on, rounded to the buffer's type
    /// ([`ShardBackend::write`]). Called by the communication thread; by the rank's own thread only
    /// for buffers that no all-gather writes.
    pub(crate) fn write(&self, offset: usize, tensor: Float<B>) {
        self.write_all(vec![(offset, tensor)]);
    }

    /// Copies several tensors like [`write`](Self::write). They must not overlap in the buffer. On
    /// CubeCL devices small tensors share kernel launches.
    pub(crate) fn write_all(&self, parts: Vec<(usize, Float<B>)>) {
        B::write(self.memory(), parts);
    }

    /// Writes elements that were sent as `storage` has them, from the first element of the buffer on
    /// ([`ShardBackend::decode_into`]). Called by the communication thread.
    pub(crate) fn decode(&self, sent: Float<B>, storage: StorageType) {
        match storage.is_coded() {
            true => B::decode_into(self.memory(), sent, storage),
            false => self.write(0, sent),
        }
    }

    /// Returns the address of the first byte if the buffer is in host memory
    /// ([`ShardBackend::host_memory`]).
    #[cfg(feature = "mpi")]
    pub(crate) fn host_memory(&self) -> Option<std::ptr::NonNull<u8>> {
        B::host_memory(self.memory())
    }

    /// Returns the device address of the buffer, or the reason why it has none
    /// ([`ShardBackend::device_memory`]).
    #[cfg(feature = "nccl")]
    pub(crate) fn device_memory(&self) -> Result<super::shard_backend::DeviceMemory, String> {
        B::device_memory(self.memory())
    }

    /// Orders later writes, of any thread, after the reads that the calling thread has issued so
    /// far ([`ShardBackend::release`]). Called by the rank's own thread at reshard. In debug builds
    /// fills the buffer with NaN, so that a later read without a new all-gather shows.
    pub(crate) fn release(&self) {
        let Some(memory) = self.memory.get() else { return };
        if cfg!(debug_assertions) {
            B::poison(memory, self.numel);
        }
        B::release(memory);
    }

    /// Returns `tensor`, or a copy if it is a view of this buffer ([`ShardBackend::detach`]).
    /// Applied to the outputs of a unit, which are read after its reshard.
    pub(crate) fn detach(&self, tensor: Float<B>) -> Float<B> {
        match self.memory.get() {
            Some(memory) => B::detach(memory, tensor),
            None => tensor,
        }
    }

    /// Returns whether each tensor is stored in the buffer, from the given offset (in elements) on.
    pub(crate) fn stores<'a>(
        &self,
        mut parts: impl Iterator<Item = &'a (usize, Float<B>)>,
    ) -> bool {
        let memory = self.memory.get();
        memory.is_some_and(|memory| parts.all(|(offset, part)| B::lies_in(memory, *offset, part)))
    }

    /// Moves a tensor into the buffer, from `offset` (in elements) on, and returns it as it is stored
    /// there. Returns `None` if it is there already, or if the part is in use
    /// ([`ShardBackend::place`]).
    pub(crate) fn place(&self, offset: usize, tensor: &Float<B>) -> Option<Float<B>> {
        let memory = self.memory();
        if B::lies_in(memory, offset, tensor) { None } else { B::place(memory, offset, tensor) }
    }
}

/// Assignment of gather buffers to units, and the size of each buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GatherBufferPlan {
    /// Buffers of each unit, in layout order of the units: for each flat range of the unit an index
    /// into [`buffers`](Self::buffers).
    pub(crate) buffers_of: Vec<Vec<usize>>,
    /// Number of elements and dtype of each buffer.
    pub(crate) buffers: Vec<(usize, DType)>,
}

impl GatherBufferPlan {
    /// Assigns buffers to units. A unit is its nesting level and its flat ranges, each with its
    /// padded length in elements and its dtype. A ring of an inner level has `ring_size(level)`
    /// buffers, and one of the outermost level has one. If several ranges of a unit have one dtype,
    /// the n-th of them takes a buffer of the n-th ring of that dtype. A unit for which `is_alone`
    /// holds, given its index, has buffers of its own.
    pub(crate) fn new(
        units: &[(usize, Vec<(usize, DType)>)],
        ring_size: impl Fn(usize) -> usize,
        is_alone: impl Fn(usize) -> bool,
    ) -> Self {
        let mut plan = Self { buffers_of: Vec::with_capacity(units.len()), buffers: Vec::new() };
        // For each ring: its buffers, and the number of ranges assigned so far.
        let mut rings: HashMap<(usize, DType, usize), (Vec<usize>, usize)> = HashMap::new();
        for (index, (level, ranges)) in units.iter().enumerate() {
            let size = if *level == 0 { 1 } else { ring_size(*level) };
            let alone = is_alone(index);
            let assign = |(range, &(numel, dtype)): (usize, &(usize, DType))| {
                if alone {
                    plan.buffers.push((numel, dtype));
                    return plan.buffers.len() - 1;
                }
                let nth = ranges[..range].iter().filter(|(_, other)| *other == dtype).count();
                let (ring, turn) = rings.entry((*level, dtype, nth)).or_default();
                if ring.len() < size {
                    ring.push(plan.buffers.len());
                    plan.buffers.push((0, dtype));
                }
                let buffer = ring[*turn % size];
                *turn += 1;
                plan.buffers[buffer].0 = plan.buffers[buffer].0.max(numel);
                buffer
            };
            let assigned = ranges.iter().enumerate().map(assign).collect();
            plan.buffers_of.push(assigned);
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: DType = DType::F32;
    const HALF: DType = DType::BF16;

    fn of_one_dtype<const N: usize>(
        units: [(usize, usize); N],
    ) -> Vec<(usize, Vec<(usize, DType)>)> {
        units.map(|(level, numel)| (level, vec![(numel, FULL)])).to_vec()
    }

    #[test]
    fn units_are_assigned_the_buffers_of_their_level_in_turn() {
        let units = of_one_dtype([(0, 10), (1, 100), (1, 7), (1, 9), (1, 8), (2, 3)]);
        let plan = GatherBufferPlan::new(&units, |_| 2, |_| false);
        assert_eq!(plan.buffers_of, [[0], [1], [2], [1], [2], [3]]);
        let numels: Vec<usize> = plan.buffers.iter().map(|(numel, _)| *numel).collect();
        assert_eq!(numels, [10, 100, 8, 3], "a huge unit must enlarge one buffer only");
    }

    #[test]
    fn a_unit_with_buffers_of_its_own_takes_no_turn() {
        let units = of_one_dtype([(0, 10), (1, 4), (1, 9), (1, 5), (1, 6), (2, 3), (2, 2)]);
        let plan =
            GatherBufferPlan::new(&units, |level| if level == 1 { 2 } else { 1 }, |unit| unit == 2);
        assert_eq!(plan.buffers_of, [[0], [1], [2], [3], [1], [4], [4]]);
        let numels: Vec<usize> = plan.buffers.iter().map(|(numel, _)| *numel).collect();
        assert_eq!(numels, [10, 6, 9, 5, 3]);
    }

    #[test]
    fn a_unit_without_matrices_has_no_buffer() {
        let none = (1, Vec::new());
        let mut units = of_one_dtype([(1, 5), (1, 6)]);
        units.insert(1, none);
        let plan = GatherBufferPlan::new(&units, |_| 2, |_| false);
        assert_eq!(plan.buffers_of, [vec![0], vec![], vec![1]]);
    }

    #[test]
    fn units_of_different_dtypes_share_no_buffer() {
        let units = [(4, HALF), (5, FULL), (6, HALF), (7, FULL)].map(|range| (1, vec![range]));
        let plan = GatherBufferPlan::new(&units, |_| 1, |_| false);
        assert_eq!(plan.buffers_of, [[0], [1], [0], [1]]);
        assert_eq!(plan.buffers, [(6, HALF), (7, FULL)]);
    }

    #[test]
    fn ranges_of_one_dtype_in_a_unit_have_separate_buffers() {
        let units = [vec![(4, FULL), (5, FULL)], vec![(6, FULL)], vec![(7, FULL), (8, FULL)]];
        let plan = GatherBufferPlan::new(&units.map(|ranges| (1, ranges)), |_| 1, |_| false);
        assert_eq!(plan.buffers_of, [vec![0, 1], vec![0], vec![0, 1]]);
        assert_eq!(plan.buffers, [(7, FULL), (8, FULL)]);
    }

    #[test]
    fn a_unit_of_several_dtypes_has_a_buffer_of_each() {
        let both = |full, half| (1, vec![(full, FULL), (half, HALF)]);
        let units = [both(4, 5), (1, vec![(6, FULL)]), both(7, 8), (1, vec![(9, HALF)])];
        let plan = GatherBufferPlan::new(&units, |_| 2, |_| false);
        assert_eq!(plan.buffers_of, [vec![0, 1], vec![2], vec![0, 3], vec![1]]);
        assert_eq!(plan.buffers, [(7, FULL), (9, HALF), (6, FULL), (8, HALF)]);
        for pair in plan.buffers_of.windows(2) {
            let shared = pair[0].iter().any(|buffer| pair[1].contains(buffer));
            assert!(
                !shared,
                "adjacent units must share no buffer, so that one can be prefetched: {pair:?}"
            );
        }
    }
}
