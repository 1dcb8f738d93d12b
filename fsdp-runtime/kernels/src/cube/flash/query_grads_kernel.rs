//! The kernel of the gradients of queries. Keys are visited in tiles, whose scores and weights are computed again
//! from the statistics.
//!
//! Source: Dao, [*FlashAttention-2*](https://arxiv.org/abs/2307.08691), 2023, algorithm 2.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::dropout::drop_scores;
use super::fragments::{Chunk, Pair, sum_row};
use super::means_kernel::finite_log;
use super::plan::Plan;
use super::product::TileProduct;
use super::scores::{
    HIDDEN, Sums, add_products, hide, products, row_bounds, write_bias, zero_sums,
};
use super::shape::{AttentionShape, Strides, from_last, quotient, seen_keys};
use super::sums::write_sums;
use super::tiles::{head_rows, left_factor, read_rows, write_rows};

/// Statistics of the rows of scores of which a thread holds a part.
#[derive(CubeType)]
struct RowStatistics {
    logs: Array<f32>,
    means: Array<f32>,
}

/// Returns the statistics of the rows of a plane, whose first query is `first`. `head` is counted over all rows of
/// the batch.
#[cube]
fn row_statistics(
    logs: &[f32],
    means: &[f32],
    head: usize,
    first: usize,
    lane: usize,
    shape: &AttentionShape,
    #[comptime] plan: Plan,
) -> RowStatistics {
    let rows = comptime!(plan.fragments.rows());
    let count = comptime!(plan.strips * rows);
    let mut of_rows =
        RowStatistics { logs: Array::<f32>::new(count), means: Array::<f32>::new(count) };
    #[unroll]
    for strip in 0..comptime!(plan.strips) {
        #[unroll(plan.unrolls())]
        for row in 0..rows {
            let query = first + strip * 16 + sum_row(lane, row, comptime!(plan.fragments));
            let at = head * shape.queries + min(query, shape.queries - 1);
            of_rows.logs[strip * rows + row] = finite_log(logs[at]);
            of_rows.means[strip * rows + row] = means[at];
        }
    }
    of_rows
}

/// Replaces scores by their gradients, less the scale. `slopes` are the gradients of the weights.
#[cube]
fn score_grads(
    scores: &mut Sums,
    slopes: &Sums,
    statistics: &RowStatistics,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let fragments = comptime!(plan.fragments);
    let (rows, row_pairs) = comptime!((fragments.rows(), fragments.row_pairs()));
    let scales = Pair::<f32>::new(scale);
    #[unroll]
    for strip in 0..comptime!(plan.strips) {
        #[unroll]
        for tile in 0..comptime!(plan.score_tiles()) {
            let of_tile = &mut scores[comptime!(strip * plan.score_tiles() + tile)];
            let slopes = &slopes[comptime!(strip * plan.score_tiles() + tile)];
            #[unroll(plan.unrolls())]
            for row in 0..rows {
                let log = Pair::<f32>::new(-statistics.logs[strip * rows + row]);
                let mean = Pair::<f32>::new(statistics.means[strip * rows + row]);
                #[unroll(plan.unrolls())]
                for pair in 0..row_pairs {
                    let at = row * row_pairs + pair;
                    let weight = Pair::<f32>::exp(fma(of_tile[at], scales, log));
                    of_tile[at] = weight * (slopes[at] - mean);
                }
            }
        }
    }
}

/// Gradients of `plan.rows()` queries of a head: cube `(tile, head, row of the batch)`. `bias`, `table` and
/// `mask` have one buffer or none.
#[cube(launch_unchecked, address_type = "u64")]
pub(super) fn flash_query_grads_kernel<P: TileProduct, F: Float>(
    query: &[Pair<F>],
    key: &[Chunk<F>],
    value: &[Chunk<F>],
    grad: &[Pair<F>],
    logs: &[f32],
    means: &[f32],
    bias: &Sequence<Box<[F]>>,
    table: &Sequence<Box<[u32]>>,
    mask: &Sequence<Box<[u32]>>,
    target: &mut [Pair<F>],
    shape: AttentionShape,
    grad_strides: Strides,
    target_strides: Strides,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let (columns, stride) = comptime!((plan.columns, plan.stride()));
    let mut key_tile = Shared::<[Chunk<F>]>::new_aligned_slice(columns * stride, 16usize);
    let mut value_tile = Shared::<[Chunk<F>]>::new_aligned_slice(columns * stride, 16usize);
    let mut bias_tile = Shared::<[f32]>::new_slice(columns);

    let (head, batch) = (CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    let tile = from_last(CUBE_POS_X as usize, CUBE_COUNT_X as usize);
    let first_query = tile * comptime!(plan.rows());
    let last_query = min(first_query + comptime!(plan.rows()), shape.queries) - 1;
    let lane = UNIT_POS as usize % comptime!(plan.fragments.lanes());
    let plane = UNIT_POS as usize / comptime!(plan.fragments.lanes());
    let own_query = first_query + plane * comptime!(plan.plane_rows());

    let of_query = head_rows(batch, head, &shape.query, shape.queries);
    let of_grad = head_rows(batch, head, &grad_strides, shape.queries);
    let of_key = head_rows(batch, quotient(head, shape.group), &shape.key, shape.keys);
    let of_value = head_rows(batch, quotient(head, shape.group), &shape.value, shape.keys);
    let queries = left_factor(query, &of_query, own_query, lane, plan);
    let grads = left_factor(grad, &of_grad, own_query, lane, plan);
    let seen = seen_keys(batch, first_query, last_query, table, &shape, plan);
    let bounds = row_bounds(batch, own_query, lane, table, &shape, plan);
    let of_target = head_rows(batch, head, &target_strides, shape.queries);
    let head = batch * shape.heads + head;
    let statistics = row_statistics(logs, means, head, own_query, lane, &shape, plan);
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
        sync_cube();
        let next = first + columns;
        let keys = read_rows(key, &of_key, next, columns, plan);
        let biases = bias.len();
        let has_bias = comptime!(biases > 0);
        if has_bias || first < seen.all_first || next > seen.all_end {
            hide(&mut scores, &bounds, &bias_tile, first, lane, HIDDEN, has_bias, plan);
        }
        let mut slopes = products::<P, F>(&grads, &value_tile, plan);
        let keep = shape.keep;
        drop_scores(&mut slopes, mask, head, own_query, first, lane, keep, &shape, plan);
        score_grads(&mut scores, &slopes, &statistics, shape.scale, plan);
        add_products::<P, F>(&mut sums, &scores, &key_tile, plan);
        // All threads have read the keys and values.
        sync_cube();
        write_rows(&keys, &mut key_tile, columns, plan);
        first = next;
        sync_cube();
    }
    write_sums(&sums, target, &of_target, own_query, lane, shape.scale, plan);
}
