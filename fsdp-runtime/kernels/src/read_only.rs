//! Host memory that tensors share with the runtime.

use std::mem::MaybeUninit;

use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};

/// Host memory that Burn reads as the elements of tensors.
///
/// Burn neither writes through it nor takes it out of a tensor that shares it: it copies the memory
/// before a mutation.
pub trait ReadOnly: Send + Sync + 'static {
    /// Returns the size in bytes.
    fn size(&self) -> usize;

    /// Returns all [`size`](Self::size) bytes.
    fn bytes(&self) -> &[u8];

    /// Copies the first bytes to `target`.
    fn copy_to(&self, target: &mut [u8]) {
        target.copy_from_slice(&self.bytes()[..target.len()]);
    }
}

/// Returns the memory as byte storage of Burn.
pub fn read_only(memory: impl ReadOnly) -> Bytes {
    let len = memory.size();
    // SAFETY: the controller provides `len` initialised bytes.
    unsafe { Bytes::from_controller(Box::new(Controller(memory)), len) }
}

struct Controller<T>(T);

impl<T: ReadOnly> AllocationController for Controller<T> {
    /// Returns the alignment that a copy gets, in bytes: that of Burn's own storage.
    fn alloc_align(&self) -> usize {
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Native
    }

    fn capacity(&self) -> usize {
        self.0.size()
    }

    unsafe fn memory_mut(
        &mut self,
        _: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        Err(AccessError::WouldCopy)
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let bytes = self.0.bytes();
        assert_eq!(bytes.len(), self.0.size(), "all bytes");
        // SAFETY: `MaybeUninit<u8>` has the layout of `u8`, and nothing writes through the result.
        Ok(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) })
    }

    unsafe fn copy_into(&self, target: &mut [u8]) {
        self.0.copy_to(target);
    }
}
