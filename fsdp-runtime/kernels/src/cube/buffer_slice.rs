//! Elements of a device buffer.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::accesses;

/// Elements of one buffer from element `start` to the end of the buffer.
#[derive(Clone)]
pub struct BufferSlice {
    /// The buffer. Its handle may itself begin inside an allocation.
    pub handle: Handle,
    /// Index of the slice's first element in the buffer.
    pub start: usize,
    /// Type of the elements.
    pub dtype: DType,
}

impl BufferSlice {
    /// Returns the elements of a contiguous tensor.
    pub fn of(tensor: &CubeTensor) -> Self {
        Self { handle: tensor.handle.clone(), start: 0, dtype: tensor.dtype }
    }

    /// Returns the slice without its first `count` elements.
    pub(super) fn skip(mut self, count: usize) -> Self {
        self.start += count;
        self
    }

    /// Returns a handle to the first `numel` elements of the slice.
    pub fn into_handle(self, numel: usize) -> Handle {
        let bytes = |elements: usize| (elements * self.dtype.size()) as u64;
        let after = self.handle.size_in_used() - bytes(self.start + numel);
        self.handle.offset_start(bytes(self.start)).offset_end(after)
    }

    /// Returns the number of bytes between the start of the allocation and the slice's first
    /// element.
    pub(super) fn byte_offset(&self) -> u64 {
        let in_buffer = self.start * self.dtype.size();
        self.handle.offset_start.unwrap_or(0) + in_buffer as u64
    }

    /// Returns the number of elements of the slice.
    pub(super) fn len(&self) -> usize {
        self.buffer_len().saturating_sub(self.start)
    }

    /// Returns the number of elements of the buffer.
    fn buffer_len(&self) -> usize {
        self.handle.size_in_used() as usize / self.dtype.size()
    }

    /// Returns the whole buffer, from its element 0 on, as a kernel argument.
    pub(super) fn buffer_arg(&self) -> BufferArg {
        self.argument_of(self.len())
    }

    /// Returns [`buffer_arg`](Self::buffer_arg) of a kernel that accesses `elements` elements.
    pub(super) fn argument_of(&self, elements: usize) -> BufferArg {
        accesses::bound(elements, self.dtype);
        // SAFETY: the length is that of the handle.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.buffer_len()) }
    }
}
