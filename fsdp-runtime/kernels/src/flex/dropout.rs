//! Dropout in one pass: the random bits of a batch of elements are generated, used and dropped
//! before the next batch.

use std::mem::MaybeUninit;

use multiversion::multiversion;
use rayon::prelude::*;

use super::float::KernelFloat;
use super::new_tensor::{TASK, Uninit};
use super::prefetch::prefetch_ahead;
use crate::mask::{BATCH, MaskPart, MaskSource, SIGN, pairs};
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

/// Applies [`dropout`] to the elements in their own memory, from any number in the mask on.
pub(super) fn drop_run<E: KernelFloat>(elements: &mut [E], mask: &MaskSource, number: usize) {
    let (mut rest, mut number) = (elements, number);
    while !rest.is_empty() {
        let first = number % BATCH;
        let len = rest.len().min(BATCH - first);
        let (elements, after) = rest.split_at_mut(len);
        let (mut source, mut target) = ([E::zeroed(); BATCH], [MaybeUninit::uninit(); BATCH]);
        source[first..first + len].copy_from_slice(elements);
        let target = &mut target[..first + len];
        let dropped = dropout(&source[..first + len], target, mask, number - first);
        elements.copy_from_slice(&dropped[first..]);
        (rest, number) = (after, number + len);
    }
}

/// Applies a part of a mask to the elements in their own memory, on all threads of the current pool.
pub(super) fn drop_part<E: KernelFloat>(elements: &mut [E], mask: &MaskSource, part: &MaskPart) {
    assert_eq!(elements.len(), part.numel(), "the part has the elements of the tensor");
    let mut rest = elements;
    let runs: Vec<_> = part
        .runs()
        .map(|run| {
            let (elements, after) = std::mem::take(&mut rest).split_at_mut(run.len);
            rest = after;
            (elements, run.number)
        })
        .collect();
    let of_run = runs.first().map_or(1, |(elements, _)| elements.len().max(1));
    runs.into_par_iter()
        .with_min_len(TASK.div_ceil(of_run))
        .for_each(|(elements, number)| drop_run(elements, mask, number));
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
