//! Attention in blocks of queries, made of Burn's operations. The scores of a block of queries with
//! all of their keys exist at once.
//!
//! Scores and sums are in f32, or in f64 for tensors of f64.

use std::ops::Range;

use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Shape, Slice, TensorData};
use burn_std::Scalar;

use super::{AttentionRule, AttentionTensors, MASK_ROWS};
use crate::backend::kernels::mask::{BATCH, MaskSource};
use crate::backend::tensor::Float;

/// Queries of a block: those whose masks are numbered together.
const QUERIES: usize = MASK_ROWS;

/// The kernel that multiplies a tensor by a dropout mask.
type Dropout<B> = fn(Float<B>, &MaskSource) -> Float<B>;

/// Implements [`Kernels::tiled_attention`](crate::backend::kernels::Kernels::tiled_attention).
pub(in crate::backend::kernels) fn forward<B: Backend>(
    tensors: &AttentionTensors<Float<B>>,
    rule: &AttentionRule,
    dropout: Dropout<B>,
) -> [Float<B>; 2] {
    let (mut outputs, mut statistics) = (Vec::new(), Vec::new());
    let hidden = hidden::<B>(tensors, rule);
    for block in Block::all::<B>(tensors, rule) {
        let scores = block.scores::<B>(tensors, rule, hidden.as_ref());
        // Bounds as in Burn's own attention: a row of negative infinity has the weights 0.
        let range = scores.dtype().finfo().expect("a float tensor");
        let top = B::float_max_dim(scores.clone(), 3);
        let top = B::float_clamp_min(top, Scalar::from(range.min));
        let weights = B::float_exp(B::float_sub(scores, top.clone()));
        let sum = B::float_sum_dim(weights.clone(), 3);
        let sum = B::float_clamp_min(sum, Scalar::from(range.min_positive));
        let weights = B::float_div(weights, sum.clone());
        let weights = match block.mask::<B>(&weights, rule, dropout) {
            Some(mask) => B::float_mul(weights, mask),
            None => weights,
        };
        let values = block.seen::<B>(&tensors.value);
        let weights = B::float_cast(weights, values.dtype().into());
        outputs.push(B::float_matmul(weights, values));
        statistics.push(B::float_add(top, B::float_log(sum)));
    }
    [outputs, statistics].map(|blocks| B::float_cat(blocks, 2))
}

/// Implements
/// [`Kernels::tiled_attention_backward`](crate::backend::kernels::Kernels::tiled_attention_backward).
pub(in crate::backend::kernels) fn backward<B: Backend>(
    tensors: &AttentionTensors<Float<B>>,
    [output, statistics]: &[Float<B>; 2],
    grad: &Float<B>,
    rule: &AttentionRule,
    dropout: Dropout<B>,
) -> [Float<B>; 3] {
    let wide = wide(tensors.query.dtype());
    let mut query_grads = Vec::new();
    let [mut key_grad, mut value_grad] = [&tensors.key, &tensors.value]
        .map(|tensor| B::float_zeros(tensor.shape(), &tensor.device(), wide.into()));
    let hidden = hidden::<B>(tensors, rule);
    for block in Block::all::<B>(tensors, rule) {
        let statistics = block.of_queries::<B>(statistics);
        let scores = block.scores::<B>(tensors, rule, hidden.as_ref());
        let weights = B::float_exp(B::float_sub(scores, statistics));
        let mask = block.mask::<B>(&weights, rule, dropout);
        let [grad, output] = [grad, output].map(|tensor| block.of_queries::<B>(tensor));
        let wide_grad = B::float_cast(grad.clone(), wide.into());
        let mean = B::float_mul(wide_grad.clone(), B::float_cast(output, wide.into()));
        let mean = B::float_sum_dim(mean, 3);

        let values = B::float_transpose(block.seen::<B>(&tensors.value));
        let of_weights = B::float_cast(B::float_matmul(grad.clone(), values), wide.into());
        let (of_weights, dropped) = match mask {
            Some(mask) => {
                (B::float_mul(of_weights, mask.clone()), B::float_mul(weights.clone(), mask))
            }
            None => (of_weights, weights.clone()),
        };
        let slopes = B::float_mul(B::float_sub(of_weights, mean), weights);
        let slopes = B::float_mul_scalar(slopes, Scalar::from(rule.scale));
        let [slopes, dropped] =
            [slopes, dropped].map(|tensor| B::float_cast(tensor, grad.dtype().into()));
        let of_key = B::float_transpose(slopes.clone());
        let of_key = B::float_matmul(of_key, block.of_queries::<B>(&tensors.query));
        key_grad = block.add::<B>(key_grad, of_key);
        let of_value = B::float_matmul(B::float_transpose(dropped), grad);
        value_grad = block.add::<B>(value_grad, of_value);
        query_grads.push(B::float_matmul(slopes, block.seen::<B>(&tensors.key)));
    }
    let dtype = tensors.query.dtype();
    let [key_grad, value_grad] =
        [key_grad, value_grad].map(|tensor| B::float_cast(tensor, dtype.into()));
    [B::float_cat(query_grads, 2), key_grad, value_grad]
}

/// Returns the dtype of scores and sums.
fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// A block of queries, and the keys that some of them see: the first ones.
struct Block {
    queries: Range<usize>,
    keys: usize,
    /// Number of all keys, seen or not.
    all_keys: usize,
    /// Position of the first query among the keys, which is negative if there are more queries than
    /// keys.
    position: i64,
}

impl Block {
    /// Returns the blocks of all queries. A block sees at least one key, which may be hidden from each
    /// of its queries.
    fn all<B: Backend>(
        tensors: &AttentionTensors<Float<B>>,
        rule: &AttentionRule,
    ) -> impl Iterator<Item = Self> + use<B> {
        let (queries, keys) = (tensors.query.shape()[2], tensors.key.shape()[2]);
        let causal = rule.causal;
        (0..queries).step_by(QUERIES).map(move |start| {
            let end = (start + QUERIES).min(queries);
            let seen = if causal { (end + keys).saturating_sub(queries).max(1) } else { keys };
            let position = (start + keys) as i64 - queries as i64;
            Self { queries: start..end, keys: seen, all_keys: keys, position }
        })
    }

    /// Returns the rows of the block's queries.
    fn of_queries<B: Backend>(&self, tensor: &Float<B>) -> Float<B> {
        part::<B>(tensor, 2, self.queries.clone())
    }

    /// Returns the rows of the keys that the block sees.
    fn seen<B: Backend>(&self, tensor: &Float<B>) -> Float<B> {
        part::<B>(tensor, 2, 0..self.keys)
    }

    /// Adds rows of the keys that the block sees to the sums over all blocks.
    fn add<B: Backend>(&self, sums: Float<B>, rows: Float<B>) -> Float<B> {
        let rows = B::float_cast(rows, sums.dtype().into());
        if self.keys == self.all_keys {
            return B::float_add(sums, rows);
        }
        let rows = B::float_add(self.seen::<B>(&sums), rows);
        let seen = slices(&sums.shape(), 2, 0..self.keys);
        B::float_slice_assign(sums, &seen, rows)
    }

    /// Returns the scaled scores, `[batch, heads, queries, keys]`, with negative infinity for hidden
    /// keys. `hidden` is that of all blocks.
    fn scores<B: Backend>(
        &self,
        tensors: &AttentionTensors<Float<B>>,
        rule: &AttentionRule,
        hidden: Option<&Float<B>>,
    ) -> Float<B> {
        let key = B::float_transpose(self.seen::<B>(&tensors.key));
        let scores = B::float_matmul(self.of_queries::<B>(&tensors.query), key);
        let dtype = wide(scores.dtype());
        let scores = B::float_cast(scores, dtype.into());
        let mut scores = B::float_mul_scalar(scores, Scalar::from(rule.scale));
        if let Some(bias) = &tensors.bias {
            let bias = part::<B>(bias, 1, 0..self.keys);
            let shape = Shape::from([bias.shape()[0], 1, 1, self.keys]);
            let bias = B::float_cast(B::float_reshape(bias, shape), dtype.into());
            scores = B::float_add(scores, bias);
        }
        match hidden {
            Some(hidden) => self.hide::<B>(scores, hidden),
            None => scores,
        }
    }

    /// Adds negative infinity to the scores of the keys that a query does not see under `causal`. Only
    /// the last keys of a block are hidden from some of its queries.
    fn hide<B: Backend>(&self, scores: Float<B>, hidden: &Float<B>) -> Float<B> {
        let rows = self.queries.len();
        let first = usize::try_from(self.position + 1).unwrap_or(0).min(self.keys);
        let columns = self.keys - first;
        if columns == 0 {
            return scores;
        }
        // A block's first query comes before the first key if there are more queries than keys. The
        // mask then begins with columns of absent keys. Its last columns hide a key from all queries.
        let absent = usize::try_from(-1 - self.position).unwrap_or(0).min(rows - 1);
        let hidden = part::<B>(hidden, 2, 0..rows);
        let hidden = part::<B>(&hidden, 3, absent..absent + columns);
        let late = part::<B>(&scores, 3, first..self.keys);
        let slices = slices(&scores.shape(), 3, first..self.keys);
        B::float_slice_assign(scores, &slices, B::float_add(late, hidden))
    }

    /// Returns the dropout mask of the block's weights.
    fn mask<B: Backend>(
        &self,
        weights: &Float<B>,
        rule: &AttentionRule,
        dropout: Dropout<B>,
    ) -> Option<Float<B>> {
        let source = rule.dropout?.of_block(self.queries.start / MASK_ROWS);
        let [batch, heads, queries, keys] = weights.shape().dims();
        // Masks are numbered over all keys, seen or not.
        let all = Shape::from([batch, heads, queries, self.all_keys.next_multiple_of(BATCH)]);
        let ones = B::float_ones(all, &weights.device(), DType::F32.into());
        let mask = part::<B>(&dropout(ones, &source), 3, 0..keys);
        Some(B::float_cast(mask, weights.dtype().into()))
    }
}

/// Returns what `causal` adds to the scores of the keys that come after that of a block's first query:
/// negative infinity for those that a query does not see, and else 0, `[1, 1, QUERIES, QUERIES]`. It is
/// the same for all blocks.
fn hidden<B: Backend>(
    tensors: &AttentionTensors<Float<B>>,
    rule: &AttentionRule,
) -> Option<Float<B>> {
    if !rule.causal {
        return None;
    }
    let row =
        |query| (1..=QUERIES).map(move |after| if after > query { f32::NEG_INFINITY } else { 0.0 });
    let elements: Vec<f32> = (0..QUERIES).flat_map(row).collect();
    let hidden = TensorData::new(elements, [1, 1, QUERIES, QUERIES]);
    let hidden = hidden.convert_dtype(wide(tensors.query.dtype()));
    Some(B::float_from_data(hidden, &tensors.query.device()))
}

/// Returns the elements of a tensor whose index in dimension `dim` is in the range.
fn part<B: Backend>(tensor: &Float<B>, dim: usize, range: Range<usize>) -> Float<B> {
    if range == (0..tensor.shape()[dim]) {
        return tensor.clone();
    }
    let slices = slices(&tensor.shape(), dim, range);
    B::float_slice(tensor.clone(), &slices)
}

/// Returns the slices of all dimensions, of which all but `dim` are whole.
fn slices(shape: &Shape, dim: usize, range: Range<usize>) -> Vec<Slice> {
    let slice = |at: usize| if at == dim { range.clone().into() } else { (0..shape[at]).into() };
    (0..shape.num_dims()).map(slice).collect()
}
