//! Partial sums of norms, the largest magnitude, and unscaling, a block at a time.
//!
//! A block's sum is that of sixteen f32 lanes, blocks are added up in f64 in order: within 1e-6 of
//! the exact sum, the same for any number of threads.

use multiversion::multiversion;
use rayon::prelude::*;

use super::made::TASK;
use super::number::{Number, convert_over, multiply};
use crate::kernels::Sums;
use crate::norm::Norm;

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
        let (mut wide, mut scaled) = ([0f32; BLOCK], [0f32; BLOCK]);
        let scaled = &mut scaled[..block.len()];
        multiply(E::widened(block, &mut wide), scaled, factor);
        convert_over(scaled, block);
        term(E::widened(block, &mut wide), norm)
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

/// The sum of a block's terms, and the bits of its largest magnitude.
fn term(block: &[f32], norm: Norm) -> (f64, u32) {
    match norm {
        Norm::One => (magnitudes(block), top(block)),
        Norm::Two => (squares(block), top(block)),
        Norm::Inf => (0.0, top(block)),
        Norm::P(_) => (block.iter().map(|&x| norm.term(f64::from(x))).sum(), top(block)),
    }
}

/// Magnitudes order as their bits do, infinity above all numbers and NaN above that.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn top(block: &[f32]) -> u32 {
    block.iter().fold(0, |top, x| top.max(x.to_bits() & 0x7FFF_FFFF))
}

const LANES: usize = 16;

/// The sum of lanes and of what is left.
fn total(lanes: [f32; LANES], rest: impl Iterator<Item = f64>) -> f64 {
    lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>() + rest.sum::<f64>()
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn squares(block: &[f32]) -> f64 {
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = block.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    total(lanes, rest.iter().map(|&x| f64::from(x) * f64::from(x)))
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn magnitudes(block: &[f32]) -> f64 {
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = block.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x.abs();
        }
    }
    total(lanes, rest.iter().map(|&x| f64::from(x.abs())))
}
