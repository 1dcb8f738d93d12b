//! Dropout masks, generated on the host. The kernels generate the same bits in the same order.
//!
//! Each element is decided by a *draw* of sixteen random bits. A block of the random generator has
//! 128 bits, in four words, and gives draws for sixteen elements. Each of its sixteen bytes is the
//! upper byte of one draw. The lower byte of that draw is the XOR of two other bytes of the block,
//! one of each of the next two words. The lower byte decides only where the upper byte equals that
//! of the threshold, for one element in 256.
//!
//! So each draw is uniform, and any two draws are independent. Proof: over the field of two
//! elements every bit of a draw is a sum of bits of the block. The 32 sums of two draws are
//! linearly independent (tested).

mod part;

use burn::tensor::DType;
use half::{bf16, f16};

pub use self::part::{MaskPart, Places};

use crate::philox::{LANES, blocks};

/// Number of elements whose draws come from one call of [`blocks`].
///
/// The elements are ordered by word. Within a word, the first of the two [`pairs`] of every lane
/// comes first, then the second pair of every lane.
pub(super) const BATCH: usize = LANES * 16;

/// Dropout probability of a mask, and the key and counter that its random bits are generated from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaskSource {
    /// Key of the random generator (Philox4x32-7).
    pub key: [u32; 2],
    /// Upper half of the generator's 128-bit counter. The lower half counts the blocks of one mask,
    /// so masks with different `counter`s are independent.
    pub counter: [u32; 2],
    /// Probability that an element is set to zero, in `[0, 1)`.
    pub prob: f64,
}

impl MaskSource {
    /// Returns the bound on draws: an element whose draw is below it is set to zero.
    pub(super) fn threshold(&self) -> u16 {
        (self.prob * 65536.0).round() as u16
    }

    /// Returns the factor `1 / (1 - prob)` of the elements that are kept.
    pub fn keep(&self) -> f32 {
        (1.0 / (1.0 - self.prob)) as f32
    }

    /// Returns [`keep`](Self::keep) rounded to `dtype`.
    pub(super) fn keep_in(&self, dtype: DType) -> f32 {
        match dtype {
            DType::BF16 => bf16::from_f32(self.keep()).to_f32(),
            DType::F16 => f16::from_f32(self.keep()).to_f32(),
            _ => self.keep(),
        }
    }

    /// Returns the elements of a part of the mask, each 0 or [`keep`](Self::keep).
    pub fn mask_of(&self, part: &MaskPart) -> Vec<f32> {
        let mut elements = vec![0.0; part.numel()];
        let (threshold, keep) = (self.threshold(), self.keep());
        for run in part.runs() {
            for (target, number) in elements[run.local..][..run.len].iter_mut().zip(run.number..) {
                let words = blocks(self.key, (number / BATCH) as u64, self.counter);
                let draw = draws(&words)[number % BATCH];
                *target = if draw < threshold { 0.0 } else { keep };
            }
        }
        elements
    }

    /// Returns the first `len` elements of the mask, each 0 or [`keep`](Self::keep).
    pub fn mask(&self, len: usize) -> Vec<f32> {
        let (threshold, keep) = (self.threshold(), self.keep());
        let factor = |draw| if draw < threshold { 0.0 } else { keep };
        let batch = |batch| draws(&blocks(self.key, batch, self.counter)).map(factor);
        (0..).flat_map(batch).take(len).collect()
    }
}

/// Returns the draws of the four elements that belong to one word and lane. Each of the two numbers
/// holds a pair of draws, one in its lower and one in its upper sixteen bits. The upper bytes of
/// the first pair are the odd bytes of the word, those of the second pair the even bytes.
#[inline(always)]
pub(super) fn pairs(words: &[[u32; LANES]; 4], word: usize, lane: usize) -> [u32; 2] {
    let upper = words[word][lane];
    let lower = words[(word + 1) % 4][lane] ^ words[(word + 2) % 4][lane];
    let odd = (upper & !LOW_BYTES) | (lower & LOW_BYTES);
    let even = ((upper & LOW_BYTES) << 8) | ((lower & !LOW_BYTES) >> 8);
    [odd, even]
}

/// Selects the lower byte of each of the two draws of a pair.
pub(super) const LOW_BYTES: u32 = 0x00FF_00FF;
/// Topmost bit of a draw, which is flipped before a draw is compared with the threshold.
///
/// Some processors (AVX2) compare signed integers only. These compare the bits of [`pairs`] as they
/// are, which has the same result.
pub(super) const SIGN: u32 = 0x8000;

/// Returns the draws of a batch, to be compared with the threshold, in the order of [`BATCH`].
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
        MaskSource { key: [1, 2], counter: [3, 4], prob }
    }

    #[test]
    fn a_mask_has_the_expected_share_of_zeros_and_mean_one() {
        let mask = source(0.1).mask(200_000);
        let zeros = mask.iter().filter(|&&x| x == 0.0).count() as f64 / mask.len() as f64;
        assert!((zeros - 0.1).abs() < 0.003, "{zeros}");
        let mean = mask.iter().map(|&x| f64::from(x)).sum::<f64>() / mask.len() as f64;
        assert!((mean - 1.0).abs() < 0.004, "{mean}");
    }

    #[test]
    fn a_shorter_mask_is_a_prefix_of_a_longer_one() {
        assert_eq!(source(0.5).mask(20_000)[..777], source(0.5).mask(777));
    }

    /// Over the field of two elements, the bits of two draws are 32 linear forms in the 128 bits of
    /// a block. They are independent and uniform if and only if the forms have full rank.
    #[test]
    fn any_two_draws_are_independent() {
        let sums: Vec<u128> = (0..4)
            .flat_map(|word| {
                // The draws of a block in which a single bit is set.
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

    /// Returns the rank of a matrix over the field of two elements, given by its rows as bits.
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
