//! The form in which a parameter's elements are stored, and how many elements share a record of it.
//!
//! Codes are stored in *records*: a fixed number of 32-bit words for a fixed number of consecutive
//! elements of a matrix, counted from its first element. A record holds whole blocks, with their
//! scales. So the words of any range of records are a range of words, whichever rank stores them.
//!
//! | storage type | elements of a record | words of a record |
//! |---|---|---|
//! | `Int8 { block }` | `block` | the scale, then four codes in each word |
//! | `Nf4 { block, double_quant: false }` | `block` | the scale, then eight codes in each word |
//! | `Nf4 { block, double_quant: true }` | the larger of 1024 and four blocks | the scale of the scales, their mean, four scale codes in each word, eight codes in each word |
//!
//! Words are little-endian.

use std::fmt;
use std::ops::Range;

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

/// Smallest and largest number of elements that share a scale.
const BLOCKS: Range<usize> = 64..4097;
/// Least number of elements of a record under double quantisation. A record repeats the 8 bytes that
/// 256 blocks share, so a shorter one takes more memory, and a longer one pads small matrices more.
const LEAST_RECORD: usize = 1024;

/// The form in which a rank stores the elements of a parameter between uses, and in which it sends
/// them in all-gathers. They are decoded to the compute dtype in the gather buffer.
///
/// `Int8` and `Nf4` apply to the frozen matrices that are sharded, or that would be under another
/// strategy. Vectors, and matrices below
/// `persist_below`, stay in f32. `Bf16` applies to all
/// parameters, trained or frozen.
///
/// Blocks are counted from the first element of each matrix, so that values do not depend on the
/// number of ranks, the strategy or the wrapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StorageType {
    /// 32-bit float.
    #[default]
    F32,
    /// bfloat16, rounded to the nearest, ties to even. The steps of an optimizer round at random:
    /// see `StoragePolicy`.
    Bf16,
    /// 8-bit integers with an f32 scale for each block: `code · scale / 127`, where the scale is the
    /// largest magnitude of the block. The rule of LLM.int8() in bitsandbytes, for blocks in place of
    /// rows.
    Int8 {
        /// Number of elements that share a scale: a power of two from 64 to 4096.
        block: usize,
    },
    /// 4-bit NormalFloat of QLoRA, as in bitsandbytes: one of 16 values, times the largest magnitude
    /// of the block.
    Nf4 {
        /// Number of elements that share a scale: a power of two from 64 to 4096.
        block: usize,
        /// Whether the scales are stored in 8 bits, as QLoRA's double quantisation does: the mean of
        /// all scales of a matrix is subtracted, and 256 differences share a scale.
        double_quant: bool,
    },
}

impl StorageType {
    /// 8-bit integers in blocks of 64.
    pub const INT8: Self = Self::Int8 { block: 64 };
    /// QLoRA's data type: NF4 in blocks of 64, with double quantisation.
    pub const NF4: Self = Self::Nf4 { block: 64, double_quant: true };

    /// Returns whether elements are stored as codes with scales.
    pub fn is_coded(self) -> bool {
        matches!(self, Self::Int8 { .. } | Self::Nf4 { .. })
    }

    /// Returns the number of elements that share a scale; 1 where elements have none.
    pub fn block(self) -> usize {
        match self {
            Self::Int8 { block } | Self::Nf4 { block, .. } => block,
            Self::F32 | Self::Bf16 => 1,
        }
    }

    /// Returns what is wrong with the block size, if anything is.
    pub fn wrong_block(self) -> Option<&'static str> {
        let block = self.block();
        let fits = !self.is_coded() || (block.is_power_of_two() && BLOCKS.contains(&block));
        (!fits).then_some("use a block of 64, 128, 256, 512, 1024, 2048 or 4096 elements")
    }

    /// Returns the number of elements of a record; 1 where elements are stored one by one.
    pub fn record_len(self) -> usize {
        match self {
            Self::Nf4 { block, double_quant: true } => LEAST_RECORD.max(4 * block),
            _ => self.block(),
        }
    }

    /// Returns the number of words of a record, or of elements where these are stored one by one.
    pub fn record_words(self) -> usize {
        let len = self.record_len();
        match self {
            Self::F32 | Self::Bf16 => 1,
            Self::Int8 { .. } => 1 + len / 4,
            Self::Nf4 { double_quant: false, .. } => 1 + len / 8,
            Self::Nf4 { block, double_quant: true } => 2 + len / block / 4 + len / 8,
        }
    }

    /// Returns the number of stored elements, or words, for `numel` elements of a matrix.
    pub fn stored_len(self, numel: usize) -> usize {
        numel.div_ceil(self.record_len()) * self.record_words()
    }

    /// Returns the stored elements, or words, of a range that begins with a record and ends with one
    /// or at the end of the matrix.
    pub fn stored_range(self, range: &Range<usize>) -> Range<usize> {
        let begins = range.is_empty() || range.start.is_multiple_of(self.record_len());
        debug_assert!(begins, "{range:?} begins with a record of {self}");
        let start = self.stored_len(range.start);
        start..start + self.stored_len(range.len())
    }

    /// Returns the dtype of the tensor that a rank stores. The words of codes have the bits of f32
    /// elements.
    pub fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::F32 | Self::Int8 { .. } | Self::Nf4 { .. } => DType::F32,
        }
    }

    /// Returns the dtype in which elements that are gathered in `gathered` are sent.
    pub fn sent_dtype(self, gathered: DType) -> DType {
        if self == Self::F32 { gathered } else { self.dtype() }
    }

    /// Returns the form itself for codes, and `None` for elements that are stored one by one.
    pub fn codes(self) -> Option<Self> {
        self.is_coded().then_some(self)
    }

    /// Returns the size in bytes of what a rank stores for `numel` elements.
    pub fn stored_bytes(self, numel: usize) -> usize {
        self.stored_len(numel) * self.dtype().size()
    }
}

impl fmt::Display for StorageType {
    /// Prints the name: `f32`, `bf16`, `int8(64)`, `nf4(64)`, or `nf4(64, double_quant)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::Bf16 => f.write_str("bf16"),
            Self::Int8 { block } => write!(f, "int8({block})"),
            Self::Nf4 { block, double_quant: false } => write!(f, "nf4({block})"),
            Self::Nf4 { block, double_quant: true } => write!(f, "nf4({block}, double_quant)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_take_the_stated_bits_of_an_element() {
        let bits =
            |storage: StorageType| storage.stored_bytes(1 << 20) as f64 * 8.0 / f64::from(1 << 20);
        assert_eq!(bits(StorageType::F32), 32.0);
        assert_eq!(bits(StorageType::Bf16), 16.0);
        assert_eq!(bits(StorageType::INT8), 8.5);
        assert_eq!(bits(StorageType::Nf4 { block: 64, double_quant: false }), 4.5);
        assert_eq!(bits(StorageType::NF4), 4.1875);
    }

    #[test]
    fn records_are_whole_words_and_blocks() {
        for block in [64, 128, 256, 512, 1024, 2048, 4096] {
            for storage in [
                StorageType::Int8 { block },
                StorageType::Nf4 { block, double_quant: false },
                StorageType::Nf4 { block, double_quant: true },
            ] {
                assert_eq!(storage.wrong_block(), None);
                let (len, blocks) = (storage.record_len(), storage.record_len() / block);
                assert!(len.is_power_of_two() && len.is_multiple_of(block), "{storage}");
                // 256 blocks share a scale of scales.
                assert!(256_usize.is_multiple_of(blocks), "{storage}");
                assert!(blocks == 1 || blocks.is_multiple_of(4), "{storage}");
                assert_eq!(storage.stored_range(&(len..2 * len + 1)).len(), {
                    2 * storage.record_words()
                });
            }
        }
        for block in [0, 1, 32, 96, 8192] {
            assert!(StorageType::Int8 { block }.wrong_block().is_some(), "{block}");
        }
        assert!(StorageType::Bf16.wrong_block().is_none());
    }
}
