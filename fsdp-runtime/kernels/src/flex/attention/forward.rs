//! The forward pass: the keys of a query are visited in tiles, with a running maximum and sum of the
//! row's softmax.
//!
//! Source: Dao, [*FlashAttention-2*](https://arxiv.org/abs/2307.08691), 2023, algorithm 1.

use multiversion::multiversion;
use rayon::prelude::*;

use super::heads::Sums;
use super::problem::{Head, Problem, QUERIES, STRIDE, Tile};
use super::{Buffer, exp_or_zero};
use crate::flex::float::KernelFloat;
use crate::flex::product::Threads::One;
use crate::flex::product::{Matrix, multiply};
use crate::flex::rows::{row_max, row_sum};

/// Queries of one head and their results.
struct Task<'a, E> {
    head: Head<'a, E>,
    queries: std::ops::Range<usize>,
    /// Weighted sums of the values, one a row.
    output: Vec<&'a mut [E]>,
    /// Logarithms of the sums of the exponentials of the rows' scores.
    statistics: &'a mut [f32],
}

/// Memory of one thread.
struct Scratch {
    scores: Buffer,
    dropped: Buffer,
    /// Elements of queries, keys and values, unless the tensors are f32.
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
}

/// Writes the rows of each head and the row statistics, on all threads of the current pool. `statistics` are
/// zero.
pub(super) fn forward<E: KernelFloat>(
    problem: &Problem<'_, E>,
    outputs: Vec<Vec<&mut [E]>>,
    statistics: &mut [f32],
) {
    let mut statistics = statistics;
    let mut tasks = Vec::new();
    for (number, rows) in outputs.into_iter().enumerate() {
        let (head, mut rows) = (problem.head(number), rows.into_iter());
        for queries in head.query_tiles() {
            let output = rows.by_ref().take(queries.len()).collect();
            let (of_rows, rest) = statistics.split_at_mut(queries.len());
            statistics = rest;
            tasks.push(Task { head, queries, output, statistics: of_rows });
        }
    }
    let scratch = || Scratch {
        scores: Buffer::new(),
        dropped: Buffer::new(),
        query: Vec::new(),
        key: Vec::new(),
        value: Vec::new(),
    };
    tasks.into_par_iter().for_each_init(scratch, |scratch, task| task.run(scratch));
}

impl<E: KernelFloat> Task<'_, E> {
    fn run(self, scratch: &mut Scratch) {
        let Self { head, queries, output, statistics } = self;
        let value_width = head.sizes.value_width;
        let mut output = Sums::new(output);
        let mut rows = Rows { tops: [f32::NEG_INFINITY; QUERIES], sums: [0.0; QUERIES] };
        let query = head.query(&queries).matrix(&mut scratch.query);
        let (scores, dropped) = (&mut scratch.scores.0, &mut scratch.dropped.0);
        for tile in head.tiles(&queries) {
            let (shape, column) = (tile.shape(), tile.column());
            let key = tile.key().matrix(&mut scratch.key);
            let value = tile.value().matrix(&mut scratch.value);
            let factors = [query, key.transposed()];
            let of_tile = &mut scores[column..];
            multiply(One, (of_tile, STRIDE), false, head.scale(), factors);
            let visible = &tile.visible()[..shape[0]];
            weigh(of_tile, visible, shape[1], tile.bias(), &mut rows, output.get());
            let weights = drop_weights(&tile, scores, dropped);
            let factors = [Matrix::new(weights, shape, STRIDE), value];
            multiply(One, (output.get(), value_width), true, 1.0, factors);
        }
        finish(&rows, output.get(), statistics);
        output.store();
    }
}

/// Returns the tile's weights, from its first column on, under its dropout mask: those of the buffer
/// `weights`, or of the buffer `dropped`.
pub(super) fn drop_weights<'a, E: KernelFloat>(
    tile: &Tile<'_, E>,
    weights: &'a [f32],
    dropped: &'a mut [f32],
) -> &'a [f32] {
    let column = tile.column();
    let Some(mask) = tile.mask() else { return &weights[column..] };
    for query in 0..tile.queries.len() {
        let row = query * STRIDE..query * STRIDE + column + tile.keys.len();
        mask.apply(query, &weights[row.clone()], &mut dropped[row]);
    }
    &dropped[column..]
}

/// Running statistics of the rows of a tile's queries.
struct Rows {
    /// Largest score so far.
    tops: [f32; QUERIES],
    /// Sum of the exponentials of the scores, each less the largest.
    sums: [f32; QUERIES],
}

/// Returns the scores of a row from the first key that its query sees to the last. The others become 0.
#[inline(always)]
pub(super) fn split_hidden(row: &mut [f32], [first, end]: [usize; 2]) -> &mut [f32] {
    let (row, after) = row.split_at_mut(end);
    let (before, seen) = row.split_at_mut(first);
    before.fill(0.0);
    after.fill(0.0);
    seen
}

/// Replaces the scores of `visible.len()` rows of `keys` elements by their exponentials, each less the
/// row's largest score so far. Multiplies the rows of `output` and the sums by what the larger maximum
/// requires. Keys that a query does not see have weight 0.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn weigh(
    scores: &mut [f32],
    visible: &[[usize; 2]],
    keys: usize,
    bias: Option<&[f32]>,
    rows: &mut Rows,
    output: &mut [f32],
) {
    let width = output.len() / visible.len();
    for (row, &[first, end]) in visible.iter().enumerate() {
        let seen = split_hidden(&mut scores[row * STRIDE..][..keys], [first, end]);
        if let Some(bias) = bias {
            seen.iter_mut().zip(&bias[first..]).for_each(|(score, bias)| *score += bias);
        }
        let (before, found) = (rows.tops[row], row_max(seen));
        let top = if found > before { found } else { before };
        if top == f32::NEG_INFINITY {
            // No key so far counts. A NaN stays one.
            seen.iter_mut().for_each(|score| *score = if score.is_nan() { *score } else { 0.0 });
            rows.sums[row] += row_sum(seen);
            continue;
        }
        seen.iter_mut().for_each(|score| *score = exp_or_zero(*score - top));
        if top != before {
            let factor = exp_or_zero(before - top);
            rows.sums[row] *= factor;
            output[row * width..][..width].iter_mut().for_each(|sum| *sum *= factor);
            rows.tops[row] = top;
        }
        rows.sums[row] += row_sum(seen);
    }
}

/// Divides the rows of `output` by the sums of their weights, and writes the logarithms of the sums of
/// the scores' exponentials. A row without keys stays 0, with the least statistic.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn finish(rows: &Rows, output: &mut [f32], statistics: &mut [f32]) {
    let width = output.len() / statistics.len();
    for (row, statistic) in statistics.iter_mut().enumerate() {
        let sum = rows.sums[row];
        if sum == 0.0 {
            *statistic = f32::MIN;
            continue;
        }
        let scale = 1.0 / sum;
        output[row * width..][..width].iter_mut().for_each(|sum| *sum *= scale);
        *statistic = rows.tops[row] + sum.ln();
    }
}
