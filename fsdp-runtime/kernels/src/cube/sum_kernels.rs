//! Kernels that sum the elements of several tensors for a norm and find their largest magnitudes.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::rounding::{narrowed, rounded};
use crate::norm::Norm;

/// Number of consecutive vectors that a thread of a CPU sums.
pub(super) const CPU_BLOCK: usize = 512;

/// Term that an element contributes to the sum of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Term {
    /// 0: the infinity norm needs only the largest magnitude.
    Zero,
    /// The magnitude `|x|`, for the norm 1.
    Magnitude,
    /// The square `x²`, for the norm 2.
    Square,
    /// The power `|x|ᵖ`, for the norm p.
    Power,
}

impl Term {
    /// Returns the term of a norm.
    pub(super) fn of(norm: Norm) -> Self {
        match norm {
            Norm::One => Self::Magnitude,
            Norm::Two => Self::Square,
            Norm::Inf => Self::Zero,
            Norm::P(_) => Self::Power,
        }
    }
}

/// Sums the terms of several tensors, and finds the largest bits of their magnitudes. If `join`,
/// continues from the values in `sums` and `largest`; if `scale`, multiplies the elements by
/// `factor` first.
///
/// A tensor has `threads` threads. They process tiles of `lanes · rows` vectors: in a tile `lanes`
/// neighbouring threads go row by row, each taking one vector of a row. Each thread writes one
/// vector of sums.
#[cube(launch_unchecked)]
pub(super) fn sums_kernel<F: Float, N: Size>(
    data: &mut Sequence<Box<[Vector<F, N>]>>,
    sums: &mut [Vector<f32, N>],
    largest: &mut [Vector<u32, N>],
    firsts: &Sequence<usize>,
    counts: &Sequence<usize>,
    sums_firsts: &Sequence<usize>,
    threads: &Sequence<usize>,
    rows: &Sequence<usize>,
    factor: f32,
    exponent: f32,
    zero: u32,
    #[comptime] term: Term,
    #[comptime] scale: bool,
    #[comptime] join: bool,
    #[comptime] lanes: usize,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut thread = ABSOLUTE_POS;
    #[unroll]
    for part in 0..counts.len() {
        if thread < threads[part] {
            let sums_index = sums_firsts[part] + thread;
            let mut sum = Vector::<f32, N>::new(0.0f32);
            let mut top = Vector::<u32, N>::new(0u32);
            if comptime!(join) {
                sum = sums[sums_index];
                top = largest[sums_index];
            }
            let first = firsts[part];
            let tile = rows[part] * comptime!(lanes);
            let mut index = thread / comptime!(lanes) * tile;
            let end = min(index + tile, counts[part]);
            index += thread % comptime!(lanes);
            if comptime!(lanes == 1) {
                // Four quarters of the block at once: their page misses overlap, and their
                // additions do not depend on each other.
                let quarter = comptime!(CPU_BLOCK / 4);
                if index + comptime!(CPU_BLOCK) == end {
                    let mut at = first + index;
                    let last = at + quarter;
                    while at < last {
                        let a = magnitude(data, part, at, factor, scale, integers);
                        let b = magnitude(data, part, at + quarter, factor, scale, integers);
                        let c = magnitude(data, part, at + 2 * quarter, factor, scale, integers);
                        let d = magnitude(data, part, at + 3 * quarter, factor, scale, integers);
                        top = max(top, max(max(a, b), max(c, d)));
                        sum += (addend(a, exponent, zero, term) + addend(b, exponent, zero, term))
                            + (addend(c, exponent, zero, term) + addend(d, exponent, zero, term));
                        at += 1;
                    }
                    index = end;
                }
            }
            while index < end {
                let bits = magnitude(data, part, first + index, factor, scale, integers);
                top = max(top, bits);
                sum += addend(bits, exponent, zero, term);
                index += comptime!(lanes);
            }
            sums[sums_index] = sum;
            largest[sums_index] = top;
        }
        // A thread of this part is done: its index wraps below 0 and exceeds the counts of later
        // parts.
        thread -= threads[part];
    }
}

/// Returns the bits of the magnitudes of vector `at` in f32; if `scale`, multiplies the vector in
/// place first.
#[cube]
fn magnitude<F: Float, N: Size>(
    data: &mut Sequence<Box<[Vector<F, N>]>>,
    #[comptime] part: usize,
    at: usize,
    factor: f32,
    #[comptime] scale: bool,
    #[comptime] integers: bool,
) -> Vector<u32, N> {
    let mut x = Vector::<f32, N>::cast_from(data[part][at]);
    if comptime!(scale) {
        let scaled = narrowed::<F, N>(x * Vector::new(factor), integers);
        data.index_mut(part)[at] = scaled;
        x = Vector::cast_from(scaled);
    }
    Vector::<u32, N>::reinterpret(x) & Vector::new(0x7FFF_FFFFu32)
}

/// Returns the terms of elements with these magnitude bits.
#[cube]
fn addend<N: Size>(
    bits: Vector<u32, N>,
    exponent: f32,
    zero: u32,
    #[comptime] term: Term,
) -> Vector<f32, N> {
    let x = Vector::<f32, N>::reinterpret(bits);
    let mut addend = Vector::<f32, N>::new(0.0f32);
    if comptime!(term == Term::Magnitude) {
        addend = x;
    }
    if comptime!(term == Term::Square) {
        addend = rounded(x * x, zero);
    }
    if comptime!(term == Term::Power) {
        addend = Vector::powf(x, Vector::new(exponent));
    }
    addend
}

/// Reduces the partial sums of each tensor to fewer: output `i` of `n` adds the sums `i`, `i + n`,
/// `i + 2n` ...
///
/// `bounds` has four numbers for each tensor, in vectors: the index of its first input, the number
/// of its inputs, the index of its first output and the number of its outputs. Each tensor has
/// `threads` threads.
#[cube(launch_unchecked)]
pub(super) fn fold_kernel<N: Size>(
    sums: &[Vector<f32, N>],
    largest: &[Vector<u32, N>],
    folded_sums: &mut [Vector<f32, N>],
    folded_largest: &mut [Vector<u32, N>],
    bounds: &[u32],
    parts: usize,
    threads: usize,
) {
    let part = ABSOLUTE_POS / threads;
    if part < parts {
        let thread = ABSOLUTE_POS % threads;
        let from = bounds[part * 4] as usize;
        let count = bounds[part * 4 + 1] as usize;
        let to = bounds[part * 4 + 2] as usize;
        let outputs = bounds[part * 4 + 3] as usize;
        if thread < outputs {
            let mut sum = Vector::<f32, N>::new(0.0f32);
            let mut top = Vector::<u32, N>::new(0u32);
            let mut index = thread;
            while index < count {
                sum += sums[from + index];
                top = max(top, largest[from + index]);
                index += outputs;
            }
            folded_sums[to + thread] = sum;
            folded_largest[to + thread] = top;
        }
    }
}
