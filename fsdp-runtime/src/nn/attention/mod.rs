//! Scaled dot-product attention whose memory is linear in the length.

mod composed;
mod context;
mod options;

use burn::tensor::{DType, Tensor};

use self::composed::composed;
use self::context::Context;
pub use self::options::AttentionOptions;
use crate::backend::ops::{AttentionRule, WeightPlaces, attention_tracked, wide};
use crate::module::RunningForward;

/// Returns the bytes that [`attention`] keeps for backward, if a tensor is tracked and there is no padding
/// mask: query, key, value, output, and a number for each query. For
/// [`MemoryForecast::with_activations`](crate::memory::MemoryForecast::with_activations).
///
/// `query` is the shape `[batch, heads, query_length, width]`, and `value` the shape
/// `[batch, key_heads, key_length, value_width]`. The key has the length and heads of the value, and the width of the
/// query.
pub fn attention_bytes(query: [usize; 4], value: [usize; 4], dtype: DType) -> usize {
    let [batch, heads, queries, width] = query;
    let [_, key_heads, keys, value_width] = value;
    let elements = (heads * queries + key_heads * keys) * (width + value_width);
    batch * (elements * dtype.size() + heads * queries * wide(dtype).size())
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
/// Several heads of the query may share a head of the key and the value (grouped queries): head `h` uses
/// head `h / (heads / key_heads)`, as with `repeat_kv` of transformers, without copies. With one key head this is
/// multi-query attention.
///
/// Options hide keys: the sight of a causal query, a window, segments of packed rows, and padding. They may be
/// combined; a query then sees what all of them let it see. A query whose keys are all hidden has the output 0,
/// and gives no gradient.
///
/// On Flex, f32, bf16 and f16 have kernels, which compute in f32. The results depend only on the tensors,
/// not on the number of threads. CubeCL devices have kernels for the scores of a block of queries, whose
/// products are Burn's. Neither computes tiles that a window, segments or causality hide as a whole; on Flex this holds
/// for padding too. Tensors of f64 compute blocks of 128 queries with Burn's operations. On other devices the
/// whole matrix of scores is made.
///
/// # Context parallel
///
/// In a model with [context parallel](crate::FsdpOptions::with_context_parallel) ranks, query, key and value are
/// this rank's [part](crate::ContextPart) of each row. The ranks exchange keys and values, and each computes the
/// outputs of its own queries. Only this rank's part is kept for backward, which gets keys and values again
/// and adds up their gradients. Segments and the padding mask are those of whole rows.
/// [`ContextExchange`](crate::options::ContextExchange) says whether a rank has the keys and values of whole rows at
/// a time, or those of two ranks.
///
/// # Shapes
///
/// - query: `[batch, heads, query_length, width]`
/// - key: `[batch, key_heads, key_length, width]`, where `key_heads` divides `heads`
/// - value: `[batch, key_heads, key_length, value_width]`
/// - output: `[batch, heads, query_length, value_width]`
///
/// # Panics
///
/// If the shapes do not fit one another.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Distribution, Int, Tensor};
/// use fsdp_runtime::nn::{AttentionOptions, attention};
///
/// # fn main() {
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let tensor = |heads| {
///     Tensor::<4>::random([2, heads, 300, 16], Distribution::Default, &device)
/// };
/// // The last 20 words of both rows are padding.
/// let positions = Tensor::<1, Int>::arange(0..300, &device).unsqueeze().repeat_dim(0, 2);
/// let padding = positions.clone().greater_equal_elem(280);
/// let options = AttentionOptions::new().with_causal(true).with_padding_mask(padding);
/// let context = attention(tensor(4), tensor(4), tensor(4), options);
/// assert_eq!(context.dims(), [2, 4, 300, 16]);
///
/// // Rows of three documents of 100 words, and two key heads for four heads of the query.
/// let segments = positions.div_scalar(100);
/// let options = AttentionOptions::new().with_causal(true).with_segments(segments);
/// let context = attention(tensor(4), tensor(2), tensor(2), options);
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
    let own = [query.dims()[2], key.dims()[2]];
    let context = Context::current(own);
    let lengths = context.as_ref().map_or(own, Context::lengths);
    check_shapes([&query, &key, &value], lengths, &options);
    let width = query.dims()[3];
    let device = query.device();
    let mask = options.dropout.and_then(|dropout| dropout.next_mask(&device));
    let places = mask.as_ref().map(|mask| WeightPlaces {
        heads: RunningForward::heads(mask, query.dims()[1]),
        ..WeightPlaces::all(0, lengths)
    });
    let rule = AttentionRule {
        causal: options.causal,
        window: options.window,
        segments: options.segments,
        scale: options.scale.unwrap_or_else(|| 1.0 / (width as f64).sqrt()),
        dropout: mask.map(|mask| mask.source()),
        places: places.filter(|places| context.is_some() || !places.heads.is_all()),
    };
    let bias = options.padding.map(|mask| {
        let zeros = Tensor::<2>::zeros(mask.dims(), (&device, query.dtype()));
        zeros.mask_fill(mask, f32::NEG_INFINITY)
    });
    if let Some(context) = context {
        return context.attention([query, key, value], bias, &rule);
    }
    attention_tracked([&query, &key, &value], bias.clone(), &rule)
        .unwrap_or_else(|| composed([query, key, value], bias, &rule))
}

/// Checks shapes. `queries` and `all_keys` are the lengths of whole rows.
fn check_shapes(
    [query, key, value]: [&Tensor<4>; 3],
    [queries, all_keys]: [usize; 2],
    options: &AttentionOptions,
) {
    let [batch, heads, _, width] = query.dims();
    let [_, key_heads, keys, _] = key.dims();
    assert_eq!(
        key.dims(),
        [batch, key_heads, keys, width],
        "the key must have the batch and width of the query"
    );
    assert!(
        heads.is_multiple_of(key_heads),
        "the heads of the key must divide those of the query: {key_heads} do not divide {heads}"
    );
    let [.., value_width] = value.dims();
    assert_eq!(
        value.dims(),
        [batch, key_heads, keys, value_width],
        "the value must have the batch, heads and length of the key"
    );
    assert!(width > 0, "queries must have at least one element");
    if let Some(mask) = &options.padding {
        let wanted = [batch, all_keys];
        assert_eq!(
            mask.dims(),
            wanted,
            "the padding mask must be `[batch, key_length]` of whole rows"
        );
    }
    if let Some(segments) = &options.segments {
        assert_eq!(queries, all_keys, "with segments, there must be as many queries as keys");
        let wanted = [batch, all_keys];
        assert_eq!(segments.dims(), wanted, "the segments must be `[batch, length]` of whole rows");
    }
}
