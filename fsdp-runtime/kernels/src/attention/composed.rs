//! Rows of scores, made of Burn's operations. Numbers are in f32, or in f64 for tensors of f64.

use std::ops::Range;

use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};
use burn_std::Scalar;

use super::blocks::{self, Block, BlockOps, part, slices};
use super::{AttentionRule, AttentionTensors, MASK_ROWS};
use crate::mask::{MaskPart, MaskSource};
use crate::tensor::{Float, wide};

/// The kernels that multiply a tensor by a dropout mask, or by a part of one.
#[derive(Clone, Copy)]
pub(crate) struct DropoutKernels<B: Backend> {
    pub(crate) whole: fn(Float<B>, &MaskSource) -> Float<B>,
    pub(crate) part: fn(Float<B>, &MaskSource, &MaskPart) -> Float<B>,
}

/// Implements [`Kernels::tiled_attention`](crate::Kernels::tiled_attention) with Burn's
/// operations.
pub(crate) fn forward<B: Backend>(
    tensors: &AttentionTensors<Float<B>>,
    rule: &AttentionRule,
    dropout: DropoutKernels<B>,
) -> [Float<B>; 2] {
    blocks::forward(tensors, rule, &ComposedOps::<B>::new(dropout))
}

/// Implements
/// [`Kernels::tiled_attention_backward`](crate::Kernels::tiled_attention_backward) with
/// Burn's operations.
pub(crate) fn backward<B: Backend>(
    tensors: &AttentionTensors<Float<B>>,
    results: &[Float<B>; 2],
    grad: &Float<B>,
    rule: &AttentionRule,
    dropout: DropoutKernels<B>,
) -> [Float<B>; 3] {
    blocks::backward(tensors, results, grad, rule, &ComposedOps::<B>::new(dropout))
}

/// The operations of a block, made of Burn's.
pub(crate) struct ComposedOps<B: Backend> {
    dropout: DropoutKernels<B>,
}

impl<B: Backend> ComposedOps<B> {
    /// Returns the operations, given the kernels of dropout.
    pub(crate) fn new(dropout: DropoutKernels<B>) -> Self {
        Self { dropout }
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
        saved: [&Float<B>; 2],
        block: &Block<'_, B>,
    ) -> [Float<B>; 2] {
        let dtype = products.dtype();
        let [statistics, means] = saved.map(|tensor| block.of_queries(tensor, self));
        let weights = B::float_exp(B::float_sub(self.scores(products, block), statistics));
        let of_weights = B::float_cast(of_weights, weights.dtype().into());
        let (of_weights, dropped) = match self.mask(&weights, block) {
            Some(mask) => {
                (B::float_mul(of_weights, mask.clone()), B::float_mul(weights.clone(), mask))
            }
            None => (of_weights, weights.clone()),
        };
        let slopes = B::float_mul(B::float_sub(of_weights, means), weights);
        let slopes = B::float_mul_scalar(slopes, Scalar::from(block.rule().scale));
        [slopes, dropped].map(|tensor| B::float_cast(tensor, dtype.into()))
    }

    fn add(&self, sums: Float<B>, rows: Float<B>, first: usize) -> Float<B> {
        let rows = B::float_cast(rows, sums.dtype().into());
        let keys = first..first + rows.shape()[2];
        if keys == (0..sums.shape()[2]) {
            return B::float_add(sums, rows);
        }
        let rows = B::float_add(part::<B>(&sums, 2, keys.clone()), rows);
        let seen = slices(&sums.shape(), 2, keys);
        B::float_slice_assign(sums, &seen, rows)
    }
}

impl<B: Backend> ComposedOps<B> {
    /// Returns the scaled scores, with negative infinity for hidden keys.
    fn scores(&self, products: Float<B>, block: &Block<'_, B>) -> Float<B> {
        let dtype = wide(products.dtype());
        let scores = B::float_cast(products, dtype.into());
        let mut scores = B::float_mul_scalar(scores, Scalar::from(block.rule().scale));
        if let Some(bias) = block.bias {
            let bias = part::<B>(bias, 1, block.keys.clone());
            let shape = Shape::from([bias.shape()[0], 1, 1, block.keys.len()]);
            let bias = B::float_cast(B::float_reshape(bias, shape), dtype.into());
            scores = B::float_add(scores, bias);
        }
        match hidden(block) {
            Some(hidden) => {
                let hidden = B::float_from_data(hidden.convert_dtype(dtype), &scores.device());
                B::float_add(scores, hidden)
            }
            None => scores,
        }
    }

    /// Returns the dropout mask of the block's weights.
    fn mask(&self, weights: &Float<B>, block: &Block<'_, B>) -> Option<Float<B>> {
        let source = block.dropout()?;
        let shape = [block.batch, block.heads[0], block.queries.len(), block.mask_keys().len()];
        let ones = B::float_ones(Shape::from(shape), &weights.device(), DType::F32.into());
        let mask = match block.mask_part() {
            Some(of_block) => (self.dropout.part)(ones, &source, &of_block),
            None => part::<B>(&(self.dropout.whole)(ones, &source), 3, block.keys.clone()),
        };
        Some(B::float_cast(mask, weights.dtype().into()))
    }
}

/// Returns what is added to the scores of a block's keys: negative infinity for those that the rule hides from a
/// query, and else 0, `[batch, 1, queries, keys]`. Without segments it has one row for all of the batch.
/// Returns `None` if the rule hides none of these keys.
fn hidden<B: Backend>(block: &Block<'_, B>) -> Option<TensorData> {
    let (ranges, keys) = (block.ranges, &block.keys);
    let rows = if block.rule().segments.is_some() { block.batch } else { 1 };
    let queries = (0..rows).flat_map(|row| block.queries.clone().map(move |query| (row, query)));
    let seen: Vec<_> = queries.map(|(row, query)| ranges.of_query(row, query)).collect();
    if seen.iter().all(|seen| seen.start <= keys.start && keys.end <= seen.end) {
        return None;
    }
    let of_query = |seen: &Range<usize>| {
        let seen = seen.clone();
        keys.clone().map(move |key| if seen.contains(&key) { 0.0 } else { f32::NEG_INFINITY })
    };
    let elements: Vec<f32> = seen.iter().flat_map(of_query).collect();
    Some(TensorData::new(elements, [rows, 1, block.queries.len(), keys.len()]))
}
