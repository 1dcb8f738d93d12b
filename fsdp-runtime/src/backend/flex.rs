//! [`ShardBackend`] for Flex, Burn's CPU backend.
//!
//! A gather buffer is a block of host memory. A view is a tensor whose byte storage covers exactly
//! the parameter's part of the block, so that Flex's kernels use their fast path for whole
//! contiguous tensors.

use std::alloc::{Layout as Allocation, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::HashMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use burn::backend::Flex;
use burn::backend::TensorMetadata;
use burn::backend::flex::{FlexDevice, FlexTensor, Layout};
use burn::tensor::{DType, Element, Shape, TensorData};
use burn_std::Bytes;
use bytemuck::Pod;
use fsdp_kernels::flex::decode_into;
use fsdp_kernels::read_only::{ReadOnly, read_only};
use fsdp_kernels::{Kernels, Norm, cast, with_float_type};

use super::model_backend::{FloatTensor, ModelBackend, dispatch};
#[cfg(feature = "nccl")]
use super::shard_backend::DeviceMemory;
use super::shard_backend::ShardBackend;
use crate::error::IgnorePoison;
use crate::layout::StorageType;

#[cfg(all(test, feature = "nccl"))]
thread_local! {
    /// Time for which the device of this thread is busy, as a GPU is that frees memory.
    pub(crate) static BUSY: std::cell::Cell<std::time::Duration> = const { std::cell::Cell::new(std::time::Duration::ZERO) };
}

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
// between that end and the next reshard (see the note of `ShardBackend`).
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
        // SAFETY: the range is within the block, `source` is other memory, and no view of the block
        // is read while the schedule writes it.
        unsafe {
            self.start.add(at).copy_from_nonoverlapping(NonNull::from(source).cast(), source.len())
        }
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
        // SAFETY: the range is within the block (checked in `Memory::bytes`). The block is
        // initialised, lives as long as `self`, and is not written while a view is read.
        unsafe {
            let start = self.block.start.add(self.range.start);
            std::slice::from_raw_parts(start.as_ptr(), self.range.len())
        }
    }
}

/// Memory of a gather buffer, and the byte storages of its views.
#[derive(Debug)]
pub(crate) struct Memory {
    block: Arc<Block>,
    dtype: DType,
    /// One storage for each viewed range of bytes, given as (start, end). Kept so that no view is
    /// the only owner of its storage.
    views: Mutex<HashMap<(usize, usize), Arc<Bytes>>>,
}

impl Memory {
    /// Returns the byte storage for a range of bytes.
    fn bytes(&self, range: Range<usize>) -> Arc<Bytes> {
        assert!(range.end <= self.block.bytes, "a view must stay within its gather buffer");
        let mut views = self.views.lock().ignore_poison();
        let view = || Arc::new(read_only(View { block: self.block.clone(), range: range.clone() }));
        views.entry((range.start, range.end)).or_insert_with(view).clone()
    }
}

/// Calls `f` with elements `range` of a flattened tensor. Copies the tensor only if it is not
/// contiguous.
fn with_elements<E: Element + Pod, T>(
    tensor: &FlexTensor,
    range: Range<usize>,
    f: impl FnOnce(&[E]) -> T,
) -> T {
    match tensor.as_slice::<E>() {
        Some(slice) => f(&slice[range]),
        None => {
            let tensor = tensor.to_contiguous();
            f(&tensor.as_slice::<E>().expect("`to_contiguous` returns a contiguous tensor")[range])
        }
    }
}

/// Calls `f` with the bytes of elements `range` of a flattened tensor. Copies the tensor only if it
/// is not contiguous.
fn with_raw<T>(tensor: &FlexTensor, range: Range<usize>, f: impl FnOnce(&[u8]) -> T) -> T {
    with_float_type!(tensor.dtype(), |E| {
        with_elements::<E, _>(tensor, range, |elements| f(bytemuck::cast_slice(elements)))
    })
}

/// Returns a tensor that owns these elements.
fn from_vec<E: Element>(elements: Vec<E>, shape: Shape) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(elements, shape))
}

/// Contiguous tensor whose elements are read as bytes.
#[cfg(feature = "mpi")]
pub(crate) struct Contiguous(FlexTensor);

#[cfg(feature = "mpi")]
impl std::ops::Deref for Contiguous {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        with_float_type!(self.0.dtype(), |E| {
            bytemuck::cast_slice(
                self.0.as_slice::<E>().expect("`host` returns a contiguous tensor"),
            )
        })
    }
}

impl ModelBackend for Flex {
    type Raw = Self;
    const RECORDS: bool = false;

    dispatch!(Flex);

    fn lower(tensors: Vec<FlexTensor>) -> Vec<FlexTensor> {
        tensors
    }

    fn raise(buffer: FlexTensor) -> FlexTensor {
        buffer
    }

    fn drain(_: &FlexDevice) {}

    fn defer(
        inputs: Vec<FlexTensor>,
        _: Vec<(Shape, DType)>,
        f: impl FnOnce(Vec<FlexTensor>) -> Vec<FlexTensor> + Send + 'static,
    ) -> Vec<FlexTensor> {
        f(inputs)
    }
}

impl ShardBackend for Flex {
    type Fence = ();
    type Memory = Memory;
    #[cfg(feature = "mpi")]
    type Host = Contiguous;
    const IN_HOST_MEMORY: bool = true;

    fn alloc(_: &FlexDevice, numel: usize, dtype: DType) -> Memory {
        let block = Arc::new(Block::new(numel * dtype.size()));
        Memory { block, dtype, views: Default::default() }
    }

    fn view(memory: &Memory, offset: usize, shape: Shape) -> FlexTensor {
        let size = memory.dtype.size();
        let bytes = memory.bytes(offset * size..(offset + shape.num_elements()) * size);
        FlexTensor::from_arc(bytes, Layout::contiguous(shape), memory.dtype)
    }

    fn write(memory: &Memory, parts: Vec<(usize, FlexTensor)>) {
        for (offset, source) in parts {
            let source = cast::<Self>(source, memory.dtype);
            let numel = source.shape().num_elements();
            let at = offset * memory.dtype.size();
            with_raw(&source, 0..numel, |source| memory.block.write(at, source));
        }
    }

    fn decode_into(memory: &Memory, codes: FlexTensor, storage: StorageType) {
        let records = codes.shape().num_elements() / storage.record_words();
        let numel = records * storage.record_len();
        let bytes = numel * memory.dtype.size();
        assert!(bytes <= memory.block.bytes, "a write must stay within its buffer");
        let start = memory.block.start.as_ptr().cast();
        // SAFETY: the bytes are within the block, `codes` is other memory, and no view of the block is
        // read while the schedule writes it.
        let target = unsafe { std::slice::from_raw_parts_mut(start, bytes) };
        decode_into(&codes, storage, memory.dtype, target);
    }

    fn poison(memory: &Memory, numel: usize) {
        // In every float type, all bits set is a NaN.
        const NAN: [u8; 4096] = [u8::MAX; 4096];
        let bytes = numel * memory.dtype.size();
        for at in (0..bytes).step_by(NAN.len()) {
            memory.block.write(at, &NAN[..NAN.len().min(bytes - at)]);
        }
    }

    // Flex finishes every operation before it returns, so that `release` and fences need no wait.
    // The channels between a rank's threads make writes visible to the other thread.
    fn release(_: &Memory) {}

    fn fence(_: &FlexDevice) {}

    fn wait_for(_: &()) {}

    fn detach(memory: &Memory, tensor: FlexTensor) -> FlexTensor {
        let start = memory.block.start.as_ptr().addr();
        let block = start..start + memory.block.bytes;
        if !block.contains(&tensor.bytes().as_ptr().addr()) {
            return tensor;
        }
        let (numel, shape) = (tensor.shape().num_elements(), tensor.shape());
        Self::copy_range(tensor, 0..numel, shape)
    }

    #[cfg(feature = "mpi")]
    fn host_memory(memory: &Memory) -> Option<NonNull<u8>> {
        Some(memory.block.start)
    }

    #[cfg(feature = "mpi")]
    fn host(tensor: FlexTensor) -> Contiguous {
        Contiguous(tensor.to_contiguous())
    }

    /// Returns an address only in unit tests, which run against an imitation of NCCL in host
    /// memory.
    #[cfg(feature = "nccl")]
    fn device_memory(memory: &Memory) -> Result<DeviceMemory, String> {
        if cfg!(test) {
            let start = memory.block.start.as_ptr().expose_provenance() as u64;
            return Ok(DeviceMemory { start, stream: 0, _held: Box::new(memory.block.clone()) });
        }
        Err("a tensor on Flex is in host memory, but NCCL needs CUDA devices".into())
    }

    #[cfg(all(test, feature = "nccl"))]
    fn alone_on_device<R: Send>(_: &FlexDevice, f: impl FnOnce() -> R + Send) -> Result<R, String> {
        std::thread::sleep(BUSY.take());
        Ok(f())
    }

    fn copy_range(tensor: FlexTensor, range: Range<usize>, shape: Shape) -> FlexTensor {
        with_float_type!(tensor.dtype(), |E| {
            with_elements::<E, _>(&tensor, range, |elements| from_vec(elements.to_vec(), shape))
        })
    }

    fn norm_sums(parts: &[(FlexTensor, Range<usize>)], norm: Norm) -> Vec<f64> {
        Self::sums(parts, norm).iter().map(|sums| sums.term(norm)).collect()
    }

    fn to_data(tensor: FlexTensor) -> TensorData {
        tensor.into_data()
    }

    fn with_bytes(tensor: FlexTensor, f: &mut dyn FnMut(&[u8])) {
        let numel = tensor.shape().num_elements();
        with_raw(&tensor, 0..numel, f);
    }
}

#[cfg(test)]
mod tests {
    use fsdp_kernels::RankMean;

    use super::*;

    #[test]
    fn a_view_shows_later_writes_and_burn_copies_it_before_a_mutation() {
        let memory = Flex::alloc(&FlexDevice, 64, DType::F32);
        let view = Flex::view(&memory, 2, Shape::from([2, 2]));
        let source = from_vec(vec![1f32, 2.0, 3.0, 4.0], Shape::from([4]));
        Flex::write(&memory, vec![(2, source)]);
        assert_eq!(view.as_slice::<f32>(), Some(&[1.0, 2.0, 3.0, 4.0][..]));

        let mut doubled = view.clone();
        doubled.storage_mut::<f32>().iter_mut().for_each(|x| *x *= 2.0);
        assert_eq!(
            view.as_slice::<f32>(),
            Some(&[1.0, 2.0, 3.0, 4.0][..]),
            "a mutation must copy the view"
        );
        assert_eq!(view.clone().into_data().num_elements(), 4);
        assert_eq!(
            view.as_slice::<f32>(),
            Some(&[1.0, 2.0, 3.0, 4.0][..]),
            "`into_data` must copy the view"
        );
    }

    #[test]
    fn detach_copies_views_of_the_buffer_and_no_other_tensor() {
        let memory = Flex::alloc(&FlexDevice, 64, DType::F32);
        let view = Flex::detach(&memory, Flex::view(&memory, 0, Shape::from([3])));
        let own = from_vec(vec![1f32], Shape::from([1]));
        let start = own.bytes().as_ptr();
        assert_eq!(Flex::detach(&memory, own).bytes().as_ptr(), start);
        Flex::poison(&memory, 64);
        assert_eq!(view.as_slice::<f32>(), Some(&[0.0; 3][..]));
    }

    #[test]
    fn the_mean_of_a_range_equals_that_range_of_the_whole_mean() {
        let parts: Vec<_> = (0..3)
            .map(|rank| {
                from_vec(
                    (0..101).map(|i| (i * (rank + 3)) as f32 * 0.37).collect(),
                    Shape::from([101]),
                )
            })
            .collect();
        let mean = |start: usize, len: usize| RankMean {
            parts: parts.iter().map(|part| (part.clone(), start)).collect(),
            divisor: 3,
            shape: Shape::from([len]),
        };
        let means = Flex::rank_means(vec![mean(0, 101), mean(40, 37)]);
        let [whole, part] = &means[..] else { panic!("two means") };
        assert_eq!(part.as_slice::<f32>(), Some(&whole.as_slice::<f32>().unwrap()[40..77]));
    }
}
