//! Flex: a slot is host memory; a view of it is a tensor whose bytes begin and end where the
//! parameter does, so that every kernel takes its fast path.

use std::alloc::{Layout as Allocation, alloc_zeroed, dealloc, handle_alloc_error};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use burn::backend::Flex;
use burn::backend::TensorMetadata;
use burn::backend::flex::{FlexDevice, FlexTensor, Layout};
use burn::tensor::{DType, Element, Shape, TensorData};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use bytemuck::Pod;

use super::shard_backend::{ShardBackend, Value, cast, dispatch};
use crate::backend::Norm;
use crate::backend::kernels::Kernels;

/// Bytes a slot is aligned to: a cache line, and the widest vector register.
const ALIGN: usize = 64;

/// Host memory that Flex tensors view while the runtime rewrites it between units.
#[derive(Debug)]
pub(crate) struct Block {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the block is plain memory. Who may touch it when is settled by the schedule: one thread
// writes it between a unit's reshard and the end of the next gather, and only then; views are read
// between that end and the next reshard.
unsafe impl Send for Block {}
// SAFETY: as above; the methods that write take `&self` because views share the block.
unsafe impl Sync for Block {}

impl Block {
    fn allocation(bytes: usize) -> Allocation {
        Allocation::from_size_align(bytes.max(ALIGN), ALIGN).expect("a slot fits the address space")
    }

    fn new(bytes: usize) -> Self {
        let allocation = Self::allocation(bytes);
        // SAFETY: the allocation's size is not zero.
        let start = unsafe { alloc_zeroed(allocation) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(allocation));
        Self { start, bytes }
    }

    fn write(&self, at: usize, source: &[u8]) {
        assert!(at + source.len() <= self.bytes, "a gather stays within its slot");
        // SAFETY: the range lies within the block, `source` is other memory, and no view of the
        // block is read while the schedule writes it.
        unsafe {
            self.start.add(at).copy_from_nonoverlapping(NonNull::from(source).cast(), source.len())
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this very allocation; views hold an `Arc` of the block.
        unsafe { dealloc(self.start.as_ptr(), Self::allocation(self.bytes)) }
    }
}

/// Part of a block as Burn's byte storage. It cannot be written through, nor unwrapped: every
/// tensor over it shares its `Arc` with the slot, so Burn copies before it mutates.
struct View {
    block: Arc<Block>,
    range: Range<usize>,
}

impl AllocationController for View {
    /// What a copy of the view is aligned to: Burn's own storage goes no further.
    fn alloc_align(&self) -> usize {
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Native
    }

    unsafe fn memory_mut(
        &mut self,
        _: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        Err(AccessError::WouldCopy)
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        // SAFETY: the range lies within the block (checked in `Memory::bytes`), which is
        // initialised, lives as long as `self`, and is not written while a view is read.
        Ok(unsafe {
            std::slice::from_raw_parts(
                self.block.start.add(self.range.start).as_ptr().cast(),
                self.range.len(),
            )
        })
    }
}

/// A slot's memory, and the byte storages handed out for parts of it.
#[derive(Debug)]
pub(crate) struct Memory {
    block: Arc<Block>,
    dtype: DType,
    /// One storage a viewed range, kept so that no view is ever its storage's only owner.
    views: std::sync::Mutex<std::collections::HashMap<(usize, usize), Arc<Bytes>>>,
}

impl Memory {
    fn bytes(&self, range: Range<usize>) -> Arc<Bytes> {
        assert!(range.end <= self.block.bytes, "a view stays within its slot");
        let mut views = self.views.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let view = || {
            let controller = View { block: self.block.clone(), range: range.clone() };
            // SAFETY: the controller reports `range.len()` initialised bytes.
            Arc::new(unsafe { Bytes::from_controller(Box::new(controller), range.len()) })
        };
        views.entry((range.start, range.end)).or_insert_with(view).clone()
    }
}

/// The elements of `range` of a flattened tensor, without a copy where it is contiguous.
fn with_elements<E: Element + Pod, T>(
    tensor: &FlexTensor,
    range: Range<usize>,
    f: impl FnOnce(&[E]) -> T,
) -> T {
    match tensor.as_slice::<E>() {
        Some(slice) => f(&slice[range]),
        None => {
            let tensor = tensor.to_contiguous();
            f(&tensor.as_slice::<E>().expect("a copy is contiguous")[range])
        }
    }
}

/// Runs `$body` with `$elem` naming the element of a float `$dtype`.
macro_rules! with_float {
    ($dtype:expr, $elem:ident, $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $elem = f32;
                $body
            }
            DType::BF16 => {
                type $elem = half::bf16;
                $body
            }
            DType::F16 => {
                type $elem = half::f16;
                $body
            }
            other => unreachable!("{other:?} is refused when a model is sharded"),
        }
    };
}

/// The bytes of `range` (in elements) of a flattened tensor, without a copy where it is contiguous.
fn with_raw<T>(tensor: &FlexTensor, range: Range<usize>, f: impl FnOnce(&[u8]) -> T) -> T {
    with_float!(tensor.dtype(), E, {
        with_elements::<E, _>(tensor, range, |elements| f(bytemuck::cast_slice(elements)))
    })
}

fn owned<E: Element>(elements: Vec<E>, shape: Shape) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(elements, shape))
}

/// A contiguous tensor.
#[cfg(feature = "mpi")]
pub(crate) struct Contiguous(FlexTensor);

#[cfg(feature = "mpi")]
impl AsRef<[u8]> for Contiguous {
    fn as_ref(&self) -> &[u8] {
        with_float!(self.0.dtype(), E, {
            bytemuck::cast_slice(self.0.as_slice::<E>().expect("made contiguous by `host`"))
        })
    }
}

impl ShardBackend for Flex {
    type Memory = Memory;
    #[cfg(feature = "mpi")]
    type Host = Contiguous;

    dispatch!(Flex);

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

    fn poison(memory: &Memory, numel: usize) {
        // All bits set is NaN in every float type.
        const NAN: [u8; 4096] = [u8::MAX; 4096];
        let bytes = numel * memory.dtype.size();
        for at in (0..bytes).step_by(NAN.len()) {
            memory.block.write(at, &NAN[..NAN.len().min(bytes - at)]);
        }
    }

    /// Flex runs every op to its end before it returns.
    fn release(_: &Memory) {}

    fn complete(_: &FlexDevice) {}

    fn detach(memory: &Memory, tensor: FlexTensor) -> FlexTensor {
        let start = memory.block.start.as_ptr().addr();
        let looks_in =
            (start..start + memory.block.bytes).contains(&tensor.bytes().as_ptr().addr());
        if !looks_in {
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

    /// Tests have a NCCL of their own, on the host.
    #[cfg(feature = "nccl")]
    fn device_memory(memory: &Memory) -> Result<super::shard_backend::DeviceMemory, String> {
        if cfg!(test) {
            let start = memory.block.start.as_ptr().expose_provenance() as u64;
            return Ok(super::shard_backend::DeviceMemory {
                start,
                _held: Box::new(memory.block.clone()),
            });
        }
        Err("a tensor on Flex lies in the host's memory, and NCCL needs CUDA devices".into())
    }

    fn copy_range(tensor: FlexTensor, range: Range<usize>, shape: Shape) -> FlexTensor {
        with_float!(tensor.dtype(), E, {
            with_elements::<E, _>(&tensor, range, |elements| owned(elements.to_vec(), shape))
        })
    }

    fn mean(parts: &[FlexTensor], range: Range<usize>, divisor: usize, shape: Shape) -> FlexTensor {
        Self::rank_mean(parts, range, divisor, shape)
    }

    fn norm_sums(parts: &[(FlexTensor, Range<usize>)], norm: Norm) -> Vec<f64> {
        Self::sums(parts, norm).iter().map(|sums| sums.term(norm)).collect()
    }

    fn to_host(_: FlexTensor) -> Option<TensorData> {
        None
    }

    fn with_bytes(tensor: FlexTensor, f: &mut dyn FnMut(&[u8])) {
        let numel = tensor.shape().num_elements();
        with_raw(&tensor, 0..numel, f);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_sees_what_is_written_later_and_is_never_written_through() {
        let memory = Flex::alloc(&FlexDevice, 64, DType::F32);
        let view = Flex::view(&memory, 2, Shape::from([2, 2]));
        let source = owned(vec![1f32, 2.0, 3.0, 4.0], Shape::from([4]));
        Flex::write(&memory, vec![(2, source)]);
        assert_eq!(view.as_slice::<f32>(), Some(&[1.0, 2.0, 3.0, 4.0][..]));

        let mut doubled = view.clone();
        doubled.storage_mut::<f32>().iter_mut().for_each(|x| *x *= 2.0);
        assert_eq!(view.as_slice::<f32>(), Some(&[1.0, 2.0, 3.0, 4.0][..]), "copied on write");
        assert_eq!(view.clone().into_data().num_elements(), 4);
        assert_eq!(view.as_slice::<f32>(), Some(&[1.0, 2.0, 3.0, 4.0][..]), "not taken out");
    }

    #[test]
    fn detach_copies_views_of_the_slot_and_nothing_else() {
        let memory = Flex::alloc(&FlexDevice, 64, DType::F32);
        let view = Flex::detach(&memory, Flex::view(&memory, 0, Shape::from([3])));
        let own = owned(vec![1f32], Shape::from([1]));
        let start = own.bytes().as_ptr();
        assert_eq!(Flex::detach(&memory, own).bytes().as_ptr(), start);
        Flex::poison(&memory, 64);
        assert_eq!(view.as_slice::<f32>(), Some(&[0.0; 3][..]));
    }

    #[test]
    fn the_mean_of_a_part_is_that_part_of_the_mean() {
        let parts: Vec<_> = (0..3)
            .map(|rank| {
                owned(
                    (0..101).map(|i| (i * (rank + 3)) as f32 * 0.37).collect(),
                    Shape::from([101]),
                )
            })
            .collect();
        let whole = Flex::mean(&parts, 0..101, 3, Shape::from([101]));
        let part = Flex::mean(&parts, 40..77, 3, Shape::from([37]));
        assert_eq!(part.as_slice::<f32>(), Some(&whole.as_slice::<f32>().unwrap()[40..77]));
    }
}
