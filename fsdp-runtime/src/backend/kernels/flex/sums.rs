//! Partial sums of norms, the largest magnitude, and unscaling, a block at a time.
//!
//! A block's sum is that of 32 f32 lanes, blocks are added up in f64 in order: within 1e-6 of the exact
//! sum, the same for any number of threads.

use multiversion::multiversion;
use rayon::prelude::*;

use super::made::TASK;
use super::number::{LINES, Number, prefetch};
use crate::backend::Norm;
use crate::backend::kernels::Sums;

/// Elements that are widened and summed at a time: they stay in the first cache.
const BLOCK: usize = 1024;

/// What the elements add to a norm.
pub(super) fn sums<E: Number>(elements: &[E], norm: Norm) -> Sums {
    let task = |task: &[E]| -> Vec<(f64, u32)> {
        let mut wide = [0f32; BLOCK];
        task.chunks(BLOCK).map(|block| term(E::widened(block, &mut wide), norm)).collect()
    };
    let blocks: Vec<_> = elements.par_chunks(TASK).map(task).collect();
    join(blocks)
}

/// Multiplies the elements by `factor`, and what they add to a norm then.
pub(super) fn unscale<E: Number>(elements: &mut [E], factor: f32, norm: Norm) -> Sums {
    let block = |block: &mut [E]| {
        let mut wide = [0f32; BLOCK];
        let wide = &mut wide[..block.len()];
        scale(block, wide, factor);
        term(wide, norm)
    };
    let task = |task: &mut [E]| task.chunks_mut(BLOCK).map(block).collect();
    let blocks: Vec<_> = elements.par_chunks_mut(TASK).map(task).collect();
    join(blocks)
}

/// In order, whatever thread did which.
fn join(tasks: Vec<Vec<(f64, u32)>>) -> Sums {
    let blocks = || tasks.iter().flatten();
    let largest = blocks().map(|block| block.1).max().unwrap_or(0);
    Sums { sum: blocks().map(|block| block.0).sum(), largest: f32::from_bits(largest) }
}

/// Multiplies the elements, and widens what they are then.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn scale<E: Number>(block: &mut [E], wide: &mut [f32], factor: f32) {
    for (element, wide) in block.iter_mut().zip(wide) {
        *element = E::narrow(element.wide() * factor);
        *wide = element.wide();
    }
}

/// The sum of a block's terms, and the bits of its largest magnitude.
fn term(block: &[f32], norm: Norm) -> (f64, u32) {
    match norm {
        Norm::One => magnitudes(block),
        Norm::Two => squares(block),
        Norm::Inf => nothing(block),
        Norm::P(_) => (block.iter().map(|&x| norm.term(f64::from(x))).sum(), nothing(block).1),
    }
}

const LANES: usize = LINES;

/// The sum of the elements' terms, and the largest of their bits without the sign: magnitudes order
/// as these do, infinity above all numbers and NaN above that.
#[inline(always)]
fn summed(block: &[f32], term: impl Fn(f32) -> f32) -> (f64, u32) {
    let (mut sums, mut tops) = ([0f32; LANES], [0u32; LANES]);
    let (chunks, rest) = block.as_chunks::<LANES>();
    let mut add = |lane: usize, x: f32| {
        sums[lane] += term(x);
        tops[lane] = tops[lane].max(x.to_bits() & 0x7FFF_FFFF);
    };
    for chunk in chunks {
        prefetch(chunk);
        for (lane, &x) in chunk.iter().enumerate() {
            add(lane, x);
        }
    }
    for (lane, &x) in rest.iter().enumerate() {
        add(lane, x);
    }
    (sums.into_iter().map(f64::from).sum(), tops.into_iter().fold(0, u32::max))
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn squares(block: &[f32]) -> (f64, u32) {
    summed(block, |x| x * x)
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn magnitudes(block: &[f32]) -> (f64, u32) {
    summed(block, f32::abs)
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn nothing(block: &[f32]) -> (f64, u32) {
    summed(block, |_| 0.0)
}
