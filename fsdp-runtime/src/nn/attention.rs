//! Scaled dot-product attention whose memory is linear in the length.

use burn::tensor::{Bool, DType, Int, Tensor};

use super::dropout::Dropout;
use crate::backend::ops::{AttentionRule, attention_tracked, dropout_tracked};

/// Options of [`attention`].
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct AttentionOptions {
    causal: bool,
    padding: Option<Tensor<2, Bool>>,
    dropout: Option<Dropout>,
    scale: Option<f64>,
}

impl AttentionOptions {
    /// Returns the default options: every query sees every key, without dropout.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether a query sees only the keys up to its own position. Default: false.
    ///
    /// The last query has the position of the last key, as in `burn::tensor::module::attention`. PyTorch's
    /// `is_causal` gives the first query the position of the first key, which differs if there are more
    /// keys than queries, or fewer.
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Hides the keys whose element of `mask` is true, which has shape `[batch, key_length]`, as `mask_pad`
    /// of `burn::nn::attention::MultiHeadAttention` does.
    pub fn with_padding_mask(mut self, mask: Tensor<2, Bool>) -> Self {
        self.padding = Some(mask);
        self
    }

    /// Drops attention weights at random with the probability and the random stream of a layer. As in
    /// [`Dropout::forward`], nothing is dropped on devices without autodiff.
    pub fn with_dropout(mut self, dropout: &Dropout) -> Self {
        self.dropout = Some(dropout.clone());
        self
    }

    /// Sets the factor of the products of queries and keys. Default: `1 / √width`.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }
}

/// Returns the bytes that [`attention`] keeps for backward, if a tensor is tracked and there is no padding
/// mask: query, key, value, output, and a number for each query. For
/// [`MemoryForecast::with_activations`](crate::memory::MemoryForecast::with_activations).
///
/// `query` is the shape `[batch, heads, query_length, width]`, and `value` the shape
/// `[batch, heads, key_length, value_width]`.
pub fn attention_bytes(query: [usize; 4], value: [usize; 4], dtype: DType) -> usize {
    let [batch, heads, queries, width] = query;
    let [_, _, keys, value_width] = value;
    let elements = queries * width + keys * width + keys * value_width + queries * value_width;
    let statistics = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    batch * heads * (elements * dtype.size() + queries * statistics.size())
}

/// Computes `softmax(query · keyᵀ / √width) · value` for each head, and keeps no matrix of
/// `query_length · key_length` elements.
///
/// The scores are computed in tiles, used and dropped, and computed again in backward. For backward the
/// operation keeps its inputs, its output and one number for each query. Dropout masks are generated
/// again as well: they depend only on the random stream and the position of the weight, and have the
/// same bits on every device. The algorithm is that of Dao,
/// [*FlashAttention-2*](https://arxiv.org/abs/2307.08691), 2023. All sums are in f32, or in f64 for
/// tensors of f64.
///
/// A query whose keys are all hidden has the output 0, and gives no gradient.
///
/// On Flex, f32 tensors have kernels. The results depend only on the tensors, not on the number of
/// threads. Other dtypes compute blocks of 128 queries with Burn's operations. CubeCL devices have kernels
/// for the scores of a block, whose products are Burn's. On other devices the whole matrix of scores is
/// made.
///
/// # Shapes
///
/// - query: `[batch, heads, query_length, width]`
/// - key: `[batch, heads, key_length, width]`
/// - value: `[batch, heads, key_length, value_width]`
/// - output: `[batch, heads, query_length, value_width]`
///
/// # Panics
///
/// If the shapes do not fit one another.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use fsdp_runtime::nn::{AttentionOptions, attention};
///
/// # fn main() {
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let heads = || Tensor::<4>::random([2, 4, 300, 16], Distribution::Default, &device);
/// // The last 20 words of both rows are padding.
/// let padding = Tensor::<1, burn::tensor::Int>::arange(0..300, &device);
/// let padding = padding.greater_equal_elem(280).unsqueeze().repeat_dim(0, 2);
/// let options = AttentionOptions::new().with_causal(true).with_padding_mask(padding);
/// let context = attention(heads(), heads(), heads(), options);
/// assert_eq!(context.dims(), [2, 4, 300, 16]);
/// # }
/// # }
/// ```
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> Tensor<4> {
    check_shapes(&query, &key, &value, &options);
    let width = query.dims()[3];
    let device = query.device();
    let rule = AttentionRule {
        causal: options.causal,
        scale: options.scale.unwrap_or_else(|| 1.0 / (width as f64).sqrt()),
        dropout: options.dropout.and_then(|dropout| dropout.mask_source(&device)),
    };
    let bias = options.padding.map(|mask| {
        let zeros = Tensor::<2>::zeros(mask.dims(), (&device, query.dtype()));
        zeros.mask_fill(mask, f32::NEG_INFINITY)
    });
    attention_tracked([&query, &key, &value], bias.clone(), &rule)
        .unwrap_or_else(|| composed([query, key, value], bias, &rule))
}

fn check_shapes(query: &Tensor<4>, key: &Tensor<4>, value: &Tensor<4>, options: &AttentionOptions) {
    let [batch, heads, _, width] = query.dims();
    let [.., keys, _] = key.dims();
    assert_eq!(
        key.dims(),
        [batch, heads, keys, width],
        "the key must have the batch, heads and width of the query"
    );
    let [.., value_width] = value.dims();
    assert_eq!(
        value.dims(),
        [batch, heads, keys, value_width],
        "the value must have the batch, heads and length of the key"
    );
    assert!(width > 0, "queries must have at least one element");
    if let Some(mask) = &options.padding {
        assert_eq!(mask.dims(), [batch, keys], "the padding mask must be `[batch, key_length]`");
    }
}

/// Computes attention with Burn's operations, and the whole matrix of scores.
fn composed(
    [query, key, value]: [Tensor<4>; 3],
    bias: Option<Tensor<2>>,
    rule: &AttentionRule,
) -> Tensor<4> {
    let ([batch, _, queries, _], [.., keys, _]) = (query.dims(), key.dims());
    let device = query.device();
    let mut scores = query.matmul(key.transpose()).mul_scalar(rule.scale);
    if let Some(bias) = bias {
        scores = scores + bias.reshape([batch, 1, 1, keys]);
    }
    if rule.causal {
        let position = |len: usize| Tensor::<1, Int>::arange(0..len as i64, &device);
        let last = position(queries).add_scalar(keys as i64 - queries as i64);
        let hidden = position(keys).reshape([1, keys]).greater(last.reshape([queries, 1]));
        let hidden = hidden.reshape([1, 1, queries, keys]);
        scores = scores.mask_fill(hidden, f32::NEG_INFINITY);
    }
    // Bounds as in Burn's own attention: a row of negative infinity has the weights 0.
    let range = scores.dtype().finfo().expect("a float tensor");
    let top = scores.clone().detach().max_dim(3).clamp_min(range.min);
    let weights = (scores - top).exp();
    let sum = weights.clone().sum_dim(3).clamp_min(range.min_positive);
    let weights = weights / sum;
    let weights = match &rule.dropout {
        Some(source) => dropout_tracked::<4>(source, weights),
        None => weights,
    };
    weights.matmul(value)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{Device, Distribution};

    use super::*;

    fn numbers(tensor: Tensor<4>) -> Vec<f64> {
        tensor.into_data().iter::<f64>().collect()
    }

    /// Devices with kernels never reach this form.
    #[test]
    fn the_form_with_the_whole_matrix_is_the_same_function() {
        let device = Device::flex().autodiff();
        device.seed(5);
        let heads = |length| {
            let distribution = Distribution::Normal(0.0, 1.0);
            Tensor::<4>::random([2, 3, length, 8], distribution, &device).require_grad()
        };
        let tensors = [heads(60), heads(40), heads(40)];
        let padding = Tensor::<2>::zeros([2, 40], &device);
        let bias = padding.slice_fill([1..2, 30..40], f32::NEG_INFINITY);
        for causal in [false, true] {
            let rule = AttentionRule { causal, scale: 0.4, dropout: None };
            let [query, key, value] = tensors.each_ref();
            let tiled = attention_tracked([query, key, value], Some(bias.clone()), &rule);
            let whole = composed(tensors.clone(), Some(bias.clone()), &rule);
            let results = [tiled.expect("Flex has kernels"), whole].map(|output| {
                let gradients = output.clone().powi_scalar(2).sum().backward();
                let grads = tensors.each_ref().map(|tensor| tensor.grad(&gradients).unwrap());
                [output.inner()].into_iter().chain(grads).flat_map(numbers).collect::<Vec<_>>()
            });
            let [tiled, whole] = &results;
            assert_eq!(tiled.len(), whole.len());
            for (at, (a, b)) in tiled.iter().zip(whole).enumerate() {
                assert!((a - b).abs() < 1e-4, "element {at}: {a} {b}");
            }
        }
    }
}
