//! Values of codes. The bits are those of Flex.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::device::rounds_in_integers;
use super::rounding::{narrowed, rounded};
use super::span::spans_within;
use super::tensors::{contiguous, element, empty};
use crate::StorageType;
use crate::codes::{DYNAMIC, INT8_FACTOR, NF4};

/// Number of scale codes in a word.
const SCALES_IN_WORD: usize = 4;

/// Positions of scales and codes in the records of a storage type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Records {
    is_int8: bool,
    /// Whether scales are stored as codes.
    codes_scales: bool,
    /// Number of elements of a record.
    len: usize,
    /// Number of words of a record.
    words: usize,
    /// Number of elements that share a scale.
    block: usize,
    /// Number of codes in a word.
    codes_in_word: usize,
    /// Number of words before the codes.
    scales: usize,
}

impl Records {
    fn of(storage: StorageType) -> Self {
        let is_int8 = matches!(storage, StorageType::Int8 { .. });
        let codes_in_word = if is_int8 { 4 } else { 8 };
        let (len, words) = (storage.record_len(), storage.record_words());
        Self {
            is_int8,
            codes_scales: matches!(storage, StorageType::Nf4 { double_quant: true, .. }),
            len,
            words,
            block: storage.block(),
            codes_in_word,
            scales: words - len / codes_in_word,
        }
    }
}

/// Returns the scale of block `block` of the record that begins at word `record`.
#[cube]
fn scale_of<N: Size>(
    words: &[u32],
    scale_values: &[f32],
    record: usize,
    block: usize,
    zero: u32,
    #[comptime] records: Records,
) -> Vector<f32, N> {
    let first = Vector::<f32, N>::new(f32::reinterpret(words[record]));
    if comptime!(records.codes_scales) {
        let word = words[record + 2 + block / comptime!(SCALES_IN_WORD)];
        let shift = (block % comptime!(SCALES_IN_WORD)) as u32 * 8u32;
        let code = (word >> shift) & 0xFFu32;
        let value = Vector::<f32, N>::new(scale_values[code as usize]);
        let mean = Vector::<f32, N>::new(f32::reinterpret(words[record + 1]));
        rounded(value * first, zero) + mean
    } else {
        first
    }
}

/// Returns the values of signed 8-bit codes, in the lowest byte of each element.
#[cube]
fn int8_values<N: Size>(codes: Vector<u32, N>) -> Vector<f32, N> {
    // Flipping the sign bit adds 128.
    let shifted = (codes & Vector::new(0xFFu32)) ^ Vector::new(0x80u32);
    Vector::<f32, N>::cast_from(shifted) - Vector::new(128.0f32)
}

/// Returns whether a bit of the codes is 0. `mask` has that bit.
#[cube]
fn is_clear<N: Size>(codes: Vector<u32, N>, #[comptime] mask: u32) -> Vector<bool, N> {
    (codes & Vector::new(mask)).less_than(&Vector::<u32, N>::new(1u32))
}

/// Returns the values of 4-bit codes, in the lowest bits of each element: a tree that selects by one
/// bit after the other.
#[cube]
fn nf4_values<N: Size>(codes: Vector<u32, N>) -> Vector<f32, N> {
    let clear = is_clear(codes, 1u32);
    let mut eight = Sequence::<Vector<f32, N>>::new();
    #[unroll]
    for node in 0..8usize {
        let low = Vector::<f32, N>::new(comptime!(NF4[2 * node]));
        let high = Vector::<f32, N>::new(comptime!(NF4[2 * node + 1]));
        eight.push(select_many(clear, low, high));
    }
    let clear = is_clear(codes, 2u32);
    let mut four = Sequence::<Vector<f32, N>>::new();
    #[unroll]
    for node in 0..4usize {
        let (low, high) = (eight[comptime!(2 * node)], eight[comptime!(2 * node + 1)]);
        four.push(select_many(clear, low, high));
    }
    let clear = is_clear(codes, 4u32);
    let low = select_many(clear, four[0], four[1]);
    let high = select_many(clear, four[2], four[3]);
    select_many(is_clear(codes, 8u32), low, high)
}

/// Returns the products of codes and scales.
#[cube]
fn scaled<N: Size>(
    codes: Vector<u32, N>,
    scale: Vector<f32, N>,
    zero: u32,
    #[comptime] is_int8: bool,
) -> Vector<f32, N> {
    if comptime!(is_int8) {
        // A Vulkan driver may else multiply the scale and the factor first.
        rounded(int8_values(codes) * scale, zero) * Vector::new(INT8_FACTOR)
    } else {
        nf4_values(codes) * scale
    }
}

/// Writes the values of `count` vectors of codes, from element `start` on. A thread's codes lie in one
/// word.
#[cube(launch_unchecked)]
fn decode_kernel<F: Float, N: Size>(
    words: &[u32],
    scale_values: &[f32],
    target: &mut [Vector<F, N>],
    from: usize,
    to: usize,
    start: usize,
    count: usize,
    zero: u32,
    #[comptime] records: Records,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < count {
        let width = N::value();
        let element = start + ABSOLUTE_POS * width;
        let record = from + element / comptime!(records.len) * comptime!(records.words);
        let within = element % comptime!(records.len);
        let block = within / comptime!(records.block);
        let scale = scale_of::<N>(words, scale_values, record, block, zero, records);
        let word =
            words[record + comptime!(records.scales) + within / comptime!(records.codes_in_word)];
        let first = (within % comptime!(records.codes_in_word)) as u32;
        let mut shifts = Vector::<u32, N>::empty();
        #[unroll]
        for lane in 0..width {
            let code = first + comptime!(lane as u32);
            let shift = shift_of(code, comptime!(records.is_int8));
            shifts.insert(lane, shift);
        }
        let codes = Vector::<u32, N>::new(word) >> shifts;
        let values = scaled(codes, scale, zero, comptime!(records.is_int8));
        target[to + ABSOLUTE_POS] = narrowed(values, integers);
    }
}

/// Returns the position of a code's lowest bit in its word. Of two 4-bit codes in a byte, the first is
/// in the upper half.
#[cube]
fn shift_of(code: u32, #[comptime] is_int8: bool) -> u32 {
    if comptime!(is_int8) { code * 8u32 } else { (code ^ 1u32) * 4u32 }
}

/// Writes the values of the first `numel` codes to `target`, rounded to its dtype.
///
/// # Panics
///
/// If a slice has fewer elements.
pub fn decode_into(
    client: &Client,
    codes: &BufferSlice,
    storage: StorageType,
    target: &BufferSlice,
    numel: usize,
) {
    let records = Records::of(storage);
    assert!(storage.stored_len(numel) <= codes.len(), "words for the elements");
    let scale_values: &[f32] = if records.codes_scales { &DYNAMIC } else { &[0.0] };
    let table = client.create_from_slice(bytemuck::cast_slice(scale_values));
    for span in spans_within(client, &[target], numel, records.codes_in_word) {
        let (count, dim) = span.grid(client);
        let (write, to) = span.argument(target);
        // SAFETY: `spans_within` checked that the target holds the elements, and the assertion that
        // there are words for them; the kernel accesses only those of the span. Codes of scales have
        // 8 bits, and the table 256 values if they are read.
        unsafe {
            decode_kernel::launch_unchecked(
                client,
                count,
                dim,
                span.width,
                codes.buffer_arg(),
                BufferArg::from_raw_parts(table.clone(), scale_values.len()),
                write,
                codes.start,
                to,
                span.start,
                span.count,
                0,
                records,
                rounds_in_integers(client, target.dtype),
                element(target.dtype),
            );
        }
    }
}

/// Implements [`Kernels::decode`](crate::Kernels::decode).
pub(super) fn decode(
    codes: CubeTensor,
    storage: StorageType,
    shape: Shape,
    dtype: DType,
) -> CubeTensor {
    let codes = contiguous(codes);
    let target = empty(&codes, shape, dtype);
    let numel = target.shape().num_elements();
    let (source, to) = (BufferSlice::of(&codes), BufferSlice::of(&target));
    decode_into(&codes.client, &source, storage, &to, numel);
    target
}
