//! Dropout masks on the host: sixteen random bits an element, in the order that the kernels share.

use burn::tensor::DType;
use half::{bf16, f16};

use crate::nn::philox::{LANES, blocks};

/// Elements drawn from one call of [`blocks`]: word by word, low halves before high ones.
pub(crate) const BATCH: usize = LANES * 8;

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
        let batch = |first| draws(blocks(self.key, first, self.place)).map(factor);
        (0..).step_by(LANES).flat_map(batch).take(len).collect()
    }
}

/// Sixteen bits for each element of a batch: it becomes zero where they are below the threshold.
#[inline(always)]
pub(crate) fn draws(words: [[u32; LANES]; 4]) -> [u16; BATCH] {
    let mut draws = [0; BATCH];
    for (word, bits) in words.iter().enumerate() {
        for (lane, &bits) in bits.iter().enumerate() {
            let at = word * 2 * LANES + lane;
            (draws[at], draws[at + LANES]) = (bits as u16, (bits >> 16) as u16);
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
}
