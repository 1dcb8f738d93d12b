//! The backward pass: the weights of each tile are computed again, from the row statistics.
//!
//! Source: Dao, [*FlashAttention-2*](https://arxiv.org/abs/2307.08691), 2023, algorithm 2.

use std::ops::Range;

use multiversion::multiversion;
use rayon::prelude::*;

use super::forward::{drop_weights, split_hidden};
use super::heads::{Heads, Sums};
use super::problem::{Head, KEYS, Problem, QUERIES, STRIDE, Tile};
use super::{Buffer, exp_or_zero};
use crate::flex::float::KernelFloat;
use crate::flex::product::Threads::One;
use crate::flex::product::{Matrix, multiply};
use crate::flex::rows::pair_sum_of;

/// Results of the forward pass and the gradient of the output.
#[derive(Clone, Copy)]
pub(super) struct Saved<'a, E> {
    pub(super) output: Heads<'a, E>,
    pub(super) statistics: &'a [f32],
    pub(super) grad: Heads<'a, E>,
}

/// Tiles of some heads of the queries, which share keys and values, and the gradients that they write.
struct Task<'a, E> {
    problem: &'a Problem<'a, E>,
    saved: Saved<'a, E>,
    /// Heads of the queries, counted over all rows of the batch.
    heads: Range<usize>,
    /// Gradients of the queries of the tiles in the order in which the task visits them, unless another task
    /// writes them.
    queries: Option<std::vec::IntoIter<&'a mut [E]>>,
    /// Gradients of the keys and the values of the tiles, unless another task writes them.
    keys: Option<[Vec<&'a mut [E]>; 2]>,
    part: Part,
}

/// Tiles of a task.
#[derive(Clone, Copy)]
enum Part {
    /// All tiles of the heads.
    Heads,
    /// Those of one tile of queries.
    Queries(usize),
    /// Those of one tile of keys.
    Keys(usize),
}

/// Sums that a tile of queries adds to.
struct Targets<'t, 'a, E> {
    /// Gradient of the queries.
    query: Option<&'t mut Sums<'a, E>>,
    /// Gradients of the keys and the values.
    keys: Option<&'t mut [Sums<'a, E>; 2]>,
}

/// Returns whether as many tasks as there are heads of the keys would leave threads idle for longer than it takes
/// to compute seven products for each tile instead of five.
fn splits(key_heads: usize, threads: usize) -> bool {
    7 * key_heads < 5 * threads * key_heads.div_ceil(threads)
}

/// Writes the gradients of the query, the key and the value, given the rows of their heads, on all threads of
/// the current pool.
///
/// A task has a head of the keys with all heads of the queries that use it, whose five products for each tile are
/// the fewest. If there are many threads, a head of the queries has a task for each tile of queries, and one of
/// the keys a task for each tile of keys, which take seven products. The bits are the same: in both cases a query
/// adds its keys in order, and a key the queries of one head after the other.
pub(super) fn backward<E: KernelFloat>(
    problem: &Problem<'_, E>,
    saved: Saved<'_, E>,
    [queries, keys, values]: [Vec<Vec<&mut [E]>>; 3],
) {
    let group = problem.sizes.group;
    let is_split = splits(keys.len(), rayon::current_num_threads());
    let mut of_heads = queries.into_iter();
    let mut tasks = Vec::new();
    for (number, (keys, values)) in keys.into_iter().zip(values).enumerate() {
        let heads = number * group..(number + 1) * group;
        let task = |heads, queries: Option<Vec<_>>, keys, part| {
            let queries = queries.map(Vec::into_iter);
            Task { problem, saved, heads, queries, keys, part }
        };
        if !is_split {
            let queries = of_heads.by_ref().take(group).flatten().collect();
            tasks.push(task(heads, Some(queries), Some([keys, values]), Part::Heads));
            continue;
        }
        for (head, queries) in heads.clone().zip(of_heads.by_ref()) {
            for (at, queries) in tiles(queries, QUERIES).enumerate() {
                tasks.push(task(head..head + 1, Some(queries), None, Part::Queries(at)));
            }
        }
        for (at, of_keys) in tiles(keys, KEYS).zip(tiles(values, KEYS)).enumerate() {
            tasks.push(task(heads.clone(), None, Some(of_keys.into()), Part::Keys(at)));
        }
    }
    tasks.into_par_iter().for_each_init(Scratch::new, |scratch, task| task.run(scratch));
}

/// Returns the rows in tiles of `len`, the last of which may have fewer.
fn tiles<T>(rows: Vec<T>, len: usize) -> impl Iterator<Item = Vec<T>> {
    let mut rows = rows.into_iter();
    std::iter::from_fn(move || {
        let tile: Vec<T> = rows.by_ref().take(len).collect();
        (!tile.is_empty()).then_some(tile)
    })
}

/// Memory of one thread.
struct Scratch {
    tiles: TileBuffers,
    /// Elements of queries, outputs and gradients of a tile, and of keys and values, unless the tensors are
    /// f32.
    rows: [Vec<f32>; 3],
    keys: [Vec<f32>; 2],
}

/// Buffers of a tile.
struct TileBuffers {
    weights: Buffer,
    dropped: Buffer,
    slopes: Buffer,
}

impl Scratch {
    fn new() -> Self {
        let tiles =
            TileBuffers { weights: Buffer::new(), dropped: Buffer::new(), slopes: Buffer::new() };
        Self { tiles, rows: Default::default(), keys: Default::default() }
    }
}

impl<E: KernelFloat> Task<'_, E> {
    fn run(mut self, scratch: &mut Scratch) {
        let mut sums = self.keys.take().map(|keys| keys.map(Sums::new));
        for head in self.heads.clone().map(|number| self.problem.head(number)) {
            for (at, queries) in head.query_tiles().enumerate() {
                if matches!(self.part, Part::Queries(own) if own != at) {
                    continue;
                }
                let rows = self.queries.as_mut().map(|rows| rows.take(queries.len()).collect());
                let mut query = rows.map(Sums::new);
                let targets = Targets { query: query.as_mut(), keys: sums.as_mut() };
                self.add_queries(&head, &queries, scratch, targets);
                query.into_iter().for_each(Sums::store);
            }
        }
        sums.into_iter().flatten().for_each(Sums::store);
    }

    /// Adds the gradients of the task's tiles that have these queries.
    fn add_queries(
        &self,
        head: &Head<'_, E>,
        queries: &Range<usize>,
        scratch: &mut Scratch,
        mut targets: Targets<'_, '_, E>,
    ) {
        let tiles: Vec<_> = match self.part {
            Part::Keys(own) => head.tile(queries, own).into_iter().collect(),
            _ => head.tiles(queries).collect(),
        };
        if tiles.is_empty() {
            return;
        }
        let Scratch { tiles: buffers, rows, keys: of_keys } = scratch;
        let rows = QueryRows::new(head, queries, self.saved, rows);
        for tile in tiles {
            let [key, value] = of_keys;
            let (key, value) = (tile.key().matrix(key), tile.value().matrix(value));
            let [weights, slopes] = buffers.run(&tile, &rows, [key, value]);
            if let Some(query) = &mut targets.query {
                let target = (query.get(), head.sizes.width);
                multiply(One, target, true, head.scale(), [slopes, key]);
            }
            if let Some([of_key, of_value]) = &mut targets.keys {
                let start = if let Part::Keys(own) = self.part { own * KEYS } else { 0 };
                let keys = tile.keys.start - start..tile.keys.end - start;
                let target = rows_mut(of_key.get(), &keys, head.sizes.width);
                multiply(One, target, true, head.scale(), [slopes.transposed(), rows.query]);
                let target = rows_mut(of_value.get(), &keys, head.sizes.value_width);
                multiply(One, target, true, 1.0, [weights.transposed(), rows.grad]);
            }
        }
    }
}

/// Returns the rows in the range, and their width.
fn rows_mut<'a>(
    elements: &'a mut [f32],
    range: &Range<usize>,
    width: usize,
) -> (&'a mut [f32], usize) {
    (&mut elements[range.start * width..range.end * width], width)
}

/// The queries of a tile.
struct QueryRows<'a> {
    query: Matrix<'a>,
    grad: Matrix<'a>,
    statistics: &'a [f32],
    /// Sum of output times gradient for each query.
    means: Vec<f32>,
}

impl<'a> QueryRows<'a> {
    fn new<E: KernelFloat>(
        head: &Head<'a, E>,
        queries: &Range<usize>,
        saved: Saved<'a, E>,
        [query, output, grad]: &'a mut [Vec<f32>; 3],
    ) -> Self {
        let start = head.number * head.sizes.queries;
        let output = saved.output.head(head.number).range(queries).matrix(output);
        let grad = saved.grad.head(head.number).range(queries).matrix(grad);
        Self {
            query: head.query(queries).matrix(query),
            means: row_means(output, grad),
            grad,
            statistics: &saved.statistics[start + queries.start..start + queries.end],
        }
    }
}

impl TileBuffers {
    /// Returns the weights of a tile under its dropout mask, and the gradients of its scores before the
    /// scale.
    fn run<E: KernelFloat>(
        &mut self,
        tile: &Tile<'_, E>,
        rows: &QueryRows<'_>,
        [key, value]: [Matrix<'_>; 2],
    ) -> [Matrix<'_>; 2] {
        let (shape, column) = (tile.shape(), tile.column());
        let weights = &mut self.weights.0[column..];
        let factors = [rows.query, key.transposed()];
        multiply(One, (weights, STRIDE), false, tile.head.scale(), factors);
        let visible = &tile.visible()[..shape[0]];
        weigh(weights, visible, shape[1], tile.bias(), rows.statistics);
        let slopes = &mut self.slopes.0[column..];
        multiply(One, (slopes, STRIDE), false, 1.0, [rows.grad, value.transposed()]);
        if let Some(mask) = tile.mask() {
            for query in 0..shape[0] {
                let row = &mut self.slopes.0[query * STRIDE..][..column + shape[1]];
                mask.apply_in_place(query, row);
            }
        }
        let slopes = &mut self.slopes.0[column..];
        differentiate(slopes, &self.weights.0[column..], shape[1], &rows.means);
        let weights = drop_weights(tile, &self.weights.0, &mut self.dropped.0);
        [Matrix::new(weights, shape, STRIDE), Matrix::new(slopes, shape, STRIDE)]
    }
}

/// Returns the sum of output times gradient for each row.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn row_means(output: Matrix<'_>, grad: Matrix<'_>) -> Vec<f32> {
    let rows = output.iter_rows().zip(grad.iter_rows());
    rows.map(|(output, grad)| pair_sum_of(output, grad, |output, grad| output * grad)).collect()
}

/// Replaces the scores of `visible.len()` rows of `keys` elements by their weights. Keys that a query
/// does not see have weight 0.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn weigh(
    scores: &mut [f32],
    visible: &[[usize; 2]],
    keys: usize,
    bias: Option<&[f32]>,
    statistics: &[f32],
) {
    for (row, (&[first, end], &statistic)) in visible.iter().zip(statistics).enumerate() {
        let seen = split_hidden(&mut scores[row * STRIDE..][..keys], [first, end]);
        match bias {
            None => seen.iter_mut().for_each(|score| *score = exp_or_zero(*score - statistic)),
            Some(bias) => seen.iter_mut().zip(&bias[first..]).for_each(|(score, bias)| {
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

#[cfg(test)]
mod tests {
    use super::splits;

    #[test]
    fn heads_are_split_where_threads_would_be_idle() {
        // Products of the slowest thread: five for each of its heads, or seven for its share of all.
        assert!(splits(1, 2) && splits(1, 16) && splits(5, 4) && splits(9, 8));
        assert!(!splits(1, 1) && !splits(12, 2) && !splits(3, 2) && !splits(3, 4) && !splits(7, 4));
    }
}
