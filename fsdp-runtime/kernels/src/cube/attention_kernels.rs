//! Kernels of attention. A row of scores is that of one query. Computed in f32.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::iota::iota;
use super::rounding::narrowed;
use super::rows::{Team, own_lane, own_team, power, team_max, team_sum};

/// Whether some of a launch's queries see fewer keys than all: the first of them, or the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Bounds {
    pub(super) first: bool,
    pub(super) end: bool,
}

/// Shape of the rows of a launch: those of a block of queries, for each head of each row of the batch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct ScoreRows {
    /// Number of rows.
    rows: usize,
    /// Number of rows of a head: the queries of the block.
    queries: usize,
    /// Number of rows that share a row of the bias.
    bias_rows: usize,
    /// Number of vectors of a row.
    count: usize,
    /// Number of vectors of a row of the bias, which has all keys.
    bias_count: usize,
    /// Number of vectors of a row of the dropout mask, which has all keys and a padding, or those of the row.
    mask_count: usize,
    /// Number of vectors before the row's first in a row of the mask.
    mask_skipped: usize,
    /// Number of vectors before the row's first in a row that has all keys.
    skipped: usize,
    /// Number of rows of a head in the statistics, which have all queries.
    all_queries: usize,
    /// Index of the block's first query among all queries.
    first_query: usize,
    /// Query `q` of the block sees no key before key `q + first_more - first_fewer` of the row. Segments
    /// have a table instead.
    first_more: usize,
    first_fewer: usize,
    /// Query `q` of the block sees the keys before key `q + end_more - end_fewer` of the row.
    end_more: usize,
    end_fewer: usize,
    /// Factor of the scores.
    scale: f32,
    /// Factor of the weights that dropout keeps.
    keep: f32,
}

/// The keys of a row that its query sees.
#[derive(CubeType, Clone, Copy)]
struct Seen {
    /// Index of the first key.
    first: usize,
    /// Index of the key after the last.
    end: usize,
    /// Index of the first vector of a lane, but for those before the first key.
    begin: usize,
}

/// Returns `query + more - fewer`, at least 0 and at most the number of keys.
#[cube]
fn shifted(query: usize, more: usize, fewer: usize, keys: usize) -> usize {
    min(max(query + more, fewer) - fewer, keys)
}

/// Returns the keys that a row's query sees. `table` has one buffer or none: the first key and the one after
/// the last, for each query of the block in each row of the batch.
#[cube]
fn seen_keys(
    row: usize,
    lane: usize,
    table: &Sequence<Box<[u32]>>,
    shape: &ScoreRows,
    #[comptime] team: Team,
) -> Seen {
    let keys = shape.count * comptime!(team.width);
    let query = row % shape.queries;
    let mut first = shifted(query, shape.first_more, shape.first_fewer, keys);
    let mut end = shifted(query, shape.end_more, shape.end_fewer, keys);
    #[unroll]
    for at in 0..table.len() {
        let entry = (row / shape.bias_rows * shape.queries + query) * 2;
        first = table[at][entry] as usize;
        end = table[at][entry + 1] as usize;
    }
    // Lanes take the vectors in turn, whichever comes first.
    let begin = first / comptime!(team.width * team.lanes) * comptime!(team.lanes) + lane;
    Seen { first, end, begin }
}

/// Returns the elements of keys that the row's query sees, and `hidden` for the other keys. `first` is the
/// index of the vector's first key.
#[cube]
fn of_seen<N: Size>(
    elements: Vector<f32, N>,
    hidden: f32,
    first: usize,
    seen: &Seen,
    #[comptime] bounds: Bounds,
) -> Vector<f32, N> {
    let mut elements = elements;
    let keys = iota::<N>() + Vector::new(first as u32);
    if comptime!(bounds.end) {
        let is_before_end = keys.less_than(&Vector::<u32, N>::new(seen.end as u32));
        elements = select_many(is_before_end, elements, Vector::new(hidden));
    }
    if comptime!(bounds.first) {
        let is_before_first = keys.less_than(&Vector::<u32, N>::new(seen.first as u32));
        elements = select_many(is_before_first, Vector::new(hidden), elements);
    }
    elements
}

/// Returns a vector of a row's scores, scaled, with the bias of its keys added.
#[cube]
fn scaled<F: Float, N: Size>(
    score: Vector<F, N>,
    bias: &Sequence<Box<[Vector<F, N>]>>,
    row: usize,
    index: usize,
    shape: &ScoreRows,
) -> Vector<f32, N> {
    let mut score = Vector::<f32, N>::cast_from(score) * Vector::new(shape.scale);
    #[unroll]
    for at in 0..bias.len() {
        let first = row / shape.bias_rows * shape.bias_count + shape.skipped;
        score += Vector::cast_from(bias[at][first + index]);
    }
    score
}

/// Returns a vector of numbers times dropout's factors, which are 0 where the mask is 0.
#[cube]
fn masked<F: Float, N: Size>(
    numbers: Vector<f32, N>,
    mask: &Sequence<Box<[Vector<F, N>]>>,
    row: usize,
    index: usize,
    shape: &ScoreRows,
) -> Vector<f32, N> {
    let mut numbers = numbers;
    #[unroll]
    for at in 0..mask.len() {
        let first = row * shape.mask_count + shape.mask_skipped;
        let mask = Vector::<f32, N>::cast_from(mask[at][first + index]);
        let zero = Vector::<f32, N>::new(0.0f32);
        numbers = select_many(mask.equal(&zero), zero, numbers * Vector::new(shape.keep));
    }
    numbers
}

/// Replaces the scores of rows by the attention weights, with dropout, and writes for each row the
/// logarithm of the sum of the exponentials of its scores. `bias`, `mask` and `table` have one buffer or
/// none.
#[cube(launch_unchecked)]
pub(super) fn attention_weights_kernel<F: Float, N: Size>(
    scores: &mut [Vector<F, N>],
    bias: &Sequence<Box<[Vector<F, N>]>>,
    mask: &Sequence<Box<[Vector<F, N>]>>,
    table: &Sequence<Box<[u32]>>,
    statistics: &mut [f32],
    shape: ScoreRows,
    #[comptime] bounds: Bounds,
    #[comptime] team: Team,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(team.threads);
    let own = own_team(team);
    // Surplus teams process the last row as well, as all threads of a cube must meet. They do not write.
    let row = min(own, shape.rows - 1);
    let first = row * shape.count;
    let (lane, step, width) = (own_lane(team), comptime!(team.lanes), comptime!(team.width));
    let seen = seen_keys(row, lane, table, &shape, team);

    let mut top = Vector::<f32, N>::new(f32::MIN);
    let mut index = seen.begin;
    while index * width < seen.end {
        let score = scaled(scores[first + index], bias, row, index, &shape);
        top = max(top, of_seen(score, f32::MIN, index * width, &seen, bounds));
        index += step;
    }
    let top = team_max(top, &mut shared, team);
    let tops = Vector::<f32, N>::new(top);

    let mut sum = Vector::<f32, N>::new(0.0f32);
    index = seen.begin;
    while index * width < seen.end {
        let score = scaled(scores[first + index], bias, row, index, &shape);
        let weight = power(score - tops);
        sum += of_seen(weight, 0.0f32, index * width, &seen, bounds);
        index += step;
    }
    let sum = team_sum(sum, &mut shared, team);
    // A row whose keys are all hidden has the weights 0. A sum that is NaN stays.
    let sum = select(sum < f32::MIN_POSITIVE, f32::MIN_POSITIVE.runtime(), sum);
    if own < shape.rows {
        let factor = Vector::<f32, N>::new(1.0f32 / sum);
        index = lane;
        while index < shape.count {
            let mut weight = Vector::<f32, N>::new(0.0f32);
            if index * width < seen.end && (index + 1) * width > seen.first {
                let score = scaled(scores[first + index], bias, row, index, &shape);
                weight = power(score - tops) * factor;
                weight = masked(weight, mask, row, index, &shape);
                weight = of_seen(weight, 0.0f32, index * width, &seen, bounds);
            }
            scores[first + index] = narrowed(weight, integers);
            index += step;
        }
        if lane == 0 {
            statistics[row] = top + f32::ln(sum);
        }
    }
}

/// Replaces the scores of rows by the attention weights, with dropout, and the gradients of these weights
/// by those of the products of queries and keys. `bias`, `mask` and `table` have one buffer or none.
#[cube(launch_unchecked)]
pub(super) fn attention_slopes_kernel<F: Float, N: Size>(
    scores: &mut [Vector<F, N>],
    grads: &mut [Vector<F, N>],
    bias: &Sequence<Box<[Vector<F, N>]>>,
    mask: &Sequence<Box<[Vector<F, N>]>>,
    table: &Sequence<Box<[u32]>>,
    statistics: &[f32],
    means: &[f32],
    shape: ScoreRows,
    #[comptime] bounds: Bounds,
    #[comptime] team: Team,
    #[comptime] integers: bool,
    #[define(F)] _dtype: ElemType,
) {
    let own = own_team(team);
    let row = min(own, shape.rows - 1);
    let first = row * shape.count;
    let (lane, step, width) = (own_lane(team), comptime!(team.lanes), comptime!(team.width));
    let seen = seen_keys(row, lane, table, &shape, team);
    let query = row / shape.queries * shape.all_queries + shape.first_query + row % shape.queries;
    let logs = Vector::<f32, N>::new(statistics[query]);

    let mean = Vector::<f32, N>::new(means[query]);

    if own < shape.rows {
        let mut index = lane;
        while index < shape.count {
            let mut dropped = Vector::<f32, N>::new(0.0f32);
            let mut slope = Vector::<f32, N>::new(0.0f32);
            if index * width < seen.end && (index + 1) * width > seen.first {
                let score = scaled(scores[first + index], bias, row, index, &shape);
                let weight = power(score - logs);
                dropped = masked(weight, mask, row, index, &shape);
                let grad = Vector::<f32, N>::cast_from(grads[first + index]);
                let grad = masked(grad, mask, row, index, &shape);
                slope = (grad - mean) * weight * Vector::new(shape.scale);
                dropped = of_seen(dropped, 0.0f32, index * width, &seen, bounds);
                slope = of_seen(slope, 0.0f32, index * width, &seen, bounds);
            }
            scores[first + index] = narrowed(dropped, integers);
            grads[first + index] = narrowed(slope, integers);
            index += step;
        }
    }
}

/// Adds rows of `count` vectors a head to rows of `all_count` vectors a head, after the first `skipped` ones.
#[cube(launch_unchecked)]
pub(super) fn add_rows_kernel<F: Float, N: Size>(
    sums: &mut [Vector<f32, N>],
    rows: &[Vector<F, N>],
    total: usize,
    count: usize,
    all_count: usize,
    skipped: usize,
    #[define(F)] _dtype: ElemType,
) {
    let index = ABSOLUTE_POS;
    if index < total {
        let at = index / count * all_count + skipped + index % count;
        let sum = sums[at] + Vector::cast_from(rows[index]);
        sums[at] = sum;
    }
}
