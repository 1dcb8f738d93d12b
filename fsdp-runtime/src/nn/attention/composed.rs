//! Attention with the whole matrix of scores, for devices without kernels.

use burn::tensor::{Bool, Tensor, TensorData};

use crate::backend::ops::{AttentionRule, KeyRanges, MaskPart, Places, dropout_tracked};
use crate::module::Mask;

/// Computes attention with Burn's operations, and the whole matrix of scores.
pub(super) fn composed(
    [query, key, value]: [Tensor<4>; 3],
    bias: Option<Tensor<2>>,
    rule: &AttentionRule,
) -> Tensor<4> {
    let ([batch, heads, queries, width], [_, key_heads, keys, _]) = (query.dims(), key.dims());
    let value_width = value.dims()[3];
    let device = query.device();
    // The heads that share keys are rows of one product.
    let rows = heads / key_heads.max(1) * queries;
    let query = query.reshape([batch, key_heads, rows, width]);
    let scores = query.matmul(key.transpose()).mul_scalar(rule.scale);
    let mut scores = scores.reshape([batch, heads, queries, keys]);
    if let Some(bias) = bias {
        scores = scores + bias.reshape([batch, 1, 1, keys]);
    }
    if rule.hides() {
        let hidden = hidden(batch, &KeyRanges::new(rule, [queries, keys]));
        let hidden = Tensor::<4, Bool>::from_data(hidden, &device);
        let hidden = hidden.expand([batch, heads, queries, keys]);
        scores = scores.mask_fill(hidden, f32::NEG_INFINITY);
    }
    // Bounds as in Burn's own attention: a row of negative infinity has the weights 0.
    let range = scores.dtype().finfo().expect("a float tensor");
    let top = scores.clone().detach().max_dim(3).clamp_min(range.min);
    let weights = (scores - top).exp();
    let sum = weights.clone().sum_dim(3).clamp_min(range.min_positive);
    let weights = weights / sum;
    let weights = match &rule.dropout {
        Some(source) => {
            let part = rule.places.as_ref().map(|places| {
                MaskPart::new([Places::all(batch), places.heads, places.queries, places.keys])
            });
            dropout_tracked::<4>(&Mask { source: *source, part }, weights)
        }
        None => weights,
    };
    let weights = weights.reshape([batch, key_heads, rows, keys]);
    weights.matmul(value).reshape([batch, heads, queries, value_width])
}

/// Returns which keys the rule hides from each query, `[batch, 1, queries, keys]`.
fn hidden(batch: usize, ranges: &KeyRanges<'_>) -> TensorData {
    let (queries, keys) = (ranges.queries(), ranges.keys());
    let mut hidden = vec![true; batch * queries * keys];
    for (at, hidden) in hidden.chunks_mut(keys.max(1)).enumerate() {
        hidden[ranges.of_query(at / queries, at % queries)].fill(false);
    }
    TensorData::new(hidden, [batch, 1, queries, keys])
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{Device, Distribution};

    use super::*;
    use crate::backend::ops::{Segments, attention_tracked};

    fn numbers(tensor: Tensor<4>) -> Vec<f64> {
        tensor.into_data().iter::<f64>().collect()
    }

    /// Devices with kernels never reach this form.
    #[test]
    fn the_form_with_the_whole_matrix_is_the_same_function() {
        let device = Device::flex().autodiff();
        device.seed(5);
        let heads = |heads, length| {
            let distribution = Distribution::Normal(0.0, 1.0);
            Tensor::<4>::random([2, heads, length, 8], distribution, &device).require_grad()
        };
        let long = [heads(6, 60), heads(2, 40), heads(2, 40)];
        let equal = [heads(6, 40), heads(3, 40), heads(3, 40)];
        let padding = Tensor::<2>::zeros([2, 40], &device);
        let bias = padding.slice_fill([1..2, 30..40], f32::NEG_INFINITY);
        let plain = AttentionRule::new(0.4);
        let causal = AttentionRule { causal: true, ..plain.clone() };
        let window = AttentionRule { window: Some(9), ..plain.clone() };
        let segments: Vec<i64> = (0..80).map(|at| i64::from(at % 40 > 11 + at / 40)).collect();
        let segments = Segments::new(&segments, 40).ok();
        let packed = AttentionRule { segments, ..causal.clone() };
        let cases = [(&long, plain), (&long, causal), (&long, window), (&equal, packed)];
        for (tensors, rule) in cases {
            let tiled = attention_tracked(tensors.each_ref(), Some(bias.clone()), &rule);
            let whole = composed(tensors.clone(), Some(bias.clone()), &rule);
            let results = [tiled.expect("Flex has kernels"), whole].map(|output| {
                let gradients = output.clone().powi_scalar(2).sum().backward();
                let grads = tensors.each_ref().map(|tensor| tensor.grad(&gradients).unwrap());
                [output.inner()].into_iter().chain(grads).flat_map(numbers).collect::<Vec<_>>()
            });
            let [tiled, whole] = &results;
            assert_eq!(tiled.len(), whole.len());
            for (at, (a, b)) in tiled.iter().zip(whole).enumerate() {
                assert!((a - b).abs() < 1e-4, "element {at}: {a} {b} under {rule:?}");
            }
        }
    }
}
