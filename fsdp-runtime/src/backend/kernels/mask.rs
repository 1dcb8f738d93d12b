//! Dropout masks on the host: sixteen random bits an element, in the order that the kernels share.
//!
//! A block of the generator has 128 bits and draws for sixteen elements. Each of its bytes is the upper
//! half of one element's bits; the lower half, which matters to one element in 256, is a byte of the next
//! two words added without carry. So each element's bits are uniform, and those of any two elements
//! independent: all are sums of the block's bits, and no sum of two elements' bits is empty (tested).

use burn::tensor::DType;
use half::{bf16, f16};

use crate::backend::philox::{LANES, blocks};

/// Elements drawn from one call of [`blocks`]: word by word, and of each two [`pairs`] of every lane, all
/// first pairs before all second ones.
pub(crate) const BATCH: usize = LANES * 16;

/// Where in the counter-based generator a dropout mask comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaskSource {
    /// The generator's key.
    pub key: [u32; 2],
    /// The half of its counter that does not count the mask's blocks.
    pub place: [u32; 2],
    /// The probability of an element to be zero, in `[0, 1)`.
    pub prob: f64,
}

impl MaskSource {
    /// Sixteen random bits below this make an element zero.
    pub(crate) fn threshold(&self) -> u16 {
        (self.prob * 65536.0).round() as u16
    }

    /// What the other elements are.
    pub(crate) fn keep(&self) -> f32 {
        (1.0 / (1.0 - self.prob)) as f32
    }

    /// As a mask of this dtype has it.
    pub(crate) fn keep_in(&self, dtype: DType) -> f32 {
        match dtype {
            DType::BF16 => bf16::from_f32(self.keep()).to_f32(),
            DType::F16 => f16::from_f32(self.keep()).to_f32(),
            _ => self.keep(),
        }
    }

    /// The mask's first `len` elements.
    pub(crate) fn mask(&self, len: usize) -> Vec<f32> {
        let (threshold, keep) = (self.threshold(), self.keep());
        let factor = |draw| if draw < threshold { 0.0 } else { keep };
        let batch = |batch| draws(&blocks(self.key, batch, self.place)).map(factor);
        (0..).flat_map(batch).take(len).collect()
    }
}

/// Sixteen bits for each of four elements of one word and lane, a pair in the lower and the upper half of
/// each number: those two from the word's odd bytes, these from its even ones.
#[inline(always)]
pub(crate) fn pairs(words: &[[u32; LANES]; 4], word: usize, lane: usize) -> [u32; 2] {
    let upper = words[word][lane];
    let lower = words[(word + 1) % 4][lane] ^ words[(word + 2) % 4][lane];
    let odd = (upper & !LOW_BYTES) | (lower & LOW_BYTES);
    let even = ((upper & LOW_BYTES) << 8) | ((lower & !LOW_BYTES) >> 8);
    [odd, even]
}

/// The lower byte of each half.
pub(crate) const LOW_BYTES: u32 = 0x00FF_00FF;
/// The uppermost bit of a draw, which is turned over before it is compared: so a machine that compares
/// numbers with a sign alone, as AVX2 does, takes the draw as it is.
pub(crate) const SIGN: u32 = 0x8000;

/// Each element of a batch becomes zero where this is below the threshold.
fn draws(words: &[[u32; LANES]; 4]) -> [u16; BATCH] {
    let mut draws = [0; BATCH];
    for (word, draws) in draws.chunks_exact_mut(4 * LANES).enumerate() {
        let (first, second) = draws.split_at_mut(2 * LANES);
        for lane in 0..LANES {
            let [odd, even] = pairs(words, word, lane);
            for (pair, draws) in [(odd, &mut *first), (even, &mut *second)] {
                draws[2 * lane] = (pair ^ SIGN) as u16;
                draws[2 * lane + 1] = ((pair >> 16) ^ SIGN) as u16;
            }
        }
    }
    draws
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(prob: f64) -> MaskSource {
        MaskSource { key: [1, 2], place: [3, 4], prob }
    }

    #[test]
    fn a_mask_keeps_the_share_and_the_mean() {
        let mask = source(0.1).mask(200_000);
        let zeros = mask.iter().filter(|&&x| x == 0.0).count() as f64 / mask.len() as f64;
        assert!((zeros - 0.1).abs() < 0.003, "{zeros}");
        let mean = mask.iter().map(|&x| f64::from(x)).sum::<f64>() / mask.len() as f64;
        assert!((mean - 1.0).abs() < 0.004, "{mean}");
    }

    #[test]
    fn a_longer_mask_begins_as_the_shorter_one() {
        assert_eq!(source(0.5).mask(20_000)[..777], source(0.5).mask(777));
    }

    /// Over the field of two elements: the bits of two elements are 32 sums of a block's 128 bits, and
    /// independent and uniform if and only if none of their sums is empty, that is, of full rank.
    #[test]
    fn any_two_elements_are_independent() {
        let sums: Vec<u128> = (0..4)
            .flat_map(|word| {
                // What each of the block's bits, alone, does to the elements' bits.
                let of_bit = |bit: usize| {
                    let mut words = [[0; LANES]; 4];
                    words[bit / 32][0] = 1 << (bit % 32);
                    pairs(&words, word, 0)
                };
                let columns: Vec<[u32; 2]> = (0..128).map(of_bit).collect();
                let sum = move |row: usize| {
                    let bit = |column: &[u32; 2]| u128::from(column[row / 32] >> (row % 32) & 1);
                    columns.iter().enumerate().map(|(at, column)| bit(column) << at).sum()
                };
                (0..64).map(sum).collect::<Vec<u128>>()
            })
            .collect();
        let elements: Vec<&[u128]> = sums.chunks_exact(16).collect();
        assert_eq!(elements.len(), 16);
        for (one, first) in elements.iter().enumerate() {
            for second in &elements[..one] {
                assert_eq!(rank([*first, *second].concat()), 32);
            }
        }
    }

    fn rank(mut rows: Vec<u128>) -> usize {
        let mut rank = 0;
        while let Some(row) = rows.pop() {
            if row != 0 {
                rank += 1;
                let lowest = row & row.wrapping_neg();
                rows.iter_mut()
                    .filter(|other| **other & lowest != 0)
                    .for_each(|other| *other ^= row);
            }
        }
        rank
    }
}
