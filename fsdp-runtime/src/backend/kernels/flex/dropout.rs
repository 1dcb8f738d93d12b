//! Dropout: a batch of elements is drawn, zeroed and scaled before the next.

use std::mem::MaybeUninit;

use multiversion::multiversion;

use super::number::{Number, Room, prefetch_beyond};
use crate::backend::kernels::MaskSource;
use crate::backend::kernels::mask::{BATCH, SIGN, pairs};
use crate::backend::philox::{LANES, blocks};

/// The elements times those of the mask from element `at` on, a multiple of [`BATCH`].
pub(super) fn dropout<'a, E: Number>(
    source: &[E],
    target: &'a mut Room<E>,
    mask: &MaskSource,
    at: usize,
) -> &'a mut [E] {
    let keep = mask.keep_in(E::dtype());
    // As a draw in the upper half of a number with a sign, whatever is in the lower half.
    let threshold = ((u32::from(mask.threshold()) ^ SIGN) << 16).cast_signed();
    multiply(source, target, (mask.key, mask.place), (at / BATCH) as u64, threshold, keep)
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn multiply<'a, E: Number>(
    source: &[E],
    target: &'a mut Room<E>,
    (key, place): ([u32; 2], [u32; 2]),
    first: u64,
    threshold: i32,
    keep: f32,
) -> &'a mut [E] {
    assert_eq!(source.len(), target.len());
    let mut drawn = first;
    let (batches, rest) = source.as_chunks::<BATCH>();
    let (rooms, room) = target.as_chunks_mut::<BATCH>();
    for (source, target) in batches.iter().zip(rooms) {
        batch(source, target, &blocks(key, drawn, place), (threshold, keep));
        drawn += 1;
    }
    let (mut last, mut dropped) = ([E::zeroed(); BATCH], [MaybeUninit::uninit(); BATCH]);
    last[..rest.len()].copy_from_slice(rest);
    batch(&last, &mut dropped, &blocks(key, drawn, place), (threshold, keep));
    room.copy_from_slice(&dropped[..rest.len()]);
    // SAFETY: each element has been written, by `batch` or from what it has written.
    unsafe { target.assume_init_mut() }
}

/// The elements of one batch, in the order of [`BATCH`]: of constant length, for the compiler to make
/// vector code of without a remainder.
#[inline(always)]
fn batch<E: Number>(
    source: &[E; BATCH],
    target: &mut [MaybeUninit<E>; BATCH],
    words: &[[u32; LANES]; 4],
    limits: (i32, f32),
) {
    let groups = source.as_chunks::<2>().0.as_chunks::<LANES>().0;
    let rooms = target.as_chunks_mut::<2>().0.as_chunks_mut::<LANES>().0;
    for word in 0..4 {
        let draws: [[u32; 2]; LANES] = std::array::from_fn(|lane| pairs(words, word, lane));
        for half in 0..2 {
            let (at, draws) = (word * 2 + half, draws.map(|draws| draws[half]));
            // Between two batches are too many instructions for a processor to look beyond, and in one
            // go too many lines to wait for: those that are written too, which it reads first.
            prefetch_beyond::<2048, _>(&groups[at]);
            prefetch_beyond::<2048, _>(&rooms[at]);
            E::dropped(&groups[at], &draws, limits, &mut rooms[at]);
        }
    }
}
