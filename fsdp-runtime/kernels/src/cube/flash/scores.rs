//! Tiles of scores in registers: products, hidden keys, and products with scores.

use cubecl::prelude::*;

use super::fragments::{CHUNK, Chunk, Pair, TILE, sum_column, sum_row};
use super::plan::Plan;
use super::product::TileProduct;
use super::shape::{AttentionShape, Table, end_key, first_key};
use crate::cube::iota::iota;

/// Score of a hidden key, before the scale. Its exponential is 0, whatever the scale and the largest score.
pub(super) const HIDDEN: f32 = -1e30;

/// Tiles of sums, those of a strip beside each other, then those of the next strip.
pub(super) type Sums = Sequence<Array<Pair<f32>>>;
/// Tiles of a left factor, in the same order.
pub(super) type Left<F> = Sequence<Array<Pair<F>>>;

/// Returns sums of 0, in so many tiles for each strip.
#[cube]
pub(super) fn zero_sums(#[comptime] tiles: usize, #[comptime] plan: Plan) -> Sums {
    let mut sums = Sequence::<Array<Pair<f32>>>::new();
    #[unroll]
    for _ in 0..comptime!(plan.strips * tiles) {
        let mut tile = Array::<Pair<f32>>::new(comptime!(plan.fragments.sum_pairs()));
        #[unroll(plan.unrolls())]
        for at in 0..comptime!(plan.fragments.sum_pairs()) {
            tile[at] = Pair::<f32>::new(0.0f32);
        }
        sums.push(tile);
    }
    sums
}

/// Returns the products of the rows of a left factor with the rows of a tile in shared memory.
#[cube]
pub(super) fn products<P: TileProduct, F: Float>(
    left: &Left<F>,
    tile: &Shared<[Chunk<F>]>,
    #[comptime] plan: Plan,
) -> Sums {
    let (steps, tiles) = comptime!((plan.steps(), plan.score_tiles()));
    let mut sums = zero_sums(tiles, plan);
    #[unroll]
    for step in 0..steps {
        #[unroll]
        for block in 0..comptime!(tiles / 2) {
            let first = comptime!(block * TILE * plan.stride() + step * 2);
            let right = P::right_of_columns::<F>(tile, first, comptime!(plan.stride()));
            #[unroll]
            for strip in 0..comptime!(plan.strips) {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(strip * tiles + block * 2 + half);
                    let left = &left[comptime!(strip * steps + step)];
                    P::multiply::<F>(left, &right, &mut sums[at], half);
                }
            }
        }
    }
    sums
}

/// Returns the products of the rows of a plane, from row `first` of a tile in shared memory on, with the rows of
/// another tile.
#[cube]
pub(super) fn products_of_tiles<P: TileProduct, F: Float>(
    rows: &Shared<[Chunk<F>]>,
    first: usize,
    tile: &Shared<[Chunk<F>]>,
    #[comptime] plan: Plan,
) -> Sums {
    let (steps, tiles) = comptime!((plan.steps(), plan.score_tiles()));
    let mut sums = zero_sums(tiles, plan);
    #[unroll]
    for step in 0..steps {
        let mut left = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for strip in 0..comptime!(plan.strips) {
            let at = first * comptime!(plan.stride())
                + comptime!(strip * TILE * plan.stride() + step * 2);
            left.push(P::left_of_rows::<F>(rows, at, comptime!(plan.stride())));
        }
        #[unroll]
        for block in 0..comptime!(tiles / 2) {
            let first = comptime!(block * TILE * plan.stride() + step * 2);
            let right = P::right_of_columns::<F>(tile, first, comptime!(plan.stride()));
            #[unroll]
            for strip in 0..comptime!(plan.strips) {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(strip * tiles + block * 2 + half);
                    P::multiply::<F>(&left[strip], &right, &mut sums[at], half);
                }
            }
        }
    }
    sums
}

/// Adds to sums the products of scores, rounded to the dtype of the tensors, with the columns of a tile in shared
/// memory.
#[cube]
pub(super) fn add_products<P: TileProduct, F: Float>(
    sums: &mut Sums,
    scores: &Sums,
    tile: &Shared<[Chunk<F>]>,
    #[comptime] plan: Plan,
) {
    let (tiles, score_tiles) = comptime!((plan.width_tiles(), plan.score_tiles()));
    #[unroll]
    for step in 0..comptime!(score_tiles / 2) {
        let mut left = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for strip in 0..comptime!(plan.strips) {
            let at = comptime!(strip * score_tiles + step * 2);
            let next = comptime!(at + 1);
            left.push(P::left_of_sums::<F>(&scores[at], &scores[next], comptime!(plan.integers)));
        }
        #[unroll]
        for block in 0..comptime!(tiles / 2) {
            let first = comptime!(step * TILE * plan.stride() + block * 2);
            let right = P::right_of_rows::<F>(tile, first, comptime!(plan.stride()));
            #[unroll]
            for strip in 0..comptime!(plan.strips) {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(strip * tiles + block * 2 + half);
                    P::multiply::<F>(&left[strip], &right, &mut sums[at], half);
                }
            }
        }
    }
}

/// Writes the bias of the keys from `first` on to shared memory, if there is one. Every thread of the cube must call
/// it.
#[cube]
pub(super) fn write_bias<F: Float>(
    bias: &Sequence<Box<[F]>>,
    tile: &mut Shared<[f32]>,
    batch: usize,
    first: usize,
    shape: &AttentionShape,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for at in 0..bias.len() {
        let mut own = UNIT_POS as usize;
        while own < comptime!(plan.columns) {
            let index = batch * shape.keys + min(first + own, shape.keys - 1);
            tile[own] = f32::cast_from(bias[at][index]);
            own += comptime!(plan.threads());
        }
    }
}

/// The keys that the queries of a thread's rows of scores see: the first, and the one after the last.
#[derive(CubeType)]
pub(super) struct RowBounds {
    first: Array<u32>,
    end: Array<u32>,
}

/// Returns the bounds of the rows of a plane, whose first query is `first`. Rows after the last query are that one.
#[cube]
pub(super) fn row_bounds(
    batch: usize,
    first: usize,
    lane: usize,
    table: &Table,
    shape: &AttentionShape,
    #[comptime] plan: Plan,
) -> RowBounds {
    let rows = comptime!(plan.fragments.rows());
    let mut bounds = RowBounds {
        first: Array::<u32>::new(comptime!(plan.strips * rows)),
        end: Array::<u32>::new(comptime!(plan.strips * rows)),
    };
    #[unroll]
    for strip in 0..comptime!(plan.strips) {
        #[unroll(plan.unrolls())]
        for row in 0..rows {
            let query = first + strip * 16 + sum_row(lane, row, comptime!(plan.fragments));
            let query = min(query, shape.queries - 1);
            bounds.first[strip * rows + row] = first_key(batch, query, table, shape, plan) as u32;
            bounds.end[strip * rows + row] = end_key(batch, query, table, shape, plan) as u32;
        }
    }
    bounds
}

/// Replaces the scores of hidden keys by `hidden`. `first` is the key of the first column. `bias` has a number
/// for each column, below 0 if the key is padding; or it is not read.
#[cube]
pub(super) fn hide(
    scores: &mut Sums,
    bounds: &RowBounds,
    bias: &Shared<[f32]>,
    first: usize,
    lane: usize,
    hidden: f32,
    #[comptime] has_bias: bool,
    #[comptime] plan: Plan,
) {
    let fragments = comptime!(plan.fragments);
    let (rows, row_pairs) = comptime!((fragments.rows(), fragments.row_pairs()));
    let hidden = Pair::<f32>::new(hidden);
    #[unroll]
    for tile in 0..comptime!(plan.score_tiles()) {
        #[unroll(plan.unrolls())]
        for pair in 0..row_pairs {
            let column = comptime!(tile * CHUNK) + sum_column(lane, pair, fragments);
            let keys = iota::<Const<2>>() + Pair::<u32>::new((first + column) as u32);
            let mut padding = Pair::<f32>::new(0.0f32);
            if comptime!(has_bias) {
                padding.insert(0usize, bias[column]);
                padding.insert(1usize, bias[column + 1]);
            }
            let is_padding = padding.less_than(&Pair::<f32>::new(0.0f32));
            #[unroll]
            for strip in 0..comptime!(plan.strips) {
                let of_tile = &mut scores[comptime!(strip * plan.score_tiles() + tile)];
                #[unroll(plan.unrolls())]
                for row in 0..rows {
                    let at = row * row_pairs + pair;
                    let end = Pair::<u32>::new(bounds.end[strip * rows + row]);
                    let mut score = select_many(keys.less_than(&end), of_tile[at], hidden);
                    if comptime!(plan.bounded[0]) {
                        let first = Pair::<u32>::new(bounds.first[strip * rows + row]);
                        score = select_many(keys.less_than(&first), hidden, score);
                    }
                    if comptime!(has_bias) {
                        score = select_many(is_padding, hidden, score);
                    }
                    of_tile[at] = score;
                }
            }
        }
    }
}
