//! Rows of scores, made of Burn's operations. Numbers are in f32, or in f64 for tensors of f64.

use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};
use burn_std::Scalar;

use super::blocks::{self, Block, BlockOps, part, slices};
use super::{AttentionRule, AttentionTensors, MASK_ROWS, wide};
use crate::mask::MaskSource;
use crate::tensor::Float;

/// The kernel that multiplies a tensor by a dropout mask.
type Dropout<B> = fn(Float<B>, &MaskSource) -> Float<B>;

/// Implements [`Kernels::tiled_attention`](crate::Kernels::tiled_attention) with Burn's
/// operations.
pub(crate) fn forward<B: Backend>(
    tensors: &AttentionTensors<Float<B>>,
    rule: &AttentionRule,
    dropout: Dropout<B>,
) -> [Float<B>; 2] {
    blocks::forward(tensors, rule, &ComposedOps::<B>::new(&tensors.query, rule, dropout))
}

/// Implements
/// [`Kernels::tiled_attention_backward`](crate::Kernels::tiled_attention_backward) with
/// Burn's operations.
pub(crate) fn backward<B: Backend>(
    tensors: &AttentionTensors<Float<B>>,
    [_, statistics]: &[Float<B>; 2],
    grad: &Float<B>,
    rule: &AttentionRule,
    dropout: Dropout<B>,
) -> [Float<B>; 3] {
    let ops = ComposedOps::<B>::new(&tensors.query, rule, dropout);
    blocks::backward(tensors, statistics, grad, rule, &ops)
}

/// The operations of a block, made of Burn's.
pub(crate) struct ComposedOps<B: Backend> {
    dropout: Dropout<B>,
    /// What `causal` adds to the scores of the keys that come after that of a block's first query: negative
    /// infinity for those that a query does not see, and else 0, `[1, 1, MASK_ROWS, MASK_ROWS]`. It is the
    /// same for all blocks.
    hidden: Option<Float<B>>,
}

impl<B: Backend> ComposedOps<B> {
    /// Returns the operations for attention with a query of this dtype and device.
    pub(crate) fn new(query: &Float<B>, rule: &AttentionRule, dropout: Dropout<B>) -> Self {
        let row = |query| {
            (1..=MASK_ROWS).map(move |after| if after > query { f32::NEG_INFINITY } else { 0.0 })
        };
        let hidden = || {
            let elements: Vec<f32> = (0..MASK_ROWS).flat_map(row).collect();
            let hidden = TensorData::new(elements, [1, 1, MASK_ROWS, MASK_ROWS]);
            B::float_from_data(hidden.convert_dtype(wide(query.dtype())), &query.device())
        };
        Self { dropout, hidden: rule.causal.then(hidden) }
    }
}

impl<B: Backend> BlockOps<B> for ComposedOps<B> {
    fn queries(&self, _: &AttentionTensors<Float<B>>, _: &AttentionRule) -> usize {
        MASK_ROWS
    }

    fn weights(&self, products: Float<B>, block: &Block<'_, B>) -> [Float<B>; 2] {
        let dtype = products.dtype();
        let scores = self.scores(products, block);
        // Bounds as in Burn's own attention: a row of negative infinity has the weights 0.
        let range = scores.dtype().finfo().expect("a float tensor");
        let top = B::float_max_dim(scores.clone(), 3);
        let top = B::float_clamp_min(top, Scalar::from(range.min));
        let weights = B::float_exp(B::float_sub(scores, top.clone()));
        let sum = B::float_sum_dim(weights.clone(), 3);
        let sum = B::float_clamp_min(sum, Scalar::from(range.min_positive));
        let weights = B::float_div(weights, sum.clone());
        let weights = match self.mask(&weights, block) {
            Some(mask) => B::float_mul(weights, mask),
            None => weights,
        };
        [B::float_cast(weights, dtype.into()), B::float_add(top, B::float_log(sum))]
    }

    fn slopes(
        &self,
        [products, of_weights]: [Float<B>; 2],
        statistics: &Float<B>,
        block: &Block<'_, B>,
    ) -> [Float<B>; 2] {
        let dtype = products.dtype();
        let statistics = block.of_queries(statistics);
        let weights = B::float_exp(B::float_sub(self.scores(products, block), statistics));
        let of_weights = B::float_cast(of_weights, weights.dtype().into());
        let (of_weights, dropped) = match self.mask(&weights, block) {
            Some(mask) => {
                (B::float_mul(of_weights, mask.clone()), B::float_mul(weights.clone(), mask))
            }
            None => (of_weights, weights.clone()),
        };
        let mean = B::float_sum_dim(B::float_mul(of_weights.clone(), weights.clone()), 3);
        let slopes = B::float_mul(B::float_sub(of_weights, mean), weights);
        let slopes = B::float_mul_scalar(slopes, Scalar::from(block.rule.scale));
        [slopes, dropped].map(|tensor| B::float_cast(tensor, dtype.into()))
    }

    fn add(&self, sums: Float<B>, rows: Float<B>) -> Float<B> {
        let rows = B::float_cast(rows, sums.dtype().into());
        let (keys, all_keys) = (rows.shape()[2], sums.shape()[2]);
        if keys == all_keys {
            return B::float_add(sums, rows);
        }
        let rows = B::float_add(part::<B>(&sums, 2, 0..keys), rows);
        let seen = slices(&sums.shape(), 2, 0..keys);
        B::float_slice_assign(sums, &seen, rows)
    }
}

impl<B: Backend> ComposedOps<B> {
    /// Returns the scaled scores, with negative infinity for hidden keys.
    fn scores(&self, products: Float<B>, block: &Block<'_, B>) -> Float<B> {
        let dtype = wide(products.dtype());
        let scores = B::float_cast(products, dtype.into());
        let mut scores = B::float_mul_scalar(scores, Scalar::from(block.rule.scale));
        if let Some(bias) = block.bias {
            let bias = part::<B>(bias, 1, 0..block.keys);
            let shape = Shape::from([bias.shape()[0], 1, 1, block.keys]);
            let bias = B::float_cast(B::float_reshape(bias, shape), dtype.into());
            scores = B::float_add(scores, bias);
        }
        match &self.hidden {
            Some(hidden) => hide(scores, hidden, block),
            None => scores,
        }
    }

    /// Returns the dropout mask of the block's weights.
    fn mask(&self, weights: &Float<B>, block: &Block<'_, B>) -> Option<Float<B>> {
        let source = block.dropout()?;
        let [batch, heads, queries, keys] = weights.shape().dims();
        let ones = Shape::from([batch, heads, queries, block.padded_keys()]);
        let ones = B::float_ones(ones, &weights.device(), DType::F32.into());
        let mask = part::<B>(&(self.dropout)(ones, &source), 3, 0..keys);
        Some(B::float_cast(mask, weights.dtype().into()))
    }
}

/// Adds negative infinity to the scores of the keys that a query does not see under `causal`. Only the
/// last keys of a block are hidden from some of its queries.
fn hide<B: Backend>(scores: Float<B>, hidden: &Float<B>, block: &Block<'_, B>) -> Float<B> {
    let (rows, keys, position) = (block.queries.len(), block.keys, block.position);
    let first = usize::try_from(position + 1).unwrap_or(0).min(keys);
    let columns = keys - first;
    if columns == 0 {
        return scores;
    }
    // A block's first query comes before the first key if there are more queries than keys. The
    // mask then begins with columns of absent keys. Its last columns hide a key from all queries.
    let absent = usize::try_from(-1 - position).unwrap_or(0).min(rows - 1);
    let hidden = part::<B>(hidden, 2, 0..rows);
    let hidden = part::<B>(&hidden, 3, absent..absent + columns);
    let late = part::<B>(&scores, 3, first..keys);
    let slices = slices(&scores.shape(), 3, first..keys);
    B::float_slice_assign(scores, &slices, B::float_add(late, hidden))
}
