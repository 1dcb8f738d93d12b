//! Dropout in one pass: the random bits of a batch of elements are generated, used and dropped
//! before the next batch.

use std::mem::MaybeUninit;

use multiversion::multiversion;

use super::float::KernelFloat;
use super::new_tensor::Uninit;
use super::prefetch::prefetch_ahead;
use crate::mask::{BATCH, MaskSource, SIGN, pairs};
use crate::philox::{LANES, blocks};

/// Multiplies the elements by the mask's elements from `at` on, which is a multiple of [`BATCH`].
pub(super) fn dropout<'a, E: KernelFloat>(
    source: &[E],
    target: &'a mut Uninit<E>,
    mask: &MaskSource,
    at: usize,
) -> &'a mut [E] {
    let keep = mask.keep_in(E::dtype());
    // A draw is compared as the upper half of a signed integer, whose lower half does not matter.
    let threshold = ((u32::from(mask.threshold()) ^ SIGN) << 16).cast_signed();
    let first_batch = (at / BATCH) as u64;
    multiply(source, target, (mask.key, mask.counter), first_batch, (threshold, keep))
}

/// Applies [`dropout`] into initialised memory.
pub(super) fn dropout_over(source: &[f32], target: &mut [f32], mask: &MaskSource, at: usize) {
    // SAFETY: `MaybeUninit<f32>` has the layout of `f32`, and `dropout` leaves every element initialised.
    let target = unsafe { &mut *(std::ptr::from_mut(target) as *mut Uninit<f32>) };
    dropout(source, target, mask, at);
}

/// Applies [`dropout`] to the elements in their own memory.
pub(super) fn dropout_in_place(elements: &mut [f32], mask: &MaskSource, at: usize) {
    let mut source = [0.0; BATCH];
    for (batch, elements) in elements.chunks_mut(BATCH).enumerate() {
        let source = &mut source[..elements.len()];
        source.copy_from_slice(elements);
        dropout_over(source, elements, mask, at + batch * BATCH);
    }
}

/// Applies dropout to whole batches, then to the remaining elements. `limits` are the threshold and
/// the factor of [`KernelFloat::dropped`].
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn multiply<'a, E: KernelFloat>(
    source: &[E],
    target: &'a mut Uninit<E>,
    (key, counter): ([u32; 2], [u32; 2]),
    first_batch: u64,
    limits: (i32, f32),
) -> &'a mut [E] {
    assert_eq!(source.len(), target.len());
    let mut number = first_batch;
    let (batches, remainder) = source.as_chunks::<BATCH>();
    let (targets, target_remainder) = target.as_chunks_mut::<BATCH>();
    for (source, target) in batches.iter().zip(targets) {
        batch(source, target, &blocks(key, number, counter), limits);
        number += 1;
    }
    if !remainder.is_empty() {
        let (mut last, mut dropped) = ([E::zeroed(); BATCH], [MaybeUninit::uninit(); BATCH]);
        last[..remainder.len()].copy_from_slice(remainder);
        batch(&last, &mut dropped, &blocks(key, number, counter), limits);
        target_remainder.copy_from_slice(&dropped[..remainder.len()]);
    }
    // SAFETY: every element was written, by `batch` or by the copy from `dropped`, which `batch`
    // wrote.
    unsafe { target.assume_init_mut() }
}

/// Applies dropout to one batch, in the order of [`BATCH`]. The constant length lets the compiler
/// vectorise the loop without a remainder.
#[inline(always)]
fn batch<E: KernelFloat>(
    source: &[E; BATCH],
    target: &mut [MaybeUninit<E>; BATCH],
    words: &[[u32; LANES]; 4],
    limits: (i32, f32),
) {
    let groups = source.as_chunks::<2>().0.as_chunks::<LANES>().0;
    let targets = target.as_chunks_mut::<2>().0.as_chunks_mut::<LANES>().0;
    for word in 0..4 {
        let draws: [[u32; 2]; LANES] = std::array::from_fn(|lane| pairs(words, word, lane));
        for half in 0..2 {
            let (at, draws) = (word * 2 + half, draws.map(|draws| draws[half]));
            // Generating a batch takes more instructions than a processor executes ahead, so it
            // would not request the next batch's cache lines in time. The target's lines are
            // prefetched too: a processor reads a line before it writes part of it.
            prefetch_ahead::<2048, _>(&groups[at]);
            prefetch_ahead::<2048, _>(&targets[at]);
            E::dropped(&groups[at], &draws, limits, &mut targets[at]);
        }
    }
}
