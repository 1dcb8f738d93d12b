//! The kernel of the gradients of keys and values. Queries are visited in tiles, for each head that shares the
//! keys. Scores are transposed: a row is that of a key.
//!
//! Source: Dao, [*FlashAttention-2*](https://arxiv.org/abs/2307.08691), 2023, algorithm 2.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::dropout::drop_transposed;
use super::fragments::{CHUNK, Chunk, Pair, sum_column, sum_row};
use super::means_kernel::finite_log;
use super::plan::Plan;
use super::product::TileProduct;
use super::scores::{HIDDEN, Sums, add_products, products_of_tiles, zero_sums};
use super::shape::{AttentionShape, Strides, Table, end_key, first_key, quotient, seen_keys};
use super::sums::write_sums;
use super::tiles::{HeadRows, head_rows, read_rows, write_rows};

/// What the kernel of keys and values needs of the queries of a tile, in shared memory: the statistics, and the
/// first key that each query sees and the one after the last.
#[derive(CubeType)]
struct QueryTile {
    logs: Shared<[f32]>,
    means: Shared<[f32]>,
    first: Shared<[u32]>,
    end: Shared<[u32]>,
}

/// Writes what belongs to the queries from `first` on. Queries after the last see no keys. `head` is counted over
/// all rows of the batch. Every thread of the cube must call it.
#[cube]
fn write_queries(
    tile: &mut QueryTile,
    logs: &[f32],
    means: &[f32],
    head: usize,
    batch: usize,
    first: usize,
    table: &Table,
    shape: &AttentionShape,
    #[comptime] plan: Plan,
) {
    let mut own = UNIT_POS as usize;
    while own < comptime!(plan.columns) {
        let query = min(first + own, shape.queries - 1);
        let is_query = first + own < shape.queries;
        let end = end_key(batch, query, table, shape, plan) as u32;
        tile.logs[own] = finite_log(logs[head * shape.queries + query]);
        tile.means[own] = means[head * shape.queries + query];
        tile.first[own] = first_key(batch, query, table, shape, plan) as u32;
        tile.end[own] = select(is_query, end, 0u32.runtime());
        own += comptime!(plan.threads());
    }
}

/// Replaces transposed scores of hidden keys by [`HIDDEN`]. `first` is the key of the plane's first row.
#[cube]
fn hide_transposed(
    scores: &mut Sums,
    queries: &QueryTile,
    first: usize,
    lane: usize,
    #[comptime] plan: Plan,
) {
    let fragments = comptime!(plan.fragments);
    let row_pairs = comptime!(fragments.row_pairs());
    let hidden = Pair::<f32>::new(HIDDEN);
    #[unroll]
    for tile in 0..comptime!(plan.score_tiles()) {
        #[unroll(plan.unrolls())]
        for pair in 0..row_pairs {
            let column = comptime!(tile * CHUNK) + sum_column(lane, pair, fragments);
            let mut starts = Pair::<u32>::new(0u32);
            let mut ends = Pair::<u32>::new(0u32);
            #[unroll]
            for at in 0..2usize {
                starts.insert(at, queries.first[column + at]);
                ends.insert(at, queries.end[column + at]);
            }
            #[unroll]
            for strip in 0..comptime!(plan.strips) {
                let of_tile = &mut scores[comptime!(strip * plan.score_tiles() + tile)];
                #[unroll(plan.unrolls())]
                for row in 0..comptime!(fragments.rows()) {
                    let key = first + strip * 16 + sum_row(lane, row, fragments);
                    let keys = Pair::<u32>::new(key as u32);
                    let at = row * row_pairs + pair;
                    let score = select_many(keys.less_than(&ends), of_tile[at], hidden);
                    of_tile[at] = select_many(keys.less_than(&starts), hidden, score);
                }
            }
        }
    }
}

/// Replaces transposed scores by the weights.
#[cube]
fn transposed_weights(
    scores: &mut Sums,
    queries: &QueryTile,
    lane: usize,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let fragments = comptime!(plan.fragments);
    let row_pairs = comptime!(fragments.row_pairs());
    let scales = Pair::<f32>::new(scale);
    #[unroll]
    for tile in 0..comptime!(plan.score_tiles()) {
        #[unroll(plan.unrolls())]
        for pair in 0..row_pairs {
            let column = comptime!(tile * CHUNK) + sum_column(lane, pair, fragments);
            let mut logs = Pair::<f32>::new(0.0f32);
            #[unroll]
            for at in 0..2usize {
                logs.insert(at, -queries.logs[column + at]);
            }
            #[unroll]
            for strip in 0..comptime!(plan.strips) {
                let of_tile = &mut scores[comptime!(strip * plan.score_tiles() + tile)];
                #[unroll(plan.unrolls())]
                for row in 0..comptime!(fragments.rows()) {
                    let at = row * row_pairs + pair;
                    of_tile[at] = Pair::<f32>::exp(fma(of_tile[at], scales, logs));
                }
            }
        }
    }
}

/// Replaces the transposed gradients of the weights by those of the scores, less the scale.
#[cube]
fn transposed_grads(
    slopes: &mut Sums,
    weights: &Sums,
    queries: &QueryTile,
    lane: usize,
    #[comptime] plan: Plan,
) {
    let fragments = comptime!(plan.fragments);
    let row_pairs = comptime!(fragments.row_pairs());
    #[unroll]
    for tile in 0..comptime!(plan.score_tiles()) {
        #[unroll(plan.unrolls())]
        for pair in 0..row_pairs {
            let column = comptime!(tile * CHUNK) + sum_column(lane, pair, fragments);
            let mut means = Pair::<f32>::new(0.0f32);
            #[unroll]
            for at in 0..2usize {
                means.insert(at, queries.means[column + at]);
            }
            #[unroll]
            for strip in 0..comptime!(plan.strips) {
                let of_tile = &mut slopes[comptime!(strip * plan.score_tiles() + tile)];
                let weights = &weights[comptime!(strip * plan.score_tiles() + tile)];
                #[unroll(plan.unrolls())]
                for row in 0..comptime!(fragments.rows()) {
                    let at = row * row_pairs + pair;
                    of_tile[at] = weights[at] * (of_tile[at] - means);
                }
            }
        }
    }
}

/// Replaces the rows of keys that the bias hides by 0. `first` is the key of the plane's first row.
#[cube]
fn clear_padding<F: Float>(
    sums: &mut Sums,
    bias: &Sequence<Box<[F]>>,
    batch: usize,
    first: usize,
    lane: usize,
    shape: &AttentionShape,
    #[comptime] plan: Plan,
) {
    let fragments = comptime!(plan.fragments);
    #[unroll]
    for buffer in 0..bias.len() {
        #[unroll]
        for strip in 0..comptime!(plan.strips) {
            #[unroll(plan.unrolls())]
            for row in 0..comptime!(fragments.rows()) {
                let key = first + strip * 16 + sum_row(lane, row, fragments);
                let key = batch * shape.keys + min(key, shape.keys - 1);
                let is_padding = f32::cast_from(bias[buffer][key]) < 0.0f32;
                #[unroll]
                for tile in 0..comptime!(plan.width_tiles()) {
                    let of_tile = &mut sums[comptime!(strip * plan.width_tiles() + tile)];
                    #[unroll(plan.unrolls())]
                    for pair in 0..comptime!(fragments.row_pairs()) {
                        let at = row * comptime!(fragments.row_pairs()) + pair;
                        let zero = Pair::<f32>::new(0.0f32);
                        of_tile[at] = select(is_padding, zero, of_tile[at]);
                    }
                }
            }
        }
    }
}

/// Returns the number of tiles of the queries of a head.
#[cube]
fn tiles_of_head(shape: &AttentionShape, #[comptime] plan: Plan) -> usize {
    (shape.queries + comptime!(plan.columns - 1)) / comptime!(plan.columns)
}

/// Returns the first query of a tile, which is counted over all heads of the group.
#[cube]
fn first_query(tile: usize, of_head: usize, #[comptime] plan: Plan) -> usize {
    (tile - quotient(tile, of_head) * of_head) * comptime!(plan.columns)
}

/// Returns the number of the first tile of queries from `from` on, of those of all heads of the group, of which
/// some query sees some of `keys` keys from `first` on. Returns the number of all tiles if there is none.
#[cube]
fn next_tile(
    from: usize,
    batch: usize,
    first: usize,
    keys: usize,
    table: &Table,
    shape: &AttentionShape,
    #[comptime] plan: Plan,
) -> usize {
    let of_head = tiles_of_head(shape, plan);
    let count = of_head * shape.group;
    let mut tile = from;
    let mut is_found = false.runtime();
    while tile < count && !is_found {
        let query = first_query(tile, of_head, plan);
        let last = min(query + comptime!(plan.columns), shape.queries) - 1;
        let seen = seen_keys(batch, query, last, table, shape, plan);
        is_found = seen.first < min(first + keys, seen.end) && seen.end > first;
        tile = select(is_found, tile, tile + 1);
    }
    tile
}

/// Returns the rows of a head of the results, which have the heads of a row beside each other if `interleaved`, and
/// else the rows of a head. Strides as arguments would take registers that the sums need.
#[cube]
fn target_rows(
    batch: usize,
    head: usize,
    shape: &AttentionShape,
    #[comptime] interleaved: bool,
    #[comptime] plan: Plan,
) -> HeadRows {
    let (heads, chunks) = (shape.heads / shape.group, comptime!(plan.chunks()));
    let mut first = (batch * heads + head) * shape.keys * chunks;
    let mut stride = chunks.runtime();
    if comptime!(interleaved) {
        first = (batch * shape.keys * heads + head) * chunks;
        stride = heads * chunks;
    }
    HeadRows { first, stride, count: shape.keys }
}

/// Gradients of `plan.rows()` keys of a head, and of their values: cube `(tile, head of the keys, row of the
/// batch)`. `bias`, `table` and `mask` have one buffer or none.
#[cube(launch_unchecked, address_type = "u64")]
pub(super) fn flash_key_grads_kernel<P: TileProduct, F: Float>(
    query: &[Chunk<F>],
    key: &[Chunk<F>],
    value: &[Chunk<F>],
    grad: &[Chunk<F>],
    logs: &[f32],
    means: &[f32],
    bias: &Sequence<Box<[F]>>,
    table: &Sequence<Box<[u32]>>,
    mask: &Sequence<Box<[u32]>>,
    key_target: &mut [Pair<F>],
    value_target: &mut [Pair<F>],
    shape: AttentionShape,
    grad_strides: Strides,
    #[comptime] interleaved: bool,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: ElemType,
) {
    let (columns, rows, stride) = comptime!((plan.columns, plan.rows(), plan.stride()));
    let mut key_tile = Shared::<[Chunk<F>]>::new_aligned_slice(rows * stride, 16usize);
    let mut value_tile = Shared::<[Chunk<F>]>::new_aligned_slice(rows * stride, 16usize);
    let mut query_tile = Shared::<[Chunk<F>]>::new_aligned_slice(columns * stride, 16usize);
    let mut grad_tile = Shared::<[Chunk<F>]>::new_aligned_slice(columns * stride, 16usize);
    let mut queries = QueryTile {
        logs: Shared::<[f32]>::new_slice(columns),
        means: Shared::<[f32]>::new_slice(columns),
        first: Shared::<[u32]>::new_slice(columns),
        end: Shared::<[u32]>::new_slice(columns),
    };

    let (key_head, batch) = (CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    let cube_key = CUBE_POS_X as usize * rows;
    let lane = UNIT_POS as usize % comptime!(plan.fragments.lanes());
    let plane = UNIT_POS as usize / comptime!(plan.fragments.lanes());
    let plane_row = plane * comptime!(plan.plane_rows());
    let own_key = cube_key + plane_row;
    let of_key = head_rows(batch, key_head, &shape.key, shape.keys);
    let of_value = head_rows(batch, key_head, &shape.value, shape.keys);
    write_rows(&read_rows(key, &of_key, cube_key, rows, plan), &mut key_tile, rows, plan);
    write_rows(&read_rows(value, &of_value, cube_key, rows, plan), &mut value_tile, rows, plan);

    let of_head = tiles_of_head(&shape, plan);
    let count = of_head * shape.group;
    let mut key_sums = zero_sums(comptime!(plan.width_tiles()), plan);
    let mut value_sums = zero_sums(comptime!(plan.width_tiles()), plan);
    let mut tile = next_tile(0usize.runtime(), batch, cube_key, rows, table, &shape, plan);
    if tile < count {
        let head = key_head * shape.group + quotient(tile, of_head);
        let first = first_query(tile, of_head, plan);
        let of_query = head_rows(batch, head, &shape.query, shape.queries);
        let of_grad = head_rows(batch, head, &grad_strides, shape.queries);
        let head = batch * shape.heads + head;
        write_rows(
            &read_rows(query, &of_query, first, columns, plan),
            &mut query_tile,
            columns,
            plan,
        );
        write_rows(&read_rows(grad, &of_grad, first, columns, plan), &mut grad_tile, columns, plan);
        write_queries(&mut queries, logs, means, head, batch, first, table, &shape, plan);
    }
    sync_cube();
    while tile < count {
        let first = first_query(tile, of_head, plan);
        let last = min(first + columns, shape.queries) - 1;
        let next = next_tile(tile + 1, batch, cube_key, rows, table, &shape, plan);
        // After the last tile, it is read again.
        let ahead = min(next, count - 1);
        let head = key_head * shape.group + quotient(ahead, of_head);
        let next_first = first_query(ahead, of_head, plan);
        let of_query = head_rows(batch, head, &shape.query, shape.queries);
        let of_grad = head_rows(batch, head, &grad_strides, shape.queries);

        let mut scores = products_of_tiles::<P, F>(&key_tile, plane_row, &query_tile, plan);
        let seen = seen_keys(batch, first, last, table, &shape, plan);
        let is_whole = first + columns <= shape.queries
            && seen.all_first <= cube_key
            && seen.all_end >= cube_key + rows;
        if !is_whole {
            hide_transposed(&mut scores, &queries, own_key, lane, plan);
        }
        transposed_weights(&mut scores, &queries, lane, shape.scale, plan);
        let masks = mask.len();
        // Without dropout the weights are not needed any more than for their gradients.
        if comptime!(masks == 0) {
            add_products::<P, F>(&mut value_sums, &scores, &grad_tile, plan);
        }
        // The rows ahead are read late: they take registers that the scores need.
        let next_grads = read_rows(grad, &of_grad, next_first, columns, plan);
        let mut slopes = products_of_tiles::<P, F>(&value_tile, plane_row, &grad_tile, plan);
        let of_all = batch * shape.heads + key_head * shape.group + quotient(tile, of_head);
        let (keep, one) = (shape.keep, 1.0f32.runtime());
        drop_transposed(&mut slopes, mask, of_all, own_key, first, lane, keep, &shape, plan);
        transposed_grads(&mut slopes, &scores, &queries, lane, plan);
        if comptime!(masks > 0) {
            drop_transposed(&mut scores, mask, of_all, own_key, first, lane, one, &shape, plan);
            add_products::<P, F>(&mut value_sums, &scores, &grad_tile, plan);
        }
        let next_queries = read_rows(query, &of_query, next_first, columns, plan);
        add_products::<P, F>(&mut key_sums, &slopes, &query_tile, plan);
        // All threads have read the queries.
        sync_cube();
        write_rows(&next_queries, &mut query_tile, columns, plan);
        write_rows(&next_grads, &mut grad_tile, columns, plan);
        let head = batch * shape.heads + head;
        write_queries(&mut queries, logs, means, head, batch, next_first, table, &shape, plan);
        tile = next;
        sync_cube();
    }
    clear_padding(&mut key_sums, bias, batch, own_key, lane, &shape, plan);
    clear_padding(&mut value_sums, bias, batch, own_key, lane, &shape, plan);
    let of_target = target_rows(batch, key_head, &shape, interleaved, plan);
    write_sums(&key_sums, key_target, &of_target, own_key, lane, shape.scale, plan);
    write_sums(&value_sums, value_target, &of_target, own_key, lane, shape.keep, plan);
}
