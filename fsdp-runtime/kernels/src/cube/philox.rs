//! Random blocks of Philox4x32-7 in integer operations: the bits are those of Flex.

use cubecl::prelude::*;

use super::iota::iota;
use crate::mask::LOW_BYTES;
use crate::philox::{MULTIPLIERS, ROUNDS, WEYL};

/// Returns the two pairs of draws of dropout that belong to one word of random blocks, as `mask::pairs` does on the
/// host.
#[cube]
pub(super) fn draw_pairs<N: Size>(
    words: &Sequence<Vector<u32, N>>,
    #[comptime] word: usize,
) -> Sequence<Vector<u32, N>> {
    let upper = words[word];
    let lower = words[comptime!((word + 1) % 4)] ^ words[comptime!((word + 2) % 4)];
    let low = Vector::new(LOW_BYTES);
    let high = Vector::new(comptime!(!LOW_BYTES));
    let eight = Vector::new(8u32);
    let mut pairs = Sequence::<Vector<u32, N>>::new();
    pairs.push((upper & high) | (lower & low));
    pairs.push(((upper & low) << eight) | ((lower & high) >> eight));
    pairs
}

/// Returns `N` neighbouring random blocks, of which the first is block `first`, as the four words of
/// each block in a vector per word.
///
/// Block numbers have 64 bits, of which the high word is 0.
#[cube]
pub(super) fn random_blocks<N: Size>(
    first: u32,
    key_0: u32,
    key_1: u32,
    place_0: u32,
    place_1: u32,
) -> Sequence<Vector<u32, N>> {
    let mut a = iota::<N>() + Vector::new(first);
    let mut b = Vector::<u32, N>::new(0u32);
    let mut c = Vector::<u32, N>::new(place_0);
    let mut d = Vector::<u32, N>::new(place_1);
    let mut key_a = key_0;
    let mut key_b = key_1;
    #[unroll]
    for _ in 0..ROUNDS {
        let high_p = a.mul_hi(Vector::new(MULTIPLIERS[0]));
        let low_p = a * Vector::new(MULTIPLIERS[0]);
        let high_q = c.mul_hi(Vector::new(MULTIPLIERS[1]));
        let low_q = c * Vector::new(MULTIPLIERS[1]);
        a = high_q ^ b ^ Vector::new(key_a);
        b = low_q;
        c = high_p ^ d ^ Vector::new(key_b);
        d = low_p;
        key_a += WEYL[0];
        key_b += WEYL[1];
    }

    let mut words = Sequence::<Vector<u32, N>>::new();
    words.push(a);
    words.push(b);
    words.push(c);
    words.push(d);
    words
}
