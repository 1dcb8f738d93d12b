//! The backward pass: the weights of each tile are computed again, from the row statistics.
//!
//! Source: Dao, [*FlashAttention-2*](https://arxiv.org/abs/2307.08691), 2023, algorithm 2.

use multiversion::multiversion;
use rayon::prelude::*;

use super::forward::drop_weights;
use super::problem::{Head, KEYS, Problem, QUERIES, STRIDE, Tile, rows};
use super::{Buffer, exp_or_zero};
use crate::flex::dropout;
use crate::flex::product::Threads::One;
use crate::flex::product::{Matrix, multiply};
use crate::flex::rows::pair_sum_of;

/// Results of the forward pass and the gradient of the output.
#[derive(Clone, Copy)]
pub(super) struct Saved<'a> {
    pub(super) output: &'a [f32],
    pub(super) statistics: &'a [f32],
    pub(super) grad: &'a [f32],
}

/// A part of a head's tiles, and the gradients that it adds to, which are zero before it runs.
struct Task<'a> {
    head: Head<'a>,
    saved: Saved<'a>,
    /// Gradient of the queries, unless another task adds it.
    query: Option<&'a mut [f32]>,
    /// Gradients of the keys and the values of the tiles, unless another task adds them.
    keys: Option<[&'a mut [f32]; 2]>,
    part: Part,
}

/// Tiles of a task.
#[derive(Clone, Copy)]
enum Part {
    /// All tiles of the head.
    Head,
    /// Those of one tile of queries.
    Queries(usize),
    /// Those of one tile of keys.
    Keys(usize),
}

/// Memory of one thread.
struct Scratch {
    weights: Buffer,
    dropped: Buffer,
    slopes: Buffer,
}

/// Adds the gradients of the query, the key and the value, on all threads of the current pool.
///
/// A head is one task, whose five products for each tile are the fewest. If there are more than twice as
/// many threads as heads, a head has a task for each tile of queries and one for each tile of keys, which
/// take seven products. The bits are the same: in both cases a query adds its keys in order, and a key
/// its queries.
pub(super) fn backward(
    problem: &Problem<'_>,
    heads: usize,
    saved: Saved<'_>,
    [query, key, value]: [&mut [f32]; 3],
) {
    let each = |elements: usize| (elements / heads.max(1)).max(1);
    let [of_output, of_rows] = [saved.output, saved.statistics].map(|all| each(all.len()));
    let [of_query, of_key, of_value] = [&query, &key, &value].map(|all| each(all.len()));
    let splits = rayon::current_num_threads() > 2 * heads;
    let keys = key.chunks_mut(of_key).zip(value.chunks_mut(of_value));
    let mut tasks = Vec::new();
    for (number, (query, (key, value))) in query.chunks_mut(of_query).zip(keys).enumerate() {
        let head = problem.head(number);
        let saved = Saved {
            output: &saved.output[number * of_output..][..of_output],
            statistics: &saved.statistics[number * of_rows..][..of_rows],
            grad: &saved.grad[number * of_output..][..of_output],
        };
        let task = |query, keys, part| Task { head, saved, query, keys, part };
        if !splits {
            tasks.push(task(Some(query), Some([key, value]), Part::Head));
            continue;
        }
        let (width, value_width) = (head.sizes.width, head.sizes.value_width);
        for (at, query) in query.chunks_mut(QUERIES * width).enumerate() {
            tasks.push(task(Some(query), None, Part::Queries(at)));
        }
        let keys = key.chunks_mut(KEYS * width).zip(value.chunks_mut(KEYS * value_width));
        for (at, (key, value)) in keys.enumerate() {
            tasks.push(task(None, Some([key, value]), Part::Keys(at)));
        }
    }
    let scratch =
        || Scratch { weights: Buffer::new(), dropped: Buffer::new(), slopes: Buffer::new() };
    tasks.into_par_iter().for_each_init(scratch, |scratch, task| task.run(scratch));
}

impl Task<'_> {
    fn run(mut self, scratch: &mut Scratch) {
        let Self { head, saved, part, .. } = self;
        let value_width = head.sizes.value_width;
        let means = row_means(saved.output, saved.grad, value_width);
        for (at, queries) in head.query_tiles().enumerate() {
            if matches!(part, Part::Queries(own) if own != at) {
                continue;
            }
            let grad = rows(saved.grad, &queries, value_width);
            let statistics = &saved.statistics[queries.clone()];
            let means = &means[queries.clone()];
            for (at, tile) in head.tiles(queries).enumerate() {
                if matches!(part, Part::Keys(own) if own != at) {
                    continue;
                }
                let factors = scratch.run(&tile, grad, statistics, means);
                self.add(&tile, grad, factors);
            }
        }
    }

    /// Adds the gradients of a tile, given its weights and the gradients of its scores.
    fn add(&mut self, tile: &Tile<'_>, grad: Matrix<'_>, [weights, slopes]: [Matrix<'_>; 2]) {
        let (head, part) = (self.head, self.part);
        let (width, value_width) = (head.sizes.width, head.sizes.value_width);
        if let Some(target) = &mut self.query {
            let start = if let Part::Queries(_) = part { 0 } else { tile.queries.start };
            let target = &mut target[start * width..(start + tile.queries.len()) * width];
            multiply(One, (target, width), true, head.scale(), [slopes, tile.key()]);
        }
        if let Some([key, value]) = &mut self.keys {
            let start = if let Part::Keys(_) = part { 0 } else { tile.keys.start };
            let keys = start..start + tile.keys.len();
            let target = &mut key[keys.start * width..keys.end * width];
            let factors = [slopes.transposed(), tile.query()];
            multiply(One, (target, width), true, head.scale(), factors);
            let target = &mut value[keys.start * value_width..keys.end * value_width];
            multiply(One, (target, value_width), true, 1.0, [weights.transposed(), grad]);
        }
    }
}

impl Scratch {
    /// Returns the weights of a tile under its dropout mask, and the gradients of its scores.
    fn run(
        &mut self,
        tile: &Tile<'_>,
        grad: Matrix<'_>,
        statistics: &[f32],
        means: &[f32],
    ) -> [Matrix<'_>; 2] {
        let shape = [tile.queries.len(), tile.keys.len()];
        let (weights, slopes) = (&mut self.weights.0, &mut self.slopes.0);
        let factors = [tile.query(), tile.key().transposed()];
        multiply(One, (weights, STRIDE), false, tile.head.scale(), factors);
        let visible = &tile.visible()[..shape[0]];
        weigh(weights, visible, shape[1], tile.bias(), statistics);
        multiply(One, (slopes, STRIDE), false, 1.0, [grad, tile.value().transposed()]);
        if let Some((mask, number)) = tile.mask() {
            for query in 0..shape[0] {
                let row = &mut slopes[query * STRIDE..][..shape[1]];
                dropout::dropout_in_place(row, &mask, number(query));
            }
        }
        differentiate(slopes, weights, shape[1], means);
        let weights = drop_weights(tile, weights, &mut self.dropped.0);
        [Matrix::new(weights, shape, STRIDE), Matrix::new(slopes, shape, STRIDE)]
    }
}

/// Returns the sum of output times gradient for each row.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn row_means(output: &[f32], grad: &[f32], width: usize) -> Vec<f32> {
    let rows = output.chunks_exact(width).zip(grad.chunks_exact(width));
    rows.map(|(output, grad)| pair_sum_of(output, grad, |output, grad| output * grad)).collect()
}

/// Replaces the scores of `visible.len()` rows of `keys` elements by their weights. Keys that a query
/// does not see have weight 0.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn weigh(
    scores: &mut [f32],
    visible: &[usize],
    keys: usize,
    bias: Option<&[f32]>,
    statistics: &[f32],
) {
    for (row, (&visible, &statistic)) in visible.iter().zip(statistics).enumerate() {
        let (seen, hidden) = scores[row * STRIDE..][..keys].split_at_mut(visible);
        hidden.fill(0.0);
        match bias {
            None => seen.iter_mut().for_each(|score| *score = exp_or_zero(*score - statistic)),
            Some(bias) => seen.iter_mut().zip(bias).for_each(|(score, bias)| {
                *score = exp_or_zero(*score + bias - statistic);
            }),
        }
    }
}

/// Turns the gradients of the weights into those of the scores before the scale: each less its row's
/// mean, times the weight.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn differentiate(grads: &mut [f32], weights: &[f32], keys: usize, means: &[f32]) {
    for (row, &mean) in means.iter().enumerate() {
        let weights = &weights[row * STRIDE..][..keys];
        for (grad, weight) in grads[row * STRIDE..][..keys].iter_mut().zip(weights) {
            *grad = (*grad - mean) * weight;
        }
    }
}
