//! The host memory of gather buffers on Flex: blocks that tensors view, and blocks in which the
//! shards of several ranks lie.

use std::alloc::{Layout as Allocation, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, Weak};

use burn::tensor::DType;
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use fsdp_kernels::read_only::{ReadOnly, read_only};

use crate::error::IgnorePoison;

/// Alignment of a block in bytes: a cache line, and the widest vector register.
const ALIGN: usize = 64;

/// Block of host memory that Flex tensors view while the runtime rewrites it between units.
#[derive(Debug)]
struct Block {
    start: NonNull<u8>,
    /// Size in bytes.
    bytes: usize,
}

// SAFETY: the block is plain memory. The schedule guarantees that accesses do not race. One thread
// writes the block between a unit's reshard and the end of the next all-gather. Views are read only
// between that end and the next reshard (see the note of `ShardBackend`). A block in which shards lie
// is written through these alone, while no rank reads them (see the note of `schedule::common`).
unsafe impl Send for Block {}
// SAFETY: as for `Send`. The methods that write take `&self`, since views share the block.
unsafe impl Sync for Block {}

impl Block {
    fn allocation(bytes: usize) -> Allocation {
        Allocation::from_size_align(bytes.max(ALIGN), ALIGN)
            .expect("the size of a gather buffer fits the address space")
    }

    fn new(bytes: usize) -> Self {
        let allocation = Self::allocation(bytes);
        // SAFETY: the size of the allocation is at least `ALIGN`, so not zero.
        let start = unsafe { alloc_zeroed(allocation) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(allocation));
        Self { start, bytes }
    }

    /// Copies `source` to the bytes from `at` on.
    fn write(&self, at: usize, source: &[u8]) {
        assert!(at + source.len() <= self.bytes, "a write must stay within its gather buffer");
        // SAFETY: the range is within the block, and no view of that range is read while the schedule
        // writes it.
        unsafe { self.start.add(at).copy_from(NonNull::from(source).cast(), source.len()) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the block with this layout. No view is left, as views hold an
        // `Arc` of the block.
        unsafe { dealloc(self.start.as_ptr(), Self::allocation(self.bytes)) }
    }
}

/// Part of a block.
///
/// [`Memory`] keeps an `Arc` of each view's storage, so no tensor is the only owner of it, and Burn
/// copies it before a mutation.
struct View {
    block: Arc<Block>,
    range: Range<usize>,
}

impl ReadOnly for View {
    fn size(&self) -> usize {
        self.range.len()
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the range is within the block (checked in `Memory::view`). The block is
        // initialised, lives as long as `self`, and is not written while a view is read.
        unsafe {
            let start = self.block.start.add(self.range.start);
            std::slice::from_raw_parts(start.as_ptr(), self.range.len())
        }
    }
}

/// Part of a block as the storage of one tensor, which Burn may write.
struct Place {
    block: Arc<Block>,
    range: Range<usize>,
    /// Tells [`Memory`] that the storage exists.
    _taken: Arc<()>,
}

impl AllocationController for Place {
    /// Returns the alignment that a copy gets, in bytes: that of Burn's own storage.
    fn alloc_align(&self) -> usize {
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Native
    }

    fn capacity(&self) -> usize {
        self.range.len()
    }

    unsafe fn memory_mut(
        &mut self,
        _: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        // SAFETY: the range is within the block (checked in `Block::write` by `Memory::place`), and
        // `_taken` makes this the only storage of the range that Burn may write. Other ranks read the
        // range only while they refer to this storage, and then Burn copies it before a mutation.
        Ok(unsafe {
            let start = self.block.start.add(self.range.start).cast();
            std::slice::from_raw_parts_mut(start.as_ptr(), self.range.len())
        })
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        // SAFETY: the range is within the block, and is written through this storage alone.
        Ok(unsafe {
            let start = self.block.start.add(self.range.start).cast();
            std::slice::from_raw_parts(start.as_ptr(), self.range.len())
        })
    }
}

/// Memory of a gather buffer, and the byte storages of its views.
#[derive(Debug)]
pub(crate) struct Memory {
    block: Arc<Block>,
    pub(super) dtype: DType,
    /// One storage for each viewed range of bytes, given as (start, end). Kept so that no view is
    /// the only owner of its storage.
    views: Mutex<HashMap<(usize, usize), Arc<Bytes>>>,
    /// For the first byte of each part that was a tensor's storage, whether it still is.
    taken: Mutex<HashMap<usize, Weak<()>>>,
}

impl Memory {
    /// Allocates `numel` zeros.
    pub(super) fn new(numel: usize, dtype: DType) -> Self {
        let block = Arc::new(Block::new(numel * dtype.size()));
        Self { block, dtype, views: Mutex::default(), taken: Mutex::default() }
    }

    /// Returns the size in bytes.
    pub(super) fn len(&self) -> usize {
        self.block.bytes
    }

    /// Returns the address of the first byte.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.block.start
    }

    /// Returns whether an address lies in the memory.
    pub(super) fn contains(&self, address: usize) -> bool {
        let start = self.block.start.as_ptr().addr();
        (start..start + self.block.bytes).contains(&address)
    }

    /// Returns a value that keeps the memory allocated.
    #[cfg(feature = "nccl")]
    pub(super) fn hold(&self) -> Box<dyn std::any::Any + Send> {
        Box::new(self.block.clone())
    }

    /// Copies `source` to the bytes from `at` on.
    pub(super) fn write(&self, at: usize, source: &[u8]) {
        self.block.write(at, source);
    }

    /// Returns the byte storage that shows a range of bytes.
    pub(super) fn view(&self, range: Range<usize>) -> Arc<Bytes> {
        assert!(range.end <= self.block.bytes, "a view must stay within its gather buffer");
        let mut views = self.views.lock().ignore_poison();
        let view = || Arc::new(read_only(View { block: self.block.clone(), range: range.clone() }));
        views.entry((range.start, range.end)).or_insert_with(view).clone()
    }

    /// Copies `source` to the bytes from `at` on, and returns them as the storage of one tensor.
    /// Returns `None` if the part is the storage of another tensor already.
    pub(super) fn place(&self, at: usize, source: &[u8]) -> Option<Bytes> {
        let range = at..at + source.len();
        let mut taken = self.taken.lock().ignore_poison();
        if taken.get(&at).is_some_and(|taken| taken.strong_count() > 0) {
            return None;
        }
        // The reads of the thread that dropped the last reference come before this write.
        fence(Ordering::Acquire);
        self.block.write(at, source);
        let mark = Arc::new(());
        taken.insert(at, Arc::downgrade(&mark));
        let place = Place { block: self.block.clone(), range, _taken: mark };
        // SAFETY: the controller has this many initialised bytes.
        Some(unsafe { Bytes::from_controller(Box::new(place), source.len()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_the_storage_of_one_tensor_at_a_time() {
        let memory = Memory::new(64, DType::F32);
        let first = memory.place(16, &[1; 8]).expect("the part is free");
        assert!(memory.place(16, &[2; 8]).is_none(), "the part is taken");
        let other = memory.place(24, &[3; 8]).expect("the part after it is free");
        let view = memory.view(16..32);
        assert_eq!(view[..], [[1; 8], [3; 8]].concat());
        // The storage may have left its tensor.
        let moved = Box::new(first);
        assert!(memory.place(16, &[2; 8]).is_none(), "the part is still taken");
        drop(moved);
        assert!(memory.place(16, &[2; 8]).is_some());
        assert_eq!(view[..], [[2; 8], [3; 8]].concat());
        drop(other);
    }

    #[test]
    fn a_write_to_a_part_is_seen_by_its_views_and_not_by_its_copies() {
        let memory = Memory::new(16, DType::F32);
        let mut part = memory.place(0, &[1; 8]).expect("the part is free");
        let copy = part.clone();
        part[0] = 9;
        assert_eq!(memory.view(0..2)[..], [9, 1]);
        assert_eq!(copy[..], [1; 8]);
    }
}
