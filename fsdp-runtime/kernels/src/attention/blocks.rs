//! Attention in blocks of queries. The scores of a block of queries with all of their keys exist at once.

use std::ops::Range;

use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice};

use super::{AttentionRule, AttentionTensors, MASK_ROWS, wide};
use crate::mask::{BATCH, MaskSource};
use crate::tensor::Float;

/// Operations on the scores of a block, made of Burn's operations or kernels.
///
/// "Products" are those of queries and keys, `[batch, heads, queries, keys]`, in the dtype of the tensors.
/// Scores are products times the scale, plus the bias.
pub(crate) trait BlockOps<B: Backend> {
    /// Returns the number of queries of a block: [`MASK_ROWS`] under dropout, else a multiple of it. The
    /// last block may have fewer.
    fn queries(&self, tensors: &AttentionTensors<Float<B>>, rule: &AttentionRule) -> usize;

    /// Turns products into the attention weights, with dropout. Also returns for each query the logarithm
    /// of the sum of the exponentials of its scores, `[batch, heads, queries, 1]`, in f32 or f64.
    fn weights(&self, products: Float<B>, block: &Block<'_, B>) -> [Float<B>; 2];

    /// Returns the gradients of the products, and the attention weights with dropout. Given are the
    /// products, the gradients of these weights, in the same shape and dtype, and the second result of
    /// [`weights`](Self::weights) for all queries.
    fn slopes(
        &self,
        tensors: [Float<B>; 2],
        statistics: &Float<B>,
        block: &Block<'_, B>,
    ) -> [Float<B>; 2];

    /// Adds the rows of the first keys, `[batch, heads, keys, width]`, to sums over the rows of all keys,
    /// which are in f32 or f64.
    fn add(&self, sums: Float<B>, rows: Float<B>) -> Float<B>;
}

/// Implements [`Kernels::tiled_attention`](crate::Kernels::tiled_attention).
pub(crate) fn forward<B: Backend>(
    tensors: &AttentionTensors<Float<B>>,
    rule: &AttentionRule,
    ops: &impl BlockOps<B>,
) -> [Float<B>; 2] {
    let (mut outputs, mut statistics) = (Vec::new(), Vec::new());
    for block in Block::<B>::all(tensors, rule, ops.queries(tensors, rule)) {
        let [weights, of_rows] = ops.weights(block.products(tensors), &block);
        outputs.push(B::float_matmul(weights, block.seen(&tensors.value)));
        statistics.push(of_rows);
    }
    [outputs, statistics].map(joined::<B>)
}

/// Implements
/// [`Kernels::tiled_attention_backward`](crate::Kernels::tiled_attention_backward), given
/// the second result of [`forward`].
pub(crate) fn backward<B: Backend>(
    tensors: &AttentionTensors<Float<B>>,
    statistics: &Float<B>,
    grad: &Float<B>,
    rule: &AttentionRule,
    ops: &impl BlockOps<B>,
) -> [Float<B>; 3] {
    let dtype = tensors.query.dtype();
    let mut query_grads = Vec::new();
    let mut sums: Option<[Float<B>; 2]> = None;
    for block in Block::<B>::all(tensors, rule, ops.queries(tensors, rule)) {
        let grad = block.of_queries(grad);
        let values = B::float_transpose(block.seen(&tensors.value));
        let of_weights = B::float_matmul(grad.clone(), values);
        let products = block.products(tensors);
        let [slopes, weights] = ops.slopes([products, of_weights], statistics, &block);
        let of_key = B::float_transpose(slopes.clone());
        let of_key = B::float_matmul(of_key, block.of_queries(&tensors.query));
        let of_value = B::float_matmul(B::float_transpose(weights), grad);
        query_grads.push(B::float_matmul(slopes, block.seen(&tensors.key)));
        if block.queries.len() == tensors.query.shape()[2] {
            sums = Some([of_key, of_value]);
            break;
        }
        let [of_keys, of_values] = sums.take().unwrap_or_else(|| {
            [&tensors.key, &tensors.value]
                .map(|tensor| B::float_zeros(tensor.shape(), &tensor.device(), wide(dtype).into()))
        });
        sums = Some([ops.add(of_keys, of_key), ops.add(of_values, of_value)]);
    }
    let sums = sums.expect("a query");
    let [key_grad, value_grad] = sums.map(|tensor| B::float_cast(tensor, dtype.into()));
    [joined::<B>(query_grads), key_grad, value_grad]
}

/// Returns the rows of all queries.
fn joined<B: Backend>(mut blocks: Vec<Float<B>>) -> Float<B> {
    if blocks.len() == 1 { blocks.remove(0) } else { B::float_cat(blocks, 2) }
}

/// A block of queries, and the keys that some of them see: the first ones.
pub(crate) struct Block<'a, B: Backend> {
    pub(crate) rule: &'a AttentionRule,
    /// Number to add to all scores of a key, `[batch, all_keys]`.
    pub(crate) bias: Option<&'a Float<B>>,
    pub(crate) queries: Range<usize>,
    /// Number of keys that some of the queries see: at least one, which may be hidden from each of them.
    pub(crate) keys: usize,
    /// Number of all keys, seen or not.
    pub(crate) all_keys: usize,
    /// Position of the first query among the keys, which is negative if there are more queries than
    /// keys.
    pub(crate) position: i64,
}

impl<'a, B: Backend> Block<'a, B> {
    /// Returns the blocks of all queries, each of this many.
    fn all(
        tensors: &'a AttentionTensors<Float<B>>,
        rule: &'a AttentionRule,
        of_block: usize,
    ) -> impl Iterator<Item = Self> {
        let (queries, keys) = (tensors.query.shape()[2], tensors.key.shape()[2]);
        (0..queries).step_by(of_block).map(move |start| {
            let end = (start + of_block).min(queries);
            let seen = if rule.causal { (end + keys).saturating_sub(queries).max(1) } else { keys };
            let position = (start + keys) as i64 - queries as i64;
            let bias = tensors.bias.as_ref();
            Self { rule, bias, queries: start..end, keys: seen, all_keys: keys, position }
        })
    }

    /// Returns the rows of the block's queries.
    pub(super) fn of_queries(&self, tensor: &Float<B>) -> Float<B> {
        part::<B>(tensor, 2, self.queries.clone())
    }

    /// Returns the rows of the keys that the block sees.
    fn seen(&self, tensor: &Float<B>) -> Float<B> {
        part::<B>(tensor, 2, 0..self.keys)
    }

    /// Returns the source of the dropout mask of the block's weights. Its elements are numbered in the shape
    /// `[batch, heads, queries, padded_keys]`.
    pub(crate) fn dropout(&self) -> Option<MaskSource> {
        self.rule.dropout.map(|source| source.of_block(self.queries.start / MASK_ROWS))
    }

    /// Returns the number of all keys, seen or not, padded to whole batches of the random generator.
    pub(crate) fn padded_keys(&self) -> usize {
        self.all_keys.next_multiple_of(BATCH)
    }

    /// Returns the products of the queries and the keys that they see.
    fn products(&self, tensors: &AttentionTensors<Float<B>>) -> Float<B> {
        let key = B::float_transpose(self.seen(&tensors.key));
        B::float_matmul(self.of_queries(&tensors.query), key)
    }
}

/// Returns the elements of a tensor whose index in dimension `dim` is in the range.
pub(super) fn part<B: Backend>(tensor: &Float<B>, dim: usize, range: Range<usize>) -> Float<B> {
    if range == (0..tensor.shape()[dim]) {
        return tensor.clone();
    }
    let slices = slices(&tensor.shape(), dim, range);
    B::float_slice(tensor.clone(), &slices)
}

/// Returns the slices of all dimensions, of which all but `dim` are whole.
pub(super) fn slices(shape: &Shape, dim: usize, range: Range<usize>) -> Vec<Slice> {
    let slice = |at: usize| if at == dim { range.clone().into() } else { (0..shape[at]).into() };
    (0..shape.num_dims()).map(slice).collect()
}
