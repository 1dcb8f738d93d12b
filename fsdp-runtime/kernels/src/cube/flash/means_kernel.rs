//! The kernel of the mean gradients of the attention weights, which both backward kernels need.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::fragments::{CHUNK, Chunk};
use super::scores::HIDDEN;
use super::shape::{Strides, quotient};
use super::tiles::head_rows;

/// Writes the sums of the products of each row of the output and its gradient, for `rows` rows of all heads. Each row
/// is read by `lanes` neighbouring threads of a plane: a power of two that divides its number of chunks.
#[cube(launch_unchecked)]
pub(super) fn flash_means_kernel<F: Float>(
    output: &[Chunk<F>],
    grad: &[Chunk<F>],
    means: &mut [f32],
    output_strides: Strides,
    grad_strides: Strides,
    rows: usize,
    heads: usize,
    queries: usize,
    #[comptime] chunks: usize,
    #[comptime] lanes: usize,
    #[define(F)] _dtype: ElemType,
) {
    let lane = ABSOLUTE_POS % lanes;
    // Threads after those of the last row take part in its sum.
    let row = min(ABSOLUTE_POS / lanes, rows - 1);
    let (head, query) = (quotient(row, queries), row - quotient(row, queries) * queries);
    let (batch, head) = (quotient(head, heads), head - quotient(head, heads) * heads);
    let of_output = head_rows(batch, head, &output_strides, queries);
    let of_grad = head_rows(batch, head, &grad_strides, queries);
    let first = of_output.first + query * of_output.stride + lane;
    let first_grad = of_grad.first + query * of_grad.stride + lane;
    let mut sums = Chunk::<f32>::new(0.0f32);
    for at in 0..comptime!(chunks / lanes) {
        let element = Chunk::<f32>::cast_from(output[first + at * lanes]);
        sums += element * Chunk::<f32>::cast_from(grad[first_grad + at * lanes]);
    }
    let mut sum = 0.0f32;
    #[unroll]
    for at in 0..comptime!(CHUNK) {
        sum += sums.extract(at);
    }
    #[unroll]
    for bit in 0..comptime!(lanes.trailing_zeros()) {
        sum += plane_shuffle_xor(sum, comptime!(1 << bit));
    }
    if lane == 0 && ABSOLUTE_POS / lanes < rows {
        means[row] = sum;
    }
}

/// Returns the statistic of a query as the backward kernels need it: that of a query without keys, which is huge,
/// becomes 0.
#[cube]
pub(super) fn finite_log(log: f32) -> f32 {
    select(log < HIDDEN, 0.0f32.runtime(), log)
}
