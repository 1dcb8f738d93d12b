//! Dropout: a batch of elements is drawn, zeroed and scaled before the next.

use std::mem::MaybeUninit;

use multiversion::multiversion;

use super::number::{Number, Room, prefetch};
use crate::kernels::MaskSource;
use crate::kernels::mask::BATCH;
use crate::nn::philox::{LANES, blocks};

/// The elements times those of the mask from element `at` on, a multiple of [`BATCH`].
pub(super) fn dropout<'a, E: Number>(
    source: &[E],
    target: &'a mut Room<E>,
    mask: &MaskSource,
    at: usize,
) -> &'a mut [E] {
    let keep = mask.keep_in(E::dtype());
    let first = (at / BATCH * LANES) as u64;
    multiply(source, target, (mask.key, mask.place), first, mask.threshold(), keep)
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn multiply<'a, E: Number>(
    source: &[E],
    target: &'a mut Room<E>,
    (key, place): ([u32; 2], [u32; 2]),
    first: u64,
    threshold: u16,
    keep: f32,
) -> &'a mut [E] {
    assert_eq!(source.len(), target.len());
    let mut first = first;
    let (batches, rest) = source.as_chunks::<BATCH>();
    let (rooms, room) = target.as_chunks_mut::<BATCH>();
    for (source, target) in batches.iter().zip(rooms) {
        // The draws in between are too many instructions for a processor to look beyond.
        prefetch(source);
        prefetch(target);
        batch(source, target, blocks(key, first, place), threshold, keep);
        first += LANES as u64;
    }
    let (mut last, mut dropped) = ([E::zeroed(); BATCH], [MaybeUninit::uninit(); BATCH]);
    last[..rest.len()].copy_from_slice(rest);
    batch(&last, &mut dropped, blocks(key, first, place), threshold, keep);
    room.copy_from_slice(&dropped[..rest.len()]);
    // SAFETY: each element has been written, by `batch` or from what it has written.
    unsafe { target.assume_init_mut() }
}

/// The elements of one batch, in the order of [`draws`](crate::kernels::mask::draws): of constant
/// length, for the compiler to make vector code of without a remainder.
#[inline(always)]
fn batch<E: Number>(
    source: &[E; BATCH],
    target: &mut [MaybeUninit<E>; BATCH],
    words: [[u32; LANES]; 4],
    threshold: u16,
    keep: f32,
) {
    let threshold = u32::from(threshold);
    let element = |source: E, draw: u32| {
        let wide = if draw < threshold { 0.0 } else { source.wide() * keep };
        MaybeUninit::new(E::narrow_product(wide))
    };
    for (word, bits) in words.iter().enumerate() {
        let low = word * 2 * LANES;
        for lane in 0..LANES {
            target[low + lane] = element(source[low + lane], bits[lane] & 0xFFFF);
        }
        let high = low + LANES;
        for lane in 0..LANES {
            target[high + lane] = element(source[high + lane], bits[lane] >> 16);
        }
    }
}
