//! The kernel of the mean gradients of the attention weights, which both backward kernels need.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::fragments::{CHUNK, Chunk};
use super::scores::HIDDEN;
use super::shape::Strides;
use super::tiles::head_rows;

/// Writes the sums of the products of each row of the output and its gradient, for `rows` rows of all heads.
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
    #[define(F)] _dtype: ElemType,
) {
    let row = ABSOLUTE_POS;
    if row < rows {
        let head = row / queries;
        let of_output = head_rows(head / heads, head % heads, &output_strides, queries);
        let of_grad = head_rows(head / heads, head % heads, &grad_strides, queries);
        let first = of_output.first + row % queries * of_output.stride;
        let first_grad = of_grad.first + row % queries * of_grad.stride;
        let mut sums = Chunk::<f32>::new(0.0f32);
        for at in 0..chunks {
            let element = Chunk::<f32>::cast_from(output[first + at]);
            sums += element * Chunk::<f32>::cast_from(grad[first_grad + at]);
        }
        let mut sum = 0.0f32;
        #[unroll]
        for at in 0..comptime!(CHUNK) {
            sum += sums.extract(at);
        }
        means[row] = sum;
    }
}

/// Returns the statistic of a query as the backward kernels need it: that of a query without keys, which is huge,
/// becomes 0.
#[cube]
pub(super) fn finite_log(log: f32) -> f32 {
    select(log < HIDDEN, 0.0f32.runtime(), log)
}
