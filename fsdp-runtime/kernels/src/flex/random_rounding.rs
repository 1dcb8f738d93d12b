//! Rounding to bf16 at random in one pass.

use half::bf16;
use multiversion::multiversion;

use super::new_tensor::Uninit;
use crate::philox::{LANES, blocks};
use crate::random_rounding::{BATCH, RandomRounding};

/// Bits of infinity in f32.
const INFINITY: u32 = 0x7F80_0000;

/// Rounds the elements of a tensor from `at` on.
pub(super) fn round<'a>(
    source: &[f32],
    target: &'a mut Uninit<bf16>,
    rounding: &RandomRounding,
    at: usize,
) -> &'a mut [bf16] {
    assert_eq!(source.len(), target.len());
    let (bits, mut done) = ((rounding.key, rounding.counter), 0);
    while done < source.len() {
        let (position, neighbours) = rounding.position(at + done);
        let count = neighbours.unwrap_or(usize::MAX).min(source.len() - done);
        let run = done..done + count;
        round_from(&source[run.clone()], &mut target[run], bits, position);
        done += count;
    }
    // SAFETY: the loop wrote every element.
    unsafe { target.assume_init_mut() }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn round_from(
    source: &[f32],
    target: &mut Uninit<bf16>,
    (key, counter): ([u32; 2], [u32; 2]),
    first: usize,
) {
    assert_eq!(source.len(), target.len());
    let mut at = 0;
    while at < source.len() {
        let (batch, skipped) = ((first + at) / BATCH, (first + at) % BATCH);
        let count = (BATCH - skipped).min(source.len() - at);
        let draws = draws(&blocks(key, batch as u64, counter));
        let (source, draws) = (&source[at..][..count], &draws[skipped..][..count]);
        for (target, (source, draw)) in
            target[at..][..count].iter_mut().zip(source.iter().zip(draws))
        {
            target.write(rounded(*source, *draw));
        }
        at += count;
    }
}

/// Returns the draws of a batch, in its order.
#[inline(always)]
fn draws(words: &[[u32; LANES]; 4]) -> [u32; BATCH] {
    let mut draws = [0; BATCH];
    let (low, high) = draws.split_at_mut(BATCH / 2);
    for (at, word) in words.as_flattened().iter().enumerate() {
        low[at] = word & 0xFFFF;
        high[at] = word >> 16;
    }
    draws
}

/// Rounds an element with a draw of sixteen bits. Infinity is kept. A NaN keeps its upper bits and
/// becomes quiet.
#[inline(always)]
fn rounded(element: f32, draw: u32) -> bf16 {
    let bits = element.to_bits();
    let nan = bits | 0x40_0000;
    let bits = if bits & 0x7FFF_FFFF > INFINITY { nan } else { bits.wrapping_add(draw) };
    bf16::from_bits((bits >> 16) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random_rounding::RoundedPart;

    const SOURCE: RandomRounding =
        RandomRounding { key: [1, 2], counter: [3, 4], first: 0, part: None };

    fn rounded_from(source: &[f32], rounding: &RandomRounding) -> Vec<bf16> {
        let mut target = Vec::with_capacity(source.len());
        let target = &mut target.spare_capacity_mut()[..source.len()];
        round(source, target, rounding, 0).to_vec()
    }

    #[test]
    fn the_mean_is_the_element() {
        let count = 1 << 20;
        // A third of the way between two values of bf16, on both sides of zero, and near 2^-126.
        for (low, high) in [(1.0, 1.007_812_5), (-2.0, -2.015_625), (1.5e-38, 1.509e-38)] {
            let [low, high] = [low, high].map(|x| bf16::from_f32(x).to_f32());
            let element = low + (high - low) / 3.0;
            let found = rounded_from(&vec![element; count], &SOURCE);
            let ups = found.iter().filter(|x| x.to_f32() == high).count();
            assert!(found.iter().all(|x| x.to_f32() == low || x.to_f32() == high), "{element}");
            let share = ups as f64 / count as f64;
            // Four standard deviations.
            assert!((share - 1.0 / 3.0).abs() < 4.0 * 0.4714 / 1024.0, "{share} of {element}");
        }
    }

    #[test]
    fn values_of_bf16_and_special_values_are_kept() {
        for bits in 0..=u16::MAX {
            let element = bf16::from_bits(bits);
            let found = rounded_from(&[element.to_f32(); 9], &SOURCE);
            let same = |found: &bf16| {
                found.to_bits() == bits || (element.is_nan() && found.to_bits() == bits | 0x40)
            };
            assert!(found.iter().all(same), "{bits:x}: {found:?}");
        }
        let nan = f32::from_bits(0x7F80_0001);
        assert!(rounded_from(&[nan; 300], &SOURCE).iter().all(|x| x.is_nan()));
        // Above the largest finite value of bf16 the upper neighbour is infinity.
        let found = rounded_from(&[f32::MAX; 300], &SOURCE);
        assert!(found.iter().any(|x| x.is_infinite()) && found.iter().all(|x| !x.is_nan()));
    }

    #[test]
    fn a_range_is_rounded_as_in_the_whole() {
        let elements: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin()).collect();
        let whole = rounded_from(&elements, &SOURCE);
        for range in [0..1, 8..1000, 120..136, 127..400, 128..256, 384..999] {
            let rounding = RandomRounding { first: range.start, ..SOURCE };
            let found = rounded_from(&elements[range.clone()], &rounding);
            assert_eq!(found, whole[range.clone()], "{range:?}");
        }
        let other = RandomRounding { counter: [5, 4], ..SOURCE };
        assert_ne!(rounded_from(&elements, &other), whole, "another step");
    }

    /// All draws of a batch are different bits of the generator.
    #[test]
    fn a_batch_uses_each_bit_once() {
        for bit in 0..32 {
            for word in 0..4 {
                let mut words = [[0; LANES]; 4];
                words[word][5] = 1 << bit;
                let draws = draws(&words);
                assert_eq!(draws.iter().map(|draw| draw.count_ones()).sum::<u32>(), 1);
                let at = draws.iter().position(|draw| *draw != 0);
                assert_eq!(at, Some(64 * (bit / 16) + 16 * word + 5));
            }
        }
    }

    #[test]
    fn a_part_of_the_columns_has_the_draws_of_the_whole_parameter() {
        let (rows, len, parts) = (5, 300, 3);
        let whole: Vec<f32> = (0..rows * parts * len).map(|at| 1.0 + at as f32 * 1e-5).collect();
        let expected = rounded_from(&whole, &SOURCE);
        for part in 0..parts {
            let of_row = |row: usize| (row * parts + part) * len..(row * parts + part + 1) * len;
            let own: Vec<f32> = (0..rows).flat_map(|row| whole[of_row(row)].to_vec()).collect();
            let expected: Vec<_> =
                (0..rows).flat_map(|row| expected[of_row(row)].to_vec()).collect();
            let part = Some(RoundedPart { len, parts, part });
            let range = 170..1130;
            let rounding = RandomRounding { first: range.start, part, ..SOURCE };
            assert_eq!(rounded_from(&own[range.clone()], &rounding), expected[range]);
        }
    }
}
