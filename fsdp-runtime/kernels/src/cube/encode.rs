//! Codes of elements in 8 bits. The bits are those of `codes::encode`.

use std::ops::Range;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::span::grid;
use super::tensors::{contiguous, element, empty};
use crate::StorageType;

/// Number of codes in a word.
const CODES: usize = 4;
/// Adding it to a number below 2^22 rounds the number to the nearest integer, ties to even, whose bits
/// are then the lowest ones of the sum.
const MAGIC: f32 = 12_582_912.0;

/// Returns the code of an element, in the lowest byte; 0 for a NaN.
#[cube]
fn code_of(element: f32, factor: f32, zero: u32) -> u32 {
    // An integer operation between product and sum, so that no compiler fuses them.
    let product = u32::reinterpret(element * factor) | zero;
    let sum = u32::reinterpret(f32::reinterpret(product) + MAGIC);
    let is_nan = (product & 0x7FFF_FFFFu32) > 0x7F80_0000u32;
    select(is_nan, 0u32, sum & 0xFFu32)
}

/// Writes the records of `count` blocks, one in each thread: the largest magnitude, and the codes of the
/// elements from `from` to `to`. Elements beyond `to` count as zeros.
#[cube(launch_unchecked)]
fn encode_kernel<F: Float>(
    source: &[F],
    words: &mut [u32],
    from: usize,
    to: usize,
    count: usize,
    zero: u32,
    #[comptime] block: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < count {
        let first = from + ABSOLUTE_POS * comptime!(block);
        let record = ABSOLUTE_POS * comptime!(block / CODES + 1);
        let mut largest = 0u32;
        for at in 0..comptime!(block) {
            if first + at < to {
                let bits = u32::reinterpret(f32::cast_from(source[first + at])) & 0x7FFF_FFFFu32;
                // The bits of a NaN are above those of infinity.
                if bits > largest {
                    largest = bits;
                }
            }
        }
        // Devices differ in the bits of a NaN that they cast.
        let largest = select(largest > 0x7F80_0000u32, 0x7FC0_0000u32, largest);
        words[record] = largest;
        let inverse = 1.0f32 / f32::reinterpret(largest);
        // 127 times a larger one would be infinite.
        let factor = select(inverse > comptime!(f32::MAX / 127.0), 0.0f32, 127.0f32 * inverse);
        for word in 0..comptime!(block / CODES) {
            let mut codes = 0u32;
            #[unroll]
            for lane in 0..4usize {
                let at = first + word * comptime!(CODES) + lane;
                if at < to {
                    let code = code_of(f32::cast_from(source[at]), factor, zero);
                    codes |= code << comptime!(8 * lane as u32);
                }
            }
            words[record + 1 + word] = codes;
        }
    }
}

/// Implements [`Kernels::encode_int8`](crate::Kernels::encode_int8).
///
/// # Panics
///
/// If the range exceeds the tensor.
pub(super) fn encode_int8(tensor: CubeTensor, range: Range<usize>, block: usize) -> CubeTensor {
    let tensor = contiguous(tensor);
    assert!(range.end <= tensor.shape().num_elements(), "{range:?} exceeds the tensor");
    let count = range.len().div_ceil(block);
    let len = StorageType::Int8 { block }.stored_len(range.len());
    let words = empty(&tensor, Shape::from([len]), DType::F32);
    if count == 0 {
        return words;
    }
    let client = tensor.client.clone();
    let (cubes, dim) = grid(&client, count);
    let (source, target) = (BufferSlice::of(&tensor), BufferSlice::of(&words));
    // SAFETY: the assertion checks that the tensor has the elements of the range, and the target has a
    // record for each block; the kernel accesses only these.
    unsafe {
        encode_kernel::launch_unchecked(
            &client,
            cubes,
            dim,
            source.buffer_arg(),
            target.buffer_arg(),
            range.start,
            range.end,
            count,
            0,
            block,
            element(tensor.dtype),
        );
    }
    words
}
