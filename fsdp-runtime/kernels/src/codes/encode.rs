//! Records of elements.

use std::ops::Range;

use rayon::prelude::*;

use super::tables::{DYNAMIC, NF4, SCALES};
use crate::StorageType;

/// Number of records that a task of the thread pool makes, at least.
const TASK: usize = 64;

/// Returns the words of the records of elements `range` of a matrix.
///
/// `elements` are all elements of the matrix if [`needs_matrix`], and else those of the range. The
/// range begins with a record, and ends with one or at the end of the matrix. Elements beyond the
/// end count as zeros.
///
/// A block with a NaN or an infinity decodes to NaN and infinities. The elements of a block whose
/// largest magnitude is below 2^-121 become zeros.
///
/// # Panics
///
/// For a storage type without codes, and if `elements` has another length.
pub fn encode(elements: &[f32], range: &Range<usize>, storage: StorageType) -> Vec<u32> {
    let scales = needs_matrix(storage).then(|| CodedScales::new(elements, storage));
    let own = if scales.is_some() { &elements[range.clone()] } else { elements };
    assert_eq!(own.len(), range.len(), "the elements are those to encode");
    let (len, words, block) = (storage.record_len(), storage.record_words(), storage.block());
    let mut records = vec![0; storage.stored_len(own.len())];
    let tasks = records.par_chunks_exact_mut(words).zip(own.par_chunks(len)).enumerate();
    tasks.with_min_len(TASK).for_each(|(index, (record, elements))| {
        let codes = match &scales {
            Some(scales) => {
                let first = (range.start + index * len) / block;
                scales.write(first..first + len / block, record)
            }
            None => {
                record[0] = largest(elements).to_bits();
                &mut record[1..]
            }
        };
        let blocks = elements.chunks(block);
        for (elements, codes) in blocks.zip(codes.chunks_exact_mut(codes_words(storage))) {
            write_codes(elements, storage, codes);
        }
    });
    records
}

/// Returns whether the codes of a part of a matrix depend on all elements of the matrix.
pub fn needs_matrix(storage: StorageType) -> bool {
    matches!(storage, StorageType::Nf4 { double_quant: true, .. })
}

/// Returns the number of words that hold the codes of a block.
fn codes_words(storage: StorageType) -> usize {
    match storage {
        StorageType::Int8 { block } => block / 4,
        StorageType::Nf4 { block, .. } => block / 8,
        StorageType::F32 | StorageType::Bf16 => unreachable!("{storage} has no codes"),
    }
}

/// Returns the largest magnitude; NaN if an element is NaN.
fn largest(elements: &[f32]) -> f32 {
    // The bits of a NaN are above those of infinity.
    let magnitude = |element: &f32| element.to_bits() & (u32::MAX >> 1);
    let largest = f32::from_bits(elements.iter().map(magnitude).max().unwrap_or(0));
    // Devices differ in the bits of a NaN that they cast.
    if largest.is_nan() { f32::NAN } else { largest }
}

/// Returns the reciprocal of a scale, or 0 for scales so small that 127 times it would be infinite.
fn reciprocal(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse > f32::MAX / 127.0 { 0.0 } else { inverse }
}

/// Writes the codes of a block, whose last elements may be missing.
fn write_codes(elements: &[f32], storage: StorageType, words: &mut [u32]) {
    let scale = largest(elements);
    if let StorageType::Int8 { .. } = storage {
        let factor = 127.0 * reciprocal(scale);
        let code = |element: f32| (element * factor).round_ties_even() as i8;
        for (word, elements) in words.iter_mut().zip(elements.chunks(4)) {
            let mut four = [0.0; 4];
            four[..elements.len()].copy_from_slice(elements);
            *word = u32::from_le_bytes(four.map(|element| code(element).cast_unsigned()));
        }
        return;
    }
    let inverse = reciprocal(scale);
    for (word, elements) in words.iter_mut().zip(elements.chunks(8)) {
        let mut eight = [0.0; 8];
        eight[..elements.len()].copy_from_slice(elements);
        let codes = eight.map(|element| nearest_nf4(element * inverse));
        // The first of two elements is in the upper half of a byte.
        let byte = |at: usize| codes[2 * at] << 4 | codes[2 * at + 1];
        *word = u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)]);
    }
}

/// Numbers halfway between neighbouring values of NF4.
const BETWEEN: [f32; 15] = {
    let mut between = [0.0; 15];
    let mut at = 0;
    while at < between.len() {
        between[at] = f32::midpoint(NF4[at], NF4[at + 1]);
        at += 1;
    }
    between
};

/// Returns the code of the value nearest to `x`, the lower of two.
fn nearest_nf4(x: f32) -> u8 {
    BETWEEN.iter().map(|between| u8::from(x > *between)).sum()
}

/// The scales of a matrix in 8 bits: `quantize_4bit` with `compress_statistics` in bitsandbytes.
struct CodedScales {
    /// Mean of all scales. Its sum is in f64.
    mean: f32,
    /// Largest difference from the mean, for each group of [`SCALES`] blocks.
    group_scales: Vec<f32>,
    /// Code of each block's scale.
    codes: Vec<u8>,
}

impl CodedScales {
    fn new(elements: &[f32], storage: StorageType) -> Self {
        let scales: Vec<f32> =
            elements.par_chunks(storage.block()).with_min_len(TASK).map(largest).collect();
        let sum: f64 = scales.iter().map(|scale| f64::from(*scale)).sum();
        let mean = (sum / scales.len().max(1) as f64) as f32;
        let mut coded = Self { mean, group_scales: Vec::new(), codes: Vec::new() };
        for group in scales.chunks(SCALES) {
            let differences: Vec<f32> = group.iter().map(|scale| scale - mean).collect();
            let group_scale = largest(&differences);
            let inverse = reciprocal(group_scale);
            coded.group_scales.push(group_scale);
            coded.codes.extend(differences.iter().map(|it| nearest_dynamic(it * inverse)));
        }
        coded
    }

    /// Writes the scales of a record with these blocks, and returns the words after them. The blocks
    /// belong to one group; blocks beyond the end of the matrix have code 0.
    fn write<'a>(&self, blocks: Range<usize>, record: &'a mut [u32]) -> &'a mut [u32] {
        let (scales, codes) = record.split_at_mut(2 + blocks.len() / 4);
        let group_scale = self.group_scales[blocks.start / SCALES];
        scales[..2].copy_from_slice(&[group_scale, self.mean].map(f32::to_bits));
        let code = |block: usize| self.codes.get(block).copied().unwrap_or(0);
        for (word, block) in scales[2..].iter_mut().zip(blocks.step_by(4)) {
            *word = u32::from_le_bytes([0, 1, 2, 3].map(|at| code(block + at)));
        }
        codes
    }
}

/// Returns the code of the value nearest to `x`, the lower of two.
fn nearest_dynamic(x: f32) -> u8 {
    let above = DYNAMIC.partition_point(|value| *value < x).clamp(1, DYNAMIC.len() - 1);
    let is_lower = x - DYNAMIC[above - 1] <= DYNAMIC[above] - x;
    (if is_lower { above - 1 } else { above }) as u8
}
