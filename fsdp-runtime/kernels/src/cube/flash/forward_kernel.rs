//! The forward kernel. Keys are visited in tiles, with a running maximum and sum of each query's softmax.
//!
//! Source: Dao, [*FlashAttention-2*](https://arxiv.org/abs/2307.08691), 2023, algorithm 1.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::dropout::drop_scores;
use super::fragments::{CHUNK, Chunk, Pair, sum_column, sum_row};
use super::plan::Plan;
use super::product::TileProduct;
use super::scores::{
    HIDDEN, Sums, add_products, hide, products, row_bounds, write_bias, zero_sums,
};
use super::shape::{AttentionShape, Strides, from_last, quotient, seen_keys};
use super::tiles::{HeadRows, head_rows, left_factor, read_rows, write_rows};
use crate::cube::rounding::narrowed;

/// Running statistics of the rows of scores of which a thread holds a part.
#[derive(CubeType)]
struct Softmax {
    /// Largest score so far, before the scale.
    tops: Array<f32>,
    /// Sum of the thread's exponentials of the scores, each less the largest.
    sums: Array<f32>,
}

#[cube]
fn new_softmax(#[comptime] plan: Plan) -> Softmax {
    let rows = comptime!(plan.strips * plan.fragments.rows());
    let mut softmax = Softmax { tops: Array::<f32>::new(rows), sums: Array::<f32>::new(rows) };
    #[unroll(plan.unrolls())]
    for row in 0..rows {
        softmax.tops[row] = HIDDEN;
        softmax.sums[row] = 0.0f32;
    }
    softmax
}

/// Replaces scores by their exponentials, each less the row's largest score so far. Multiplies the sums and the
/// rows of the output by what the larger maximum requires.
#[cube]
fn weigh<P: TileProduct>(
    scores: &mut Sums,
    softmax: &mut Softmax,
    output: &mut Sums,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let fragments = comptime!(plan.fragments);
    let (rows, row_pairs) = comptime!((fragments.rows(), fragments.row_pairs()));
    let (tiles, width_tiles) = comptime!((plan.score_tiles(), plan.width_tiles()));
    let scales = Pair::<f32>::new(scale);
    #[unroll]
    for strip in 0..comptime!(plan.strips) {
        #[unroll(plan.unrolls())]
        for row in 0..rows {
            let own = strip * rows + row;
            let before = softmax.tops[own];
            let mut tops = Pair::<f32>::new(before);
            #[unroll]
            for tile in 0..tiles {
                let of_tile = &scores[comptime!(strip * tiles + tile)];
                #[unroll(plan.unrolls())]
                for pair in 0..row_pairs {
                    tops = max(tops, of_tile[row * row_pairs + pair]);
                }
            }
            let top = P::row_max(max(tops.extract(0usize), tops.extract(1usize)));
            // While all keys are hidden, their exponentials are those of numbers near -1e30.
            let subtracted = select(top > HIDDEN, top, 0.0f32.runtime()) * scale;
            let factor = f32::exp(before * scale - subtracted);
            let mut sum = Pair::<f32>::new(0.0f32);
            let negative = Pair::<f32>::new(-subtracted);
            #[unroll]
            for tile in 0..tiles {
                let of_tile = &mut scores[comptime!(strip * tiles + tile)];
                #[unroll(plan.unrolls())]
                for pair in 0..row_pairs {
                    let at = row * row_pairs + pair;
                    let weight = Pair::<f32>::exp(fma(of_tile[at], scales, negative));
                    of_tile[at] = weight;
                    sum += weight;
                }
            }
            let sum = sum.extract(0usize) + sum.extract(1usize);
            softmax.sums[own] = fma(softmax.sums[own], factor, sum);
            softmax.tops[own] = top;
            #[unroll]
            for tile in 0..width_tiles {
                let of_tile = &mut output[comptime!(strip * width_tiles + tile)];
                #[unroll(plan.unrolls())]
                for pair in 0..row_pairs {
                    let at = row * row_pairs + pair;
                    of_tile[at] *= Pair::<f32>::new(factor);
                }
            }
        }
    }
}

/// Writes the rows of a plane, whose first query is `first` of the head, divided by the sums of their weights, and the
/// logarithms of the sums of the scores' exponentials. `head` is counted over all rows of the batch.
#[cube]
fn finish<P: TileProduct, F: Float>(
    output: &Sums,
    softmax: &Softmax,
    target: &mut [Pair<F>],
    statistics: &mut [f32],
    head: usize,
    of_head: &HeadRows,
    first: usize,
    lane: usize,
    shape: &AttentionShape,
    #[comptime] plan: Plan,
) {
    let fragments = comptime!(plan.fragments);
    let (rows, row_pairs) = comptime!((fragments.rows(), fragments.row_pairs()));
    // The threads of a plane add their parts of a sum before any of them leaves the others.
    let mut sums = Array::<f32>::new(comptime!(plan.strips * rows));
    #[unroll(plan.unrolls())]
    for row in 0..comptime!(plan.strips * rows) {
        sums[row] = P::row_sum(softmax.sums[row]);
    }
    #[unroll]
    for strip in 0..comptime!(plan.strips) {
        #[unroll(plan.unrolls())]
        for row in 0..rows {
            let sum = sums[strip * rows + row];
            // The output of a query without keys is 0. A sum that is NaN stays.
            let is_empty = sum == 0.0f32;
            let factor = select(is_empty, 0.0f32.runtime(), shape.keep / sum);
            let query = first + strip * 16 + sum_row(lane, row, fragments);
            if query < shape.queries {
                let index = head * shape.queries + query;
                let begin = (of_head.first + query * of_head.stride) * comptime!(CHUNK / 2);
                #[unroll]
                for tile in 0..comptime!(plan.width_tiles()) {
                    let of_tile = &output[comptime!(strip * plan.width_tiles() + tile)];
                    #[unroll(plan.unrolls())]
                    for pair in 0..row_pairs {
                        let column = sum_column(lane, pair, fragments) / 2;
                        let element = of_tile[row * row_pairs + pair] * Pair::<f32>::new(factor);
                        let at = begin + comptime!(tile * 4) + column;
                        target[at] = narrowed(element, comptime!(plan.integers));
                    }
                }
                if sum_column(lane, 0usize, fragments) == 0 {
                    let log = softmax.tops[strip * rows + row] * shape.scale + f32::ln(sum);
                    statistics[index] = select(is_empty, f32::MIN.runtime(), log);
                }
            }
        }
    }
}

/// Attention of `plan.rows()` queries of a head: cube `(tile, head, row of the batch)`. `bias`, `table` and
/// `mask` have one buffer or none.
#[cube(launch_unchecked, address_type = "u64")]
pub(super) fn flash_forward_kernel<P: TileProduct, F: Float>(
    query: &[Pair<F>],
    key: &[Chunk<F>],
    value: &[Chunk<F>],
    bias: &Sequence<Box<[F]>>,
    table: &Sequence<Box<[u32]>>,
    mask: &Sequence<Box<[u32]>>,
    output: &mut [Pair<F>],
    statistics: &mut [f32],
    shape: AttentionShape,
    output_strides: Strides,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let (columns, stride) = comptime!((plan.columns, plan.stride()));
    let mut key_tile = Shared::<[Chunk<F>]>::new_aligned_slice(columns * stride, 16usize);
    let mut value_tile = Shared::<[Chunk<F>]>::new_aligned_slice(columns * stride, 16usize);
    let mut bias_tile = Shared::<[f32]>::new_slice(columns);

    let (head, batch) = (CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    // Under a causal rule the last queries have the most keys, so they come first.
    let tile = from_last(CUBE_POS_X as usize, CUBE_COUNT_X as usize);
    let first_query = tile * comptime!(plan.rows());
    let last_query = min(first_query + comptime!(plan.rows()), shape.queries) - 1;
    let lane = UNIT_POS as usize % comptime!(plan.fragments.lanes());
    let plane = UNIT_POS as usize / comptime!(plan.fragments.lanes());
    let own_query = first_query + plane * comptime!(plan.plane_rows());

    let of_query = head_rows(batch, head, &shape.query, shape.queries);
    let of_key = head_rows(batch, quotient(head, shape.group), &shape.key, shape.keys);
    let of_value = head_rows(batch, quotient(head, shape.group), &shape.value, shape.keys);
    let queries = left_factor(query, &of_query, own_query, lane, plan);
    let seen = seen_keys(batch, first_query, last_query, table, &shape, plan);
    let bounds = row_bounds(batch, own_query, lane, table, &shape, plan);
    // Index of the head over all rows of the batch.
    let of_all = batch * shape.heads + head;
    let mut softmax = new_softmax(plan);
    let mut sums = zero_sums(comptime!(plan.width_tiles()), plan);

    let mut first = seen.first / columns * columns;
    let keys = read_rows(key, &of_key, first, columns, plan);
    write_rows(&keys, &mut key_tile, columns, plan);
    sync_cube();
    while first < seen.end {
        let values = read_rows(value, &of_value, first, columns, plan);
        let mut scores = products::<P, F>(&queries, &key_tile, plan);
        write_rows(&values, &mut value_tile, columns, plan);
        write_bias(bias, &mut bias_tile, batch, first, &shape, plan);
        // All threads have read the keys, and written their values.
        sync_cube();
        let next = first + columns;
        let keys = read_rows(key, &of_key, next, columns, plan);
        let biases = bias.len();
        let has_bias = comptime!(biases > 0);
        if has_bias || first < seen.all_first || next > seen.all_end {
            hide(&mut scores, &bounds, &bias_tile, first, lane, HIDDEN, has_bias, plan);
        }
        weigh::<P>(&mut scores, &mut softmax, &mut sums, shape.scale, plan);
        let one = 1.0f32.runtime();
        drop_scores(&mut scores, mask, of_all, own_query, first, lane, one, &shape, plan);
        add_products::<P, F>(&mut sums, &scores, &value_tile, plan);
        write_rows(&keys, &mut key_tile, columns, plan);
        first = next;
        // All threads have read the values, and written the next keys.
        sync_cube();
    }
    let of_head = head_rows(batch, head, &output_strides, shape.queries);
    finish::<P, F>(
        &sums, &softmax, output, statistics, of_all, &of_head, own_query, lane, &shape, plan,
    );
}
