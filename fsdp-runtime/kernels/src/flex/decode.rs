//! Values of codes, written once to where they are used.

use std::mem::MaybeUninit;

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};
use multiversion::multiversion;
use rayon::prelude::*;

use super::float::{KernelFloat, slice, with_float_type};
use super::new_tensor::{TASK, Uninit, new_tensor};
use super::nf4;
use crate::StorageType;
use crate::codes::{INT8_FACTOR, scale};

/// Returns the words of a tensor of codes.
fn words(codes: &FlexTensor) -> &[u32] {
    bytemuck::cast_slice(slice::<f32>(codes))
}

/// Implements [`Kernels::decode`](crate::Kernels::decode) for a new tensor of
/// elements `E`.
pub(super) fn new<E: KernelFloat>(
    codes: &FlexTensor,
    storage: StorageType,
    shape: Shape,
) -> FlexTensor {
    let codes = codes.to_contiguous();
    let words = words(&codes);
    assert_eq!(words.len(), storage.stored_len(shape.num_elements()), "words for the elements");
    // A task begins with a record: records are powers of two, and no longer than a task.
    new_tensor(shape, |at, target: &mut Uninit<E>| {
        let words = &words[storage.stored_len(at)..][..storage.stored_len(target.len())];
        records(words, storage, target)
    })
}

/// Writes the values of whole records to `target`, the memory of elements of `dtype`, on all threads of
/// the current rayon pool.
///
/// # Panics
///
/// If the records have another number of elements, if the memory is not aligned, or if `dtype` is not
/// f32, bf16 or f16.
pub fn decode_into(
    codes: &FlexTensor,
    storage: StorageType,
    dtype: DType,
    target: &mut [MaybeUninit<u8>],
) {
    with_float_type!(dtype, |E| {
        // SAFETY: uninitialised bytes may be seen as uninitialised numbers.
        let (before, target, after) = unsafe { target.align_to_mut::<MaybeUninit<E>>() };
        assert!(before.is_empty() && after.is_empty(), "the memory of aligned, whole elements");
        into(codes, storage, target)
    })
}

/// Writes the values of whole records to `target`.
///
/// # Panics
///
/// If the records have another number of elements.
fn into<E: KernelFloat>(codes: &FlexTensor, storage: StorageType, target: &mut Uninit<E>) {
    let codes = codes.to_contiguous();
    let words = words(&codes);
    assert_eq!(words.len(), storage.stored_len(target.len()), "words for the elements");
    let targets = target.par_chunks_mut(TASK);
    let words = words.par_chunks(storage.stored_len(TASK));
    words.zip(targets).for_each(|(words, target)| _ = records(words, storage, target));
}

/// Writes the values of consecutive records, of which the last may have more elements than there are.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn records<'a, E: KernelFloat>(
    words: &[u32],
    storage: StorageType,
    target: &'a mut Uninit<E>,
) -> &'a mut [E] {
    assert_eq!(words.len(), storage.stored_len(target.len()), "words for the elements");
    let (len, block, is_int8) =
        (storage.record_len(), storage.block(), matches!(storage, StorageType::Int8 { .. }));
    let codes_in_word = if is_int8 { 4 } else { 8 };
    let scales = storage.record_words() - len / codes_in_word;
    let (decode_chunk, mut values) = (nf4::decode_chunk(), [0.0; nf4::CHUNK]);
    for (record, target) in words.chunks_exact(storage.record_words()).zip(target.chunks_mut(len)) {
        let blocks = record[scales..].chunks_exact(block / codes_in_word);
        for (index, (codes, target)) in blocks.zip(target.chunks_mut(block)).enumerate() {
            let scale = scale(record, storage, index);
            let codes: &[u8] = bytemuck::cast_slice(codes);
            if is_int8 {
                for (code, target) in codes.iter().zip(target) {
                    let value = f32::from(code.cast_signed()) * scale * INT8_FACTOR;
                    target.write(E::narrow(value));
                }
                continue;
            }
            let (codes, _) = codes.as_chunks::<{ nf4::CHUNK / 2 }>();
            for (codes, target) in codes.iter().zip(target.chunks_mut(nf4::CHUNK)) {
                // SAFETY: the processor has the function's instructions.
                unsafe { decode_chunk(codes, scale, &mut values) };
                for (target, value) in target.iter_mut().zip(values) {
                    target.write(E::narrow(value));
                }
            }
        }
    }
    // SAFETY: there are words for each element, as checked above, so that the loops wrote all.
    unsafe { target.assume_init_mut() }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::codes::{decoded_elements, encode, words_data};

    /// Returns elements of several magnitudes.
    fn elements(numel: usize) -> Vec<f32> {
        (0..numel)
            .map(|at| ((at * 7919 % 4001) as f32 / 500.0 - 4.0) * (at / 64 % 7) as f32)
            .collect()
    }

    fn assert_as_reference<E: KernelFloat + PartialEq>(storage: StorageType, narrow: fn(f32) -> E) {
        for numel in [1, 63, 64, 65, 1024, 5000, TASK + 1024 * 3 + 7] {
            let words = encode(&elements(numel), &(0..numel), storage);
            let bytes = bytemuck::cast_slice(&words);
            let expected = decoded_elements(bytes, storage, numel);
            let records = words.len() / storage.record_words();
            let codes =
                FlexTensor::from_data(words_data(words.clone(), Shape::from([words.len()])));
            let found = new::<E>(&codes, storage, Shape::from([numel]));
            let mut whole = vec![MaybeUninit::new(E::zeroed()); records * storage.record_len()];
            into(&codes, storage, &mut whole);
            for (at, expected) in expected.into_iter().enumerate() {
                let expected = narrow(expected);
                assert!(slice::<E>(&found)[at] == expected, "{storage}, {at} of {numel}");
                // SAFETY: all elements were initialised.
                assert!(unsafe { whole[at].assume_init() } == expected, "{storage}, {at}");
            }
        }
    }

    #[test]
    fn values_are_those_of_the_reference_in_every_dtype() {
        for storage in [
            StorageType::INT8,
            StorageType::NF4,
            StorageType::Nf4 { block: 64, double_quant: false },
            StorageType::Nf4 { block: 2048, double_quant: true },
            StorageType::Int8 { block: 4096 },
        ] {
            assert_as_reference::<f32>(storage, |it| it);
            assert_as_reference::<bf16>(storage, bf16::from_f32);
            assert_as_reference::<f16>(storage, f16::from_f32);
        }
    }
}
