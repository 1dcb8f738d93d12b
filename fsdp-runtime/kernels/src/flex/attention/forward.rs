//! The forward pass: the keys of a query are visited in tiles, with a running maximum and sum of the
//! row's softmax.
//!
//! Source: Dao, [*FlashAttention-2*](https://arxiv.org/abs/2307.08691), 2023, algorithm 1.

use multiversion::multiversion;
use rayon::prelude::*;

use super::problem::{Head, Problem, QUERIES, STRIDE, Tile};
use super::{Buffer, exp_or_zero};
use crate::flex::dropout;
use crate::flex::product::Threads::One;
use crate::flex::product::{Matrix, multiply};
use crate::flex::rows::{row_max, row_sum};

/// Queries of one head and their results.
struct Task<'a> {
    head: Head<'a>,
    queries: std::ops::Range<usize>,
    /// Weighted sums of the values, one a row.
    output: &'a mut [f32],
    /// Logarithms of the sums of the exponentials of the rows' scores.
    statistics: &'a mut [f32],
}

/// Writes the output and the row statistics, on all threads of the current pool. `outputs` and
/// `statistics` are zero.
pub(super) fn forward(
    problem: &Problem<'_>,
    heads: usize,
    outputs: &mut [f32],
    statistics: &mut [f32],
) {
    let (mut outputs, mut statistics) = (outputs, statistics);
    let mut tasks = Vec::new();
    for head in (0..heads).map(|number| problem.head(number)) {
        for queries in head.query_tiles() {
            let len = queries.len();
            let (output, rest) = outputs.split_at_mut(len * head.sizes.value_width);
            outputs = rest;
            let (of_rows, rest) = statistics.split_at_mut(len);
            statistics = rest;
            tasks.push(Task { head, queries, output, statistics: of_rows });
        }
    }
    tasks.into_par_iter().for_each_init(
        || [Buffer::new(), Buffer::new()],
        |[scores, dropped], task| task.run(&mut scores.0, &mut dropped.0),
    );
}

impl Task<'_> {
    fn run(self, scores: &mut [f32], dropped: &mut [f32]) {
        let Self { head, queries, output, statistics } = self;
        let (len, width) = (queries.len(), head.sizes.value_width);
        let mut rows = Rows { tops: [f32::NEG_INFINITY; QUERIES], sums: [0.0; QUERIES] };
        for tile in head.tiles(queries) {
            let shape = [len, tile.keys.len()];
            let factors = [tile.query(), tile.key().transposed()];
            multiply(One, (scores, STRIDE), false, head.scale(), factors);
            let visible = tile.visible();
            weigh(scores, &visible[..len], shape[1], tile.bias(), &mut rows, output);
            let weights = drop_weights(&tile, scores, dropped);
            let factors = [Matrix::new(weights, shape, STRIDE), tile.value()];
            multiply(One, (output, width), true, 1.0, factors);
        }
        finish(&rows, output, statistics);
    }
}

/// Returns the weights under the tile's dropout mask: themselves, or `dropped`.
pub(super) fn drop_weights<'a>(
    tile: &Tile<'_>,
    weights: &'a [f32],
    dropped: &'a mut [f32],
) -> &'a [f32] {
    let Some((mask, number)) = tile.mask() else { return weights };
    for query in 0..tile.queries.len() {
        let row = query * STRIDE..query * STRIDE + tile.keys.len();
        dropout::dropout_over(&weights[row.clone()], &mut dropped[row], &mask, number(query));
    }
    dropped
}

/// Running statistics of the rows of a tile's queries.
struct Rows {
    /// Largest score so far.
    tops: [f32; QUERIES],
    /// Sum of the exponentials of the scores, each less the largest.
    sums: [f32; QUERIES],
}

/// Replaces the scores of `visible.len()` rows of `keys` elements by their exponentials, each less the
/// row's largest score so far. Multiplies the rows of `output` and the sums by what the larger maximum
/// requires. Keys that a query does not see have weight 0.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn weigh(
    scores: &mut [f32],
    visible: &[usize],
    keys: usize,
    bias: Option<&[f32]>,
    rows: &mut Rows,
    output: &mut [f32],
) {
    let width = output.len() / visible.len();
    for (row, &visible) in visible.iter().enumerate() {
        let (seen, hidden) = scores[row * STRIDE..][..keys].split_at_mut(visible);
        hidden.fill(0.0);
        if let Some(bias) = bias {
            seen.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
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
/// the scores' exponentials. A row without keys stays 0, with statistic 0.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn finish(rows: &Rows, output: &mut [f32], statistics: &mut [f32]) {
    let width = output.len() / statistics.len();
    for (row, statistic) in statistics.iter_mut().enumerate() {
        let sum = rows.sums[row];
        if sum == 0.0 {
            continue;
        }
        let scale = 1.0 / sum;
        output[row * width..][..width].iter_mut().for_each(|sum| *sum *= scale);
        *statistic = rows.tops[row] + sum.ln();
    }
}
