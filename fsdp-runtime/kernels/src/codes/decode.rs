//! Values of records, one element after the other.

use super::tables::{DYNAMIC, INT8_FACTOR, NF4};
use crate::StorageType;

/// Returns the scale of a block, given the words of its record and its number in the record.
#[inline(always)]
pub fn scale(record: &[u32], storage: StorageType, block: usize) -> f32 {
    match storage {
        StorageType::Nf4 { double_quant: true, .. } => {
            let code = record[2 + block / 4].to_le_bytes()[block % 4];
            // Two roundings, as bitsandbytes has them.
            DYNAMIC[usize::from(code)] * f32::from_bits(record[0]) + f32::from_bits(record[1])
        }
        _ => f32::from_bits(record[0]),
    }
}

/// Returns the values of whole records of codes, as f32.
///
/// # Panics
///
/// For a storage type without codes.
pub fn decode(words: &[u32], storage: StorageType) -> Vec<f32> {
    let (len, block) = (storage.record_len(), storage.block());
    let mut values = Vec::with_capacity(words.len() / storage.record_words() * len);
    for record in words.chunks_exact(storage.record_words()) {
        for at in 0..len {
            let scale = scale(record, storage, at / block);
            values.push(match storage {
                StorageType::Int8 { .. } => {
                    let code = record[1 + at / 4].to_le_bytes()[at % 4];
                    f32::from(code.cast_signed()) * scale * INT8_FACTOR
                }
                StorageType::Nf4 { .. } => {
                    let codes = &record[storage.record_words() - len / 8..];
                    let pair = codes[at / 8].to_le_bytes()[at % 8 / 2];
                    // The first of two elements is in the upper half of a byte.
                    let code = if at % 2 == 0 { pair >> 4 } else { pair & 15 };
                    NF4[usize::from(code)] * scale
                }
                StorageType::F32 | StorageType::Bf16 => unreachable!("{storage} has no codes"),
            });
        }
    }
    values
}
