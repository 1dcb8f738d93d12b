//! Copies between tensors and other host memory, on all threads of the current rayon pool.
//!
//! Offloaded parameters and gradients pass through the page-locked memory of a device's allocator.
//! One thread copies it at a fraction of the speed at which the device reads and writes it.

use std::sync::OnceLock;

use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};
use rayon::prelude::*;

use super::float::{contiguous, slice, with_float_type};
use super::kernels::{CopyTask, copy_tasks};
use super::new_tensor::{Uninit, new_tensor};
use crate::Kernels;
use crate::read_only::{ReadOnly, read_only};

/// Bytes that a task copies.
const PART: usize = 1 << 20;

/// Returns a tensor with a copy of the elements that `bytes` has in order.
///
/// # Panics
///
/// If `bytes` is not as long as the elements, or `dtype` is not f32, bf16 or f16.
pub fn copy_of_bytes(bytes: &[u8], shape: Shape, dtype: DType) -> FlexTensor {
    with_float_type!(dtype, |E| match bytemuck::try_cast_slice::<u8, E>(bytes) {
        Ok(elements) => {
            assert_eq!(elements.len(), shape.num_elements(), "the bytes of all elements");
            new_tensor(shape, |at, part: &mut Uninit<E>| {
                let elements = &elements[at..][..part.len()];
                part.write_copy_of_slice(elements)
            })
        }
        Err(_) => {
            FlexTensor::from_data(TensorData::from_bytes_vec(bytes.to_vec(), shape, dtype))
        }
    })
}

/// Returns the tensor's elements, cast to `dtype`, as bytes that are computed where they are copied
/// to, as with Burn's `Backend::staging`. Where they are read in place, they are computed once.
///
/// # Panics
///
/// If a dtype is not f32, bf16 or f16.
pub fn cast_when_copied(tensor: FlexTensor, dtype: DType) -> TensorData {
    let shape = tensor.shape();
    let len = shape.num_elements() * dtype.size();
    let bytes = CastBytes { tensor: contiguous(tensor), dtype, len, read: OnceLock::new() };
    TensorData::from_bytes(read_only(bytes), shape, dtype)
}

/// Elements of a contiguous tensor as bytes of another dtype.
struct CastBytes {
    tensor: FlexTensor,
    dtype: DType,
    /// Size in bytes.
    len: usize,
    /// The cast tensor, once the bytes have been read in place.
    read: OnceLock<FlexTensor>,
}

impl ReadOnly for CastBytes {
    fn size(&self) -> usize {
        self.len
    }

    fn bytes(&self) -> &[u8] {
        let cast = match self.tensor.dtype() == self.dtype {
            true => &self.tensor,
            false => self.read.get_or_init(|| Flex::cast(self.tensor.clone(), self.dtype, None)),
        };
        with_float_type!(self.dtype, |E| bytemuck::cast_slice(slice::<E>(cast)))
    }

    fn copy_to(&self, target: &mut [u8]) {
        assert_eq!(target.len(), self.len, "a copy of all elements");
        if self.tensor.dtype() == self.dtype {
            // Codes are stored as f32 too: their bits are kept.
            let parts = target.par_chunks_mut(PART).zip(self.bytes().par_chunks(PART));
            return parts.for_each(|(target, source)| target.copy_from_slice(source));
        }
        with_float_type!(self.dtype, |E| match bytemuck::try_cast_slice_mut::<u8, E>(target) {
            Ok(target) => CopyTask::run_all(copy_tasks(&self.tensor, target).collect()),
            Err(_) => target.copy_from_slice(self.bytes()),
        });
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Bytes;
    use half::bf16;

    use super::*;

    const NUMEL: usize = 100_003;

    fn tensor() -> FlexTensor {
        let elements: Vec<f32> = (0..NUMEL).map(|at| at as f32 * 0.37 - 11.0).collect();
        FlexTensor::from_data(TensorData::new(elements, [NUMEL]))
    }

    fn rounded() -> Vec<bf16> {
        slice::<f32>(&tensor()).iter().map(|it| bf16::from_f32(*it)).collect()
    }

    /// Copies to aligned memory, as a device's allocator has it, and to memory that is not aligned.
    #[test]
    fn bytes_are_cast_where_they_are_copied_to() {
        let data = cast_when_copied(tensor(), DType::BF16);
        let (bytes, ..) = data.into_parts();
        let mut target = Bytes::from_elems(vec![bf16::ZERO; NUMEL]);
        bytes.copy_into(&mut target);
        assert_eq!(bytemuck::cast_slice::<u8, bf16>(&target), rounded());
        let len = 2 * NUMEL;
        let bytes = CastBytes { tensor: tensor(), dtype: DType::BF16, len, read: OnceLock::new() };
        let mut shifted = vec![0; len + 1];
        let odd = usize::from(shifted.as_ptr().addr().is_multiple_of(2));
        bytes.copy_to(&mut shifted[odd..][..len]);
        assert_eq!(&shifted[odd..][..len], bytemuck::cast_slice::<bf16, u8>(&rounded()));
    }

    /// The bits of codes, some of which are NaN as f32, are copied as they are.
    #[test]
    fn bytes_of_the_same_dtype_keep_their_bits() {
        let bits: Vec<u32> = (0..NUMEL as u32).map(|at| 0x7f80_0001 ^ (at << 8)).collect();
        let codes: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
        let tensor = FlexTensor::from_data(TensorData::new(codes, [NUMEL]));
        let (bytes, ..) = cast_when_copied(tensor, DType::F32).into_parts();
        let mut target = Bytes::from_elems(vec![0u32; NUMEL]);
        bytes.copy_into(&mut target);
        assert_eq!(bytemuck::cast_slice::<u8, u32>(&target), bits);
        assert_eq!(bytemuck::cast_slice::<u8, u32>(&bytes), bits);
    }

    #[test]
    fn bytes_are_cast_where_they_are_read() {
        let data = cast_when_copied(tensor(), DType::BF16);
        assert_eq!(data.as_slice::<bf16>().unwrap(), rounded());
    }

    #[test]
    fn a_tensor_has_the_elements_of_the_copied_bytes() {
        let elements = rounded();
        for start in [0, 1] {
            // One of the two is not aligned.
            let mut bytes = vec![0; start];
            bytes.extend_from_slice(bytemuck::cast_slice(&elements));
            let copy = copy_of_bytes(&bytes[start..], Shape::from([NUMEL]), DType::BF16);
            assert_eq!(slice::<bf16>(&copy), elements);
        }
    }
}
