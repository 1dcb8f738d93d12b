//! [`ShardBackend`] for Flex, Burn's CPU backend.
//!
//! A gather buffer is a block of host memory. A view is a tensor whose byte storage covers exactly
//! the parameter's part of the block, so that Flex's kernels use their fast path for whole
//! contiguous tensors.

use std::ops::Range;
#[cfg(feature = "mpi")]
use std::ptr::NonNull;

use burn::backend::Flex;
use burn::backend::TensorMetadata;
use burn::backend::flex::{FlexDevice, FlexTensor, Layout};
use burn::tensor::{DType, Element, Shape, TensorData};
use bytemuck::Pod;
use fsdp_kernels::flex::decode_into;
use fsdp_kernels::{Kernels, Norm, cast, with_float_type};

use super::flex_memory::Memory;
use super::model_backend::{FloatTensor, ModelBackend, dispatch};
#[cfg(feature = "nccl")]
use super::shard_backend::DeviceMemory;
use super::shard_backend::ShardBackend;
use crate::layout::StorageType;

#[cfg(all(test, feature = "nccl"))]
thread_local! {
    /// Time for which the device of this thread is busy, as a GPU is that frees memory.
    pub(crate) static BUSY: std::cell::Cell<std::time::Duration> = const { std::cell::Cell::new(std::time::Duration::ZERO) };
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
    const PLACES: bool = true;

    fn alloc(_: &FlexDevice, numel: usize, dtype: DType) -> Memory {
        Memory::new(numel, dtype)
    }

    fn view(memory: &Memory, offset: usize, shape: Shape) -> FlexTensor {
        let size = memory.dtype.size();
        let bytes = memory.view(offset * size..(offset + shape.num_elements()) * size);
        FlexTensor::from_arc(bytes, Layout::contiguous(shape), memory.dtype)
    }

    fn write(memory: &Memory, parts: Vec<(usize, FlexTensor)>) {
        for (offset, source) in parts {
            let source = cast::<Self>(source, memory.dtype);
            let numel = source.shape().num_elements();
            let at = offset * memory.dtype.size();
            with_raw(&source, 0..numel, |source| memory.write(at, source));
        }
    }

    fn decode_into(memory: &Memory, codes: FlexTensor, storage: StorageType) {
        let records = codes.shape().num_elements() / storage.record_words();
        let numel = records * storage.record_len();
        let bytes = numel * memory.dtype.size();
        assert!(bytes <= memory.len(), "a write must stay within its buffer");
        let start = memory.start().as_ptr().cast();
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
            memory.write(at, &NAN[..NAN.len().min(bytes - at)]);
        }
    }

    // Flex finishes every operation before it returns, so that `release` and fences need no wait.
    // The channels between a rank's threads make writes visible to the other thread.
    fn release(_: &Memory) {}

    fn fence(_: &FlexDevice) {}

    fn wait_for(_: &()) {}

    fn lies_in(memory: &Memory, offset: usize, tensor: &FlexTensor) -> bool {
        let size = memory.dtype.size();
        let bytes = offset * size..(offset + tensor.shape().num_elements()) * size;
        tensor.dtype() == memory.dtype
            && tensor.is_contiguous()
            && tensor.layout().start_offset() == 0
            && bytes.end <= memory.len()
            && tensor.bytes().as_ptr().addr() == memory.start().as_ptr().addr() + bytes.start
    }

    fn place(memory: &Memory, offset: usize, tensor: &FlexTensor) -> Option<FlexTensor> {
        if tensor.dtype() != memory.dtype {
            return None;
        }
        let (shape, at) = (tensor.shape(), offset * memory.dtype.size());
        let place = |source: &[u8]| memory.place(at, source);
        let bytes = with_raw(tensor, 0..shape.num_elements(), place)?;
        Some(FlexTensor::new(bytes, Layout::contiguous(shape), memory.dtype))
    }

    fn detach(memory: &Memory, tensor: FlexTensor) -> FlexTensor {
        if !memory.contains(tensor.bytes().as_ptr().addr()) {
            return tensor;
        }
        let (numel, shape) = (tensor.shape().num_elements(), tensor.shape());
        Self::copy_range(tensor, 0..numel, shape)
    }

    #[cfg(feature = "mpi")]
    fn host_memory(memory: &Memory) -> Option<NonNull<u8>> {
        Some(memory.start())
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
            let start = memory.start().as_ptr().expose_provenance() as u64;
            return Ok(DeviceMemory { start, stream: 0, _held: memory.hold() });
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
