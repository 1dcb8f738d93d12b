//! Partial sums for norms, the largest magnitude, and unscaling.
//!
//! Elements are summed by blocks. Within a block, element `i` is added to the f32 sum `i mod 32`.
//! The 32 sums, and then the blocks, are added in f64 in order. The result is within 1e-6
//! (relative) of the exact sum and does not depend on the number of threads.

use multiversion::multiversion;
use rayon::prelude::*;

use super::float::KernelFloat;
use super::new_tensor::TASK;
use super::prefetch::{PREFETCH_EVERY, prefetch};
use crate::contract::Sums;
use crate::norm::Norm;

/// Number of elements of a block. Their f32 values fit the L1 cache.
const BLOCK: usize = 1024;

/// Returns the partial sums of the elements.
pub(super) fn sums<E: KernelFloat>(elements: &[E], norm: Norm) -> Sums {
    let task = |task: &[E]| -> Vec<(f64, u32)> {
        let mut wide = [0f32; BLOCK];
        task.chunks(BLOCK).map(|block| term(E::widened(block, &mut wide), norm)).collect()
    };
    let blocks: Vec<_> = elements.par_chunks(TASK).map(task).collect();
    join(blocks)
}

/// Multiplies the elements by `factor` and returns the partial sums of the products.
pub(super) fn unscale<E: KernelFloat>(elements: &mut [E], factor: f32, norm: Norm) -> Sums {
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

/// Adds the sums of all blocks in order. A block is its sum and the bits of its largest magnitude.
fn join(tasks: Vec<Vec<(f64, u32)>>) -> Sums {
    let blocks = || tasks.iter().flatten();
    let largest = blocks().map(|block| block.1).max().unwrap_or(0);
    Sums { sum: blocks().map(|block| block.0).sum(), largest: f32::from_bits(largest) }
}

/// Multiplies the elements by `factor`, rounds them, and writes the rounded values to `wide`.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn scale<E: KernelFloat>(block: &mut [E], wide: &mut [f32], factor: f32) {
    for (element, wide) in block.iter_mut().zip(wide) {
        *element = E::narrow(element.wide() * factor);
        *wide = element.wide();
    }
}

/// Returns the sum of the block's terms, and the bits of its largest magnitude.
fn term(block: &[f32], norm: Norm) -> (f64, u32) {
    match norm {
        Norm::One => sum_magnitudes(block),
        Norm::Two => sum_squares(block),
        Norm::Inf => largest_only(block),
        Norm::P(_) => (block.iter().map(|&x| norm.term(f64::from(x))).sum(), largest_only(block).1),
    }
}

/// Number of f32 sums of a block, to which its elements are added in turn.
const LANES: usize = PREFETCH_EVERY;

/// Returns the sum of the elements' terms, and the largest of their bits without the sign.
///
/// As integers these bits have the order of the magnitudes, with infinity above all finite numbers
/// and NaN above infinity.
#[inline(always)]
fn summed(block: &[f32], term: impl Fn(f32) -> f32) -> (f64, u32) {
    let (mut sums, mut largest) = ([0f32; LANES], [0u32; LANES]);
    let (chunks, remainder) = block.as_chunks::<LANES>();
    let mut add = |lane: usize, x: f32| {
        sums[lane] += term(x);
        largest[lane] = largest[lane].max(x.to_bits() & 0x7FFF_FFFF);
    };
    for chunk in chunks {
        prefetch(chunk);
        for (lane, &x) in chunk.iter().enumerate() {
            add(lane, x);
        }
    }
    for (lane, &x) in remainder.iter().enumerate() {
        add(lane, x);
    }
    (sums.into_iter().map(f64::from).sum(), largest.into_iter().fold(0, u32::max))
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn sum_squares(block: &[f32]) -> (f64, u32) {
    summed(block, |x| x * x)
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn sum_magnitudes(block: &[f32]) -> (f64, u32) {
    summed(block, f32::abs)
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn largest_only(block: &[f32]) -> (f64, u32) {
    summed(block, |_| 0.0)
}
