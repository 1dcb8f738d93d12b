//! Attention in tiles of the score matrix, for f32, bf16 and f16, computed in f32. A tile is computed, used and
//! overwritten, in the forward pass and again in the backward pass. Tiles without a key that some query of them
//! sees do not exist.
//!
//! The forward pass has a task for each tile of queries of each head, and the backward pass one for each head of
//! the keys, or more where there are many threads. The bits depend only on the tensors, not on the number of
//! threads.

mod backward;
mod forward;
mod heads;
mod problem;

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::{Shape, TensorData};

use self::backward::Saved;
use self::heads::{Heads, NewHeads, with_rows};
use self::problem::{Problem, QUERIES, STRIDE, Sizes};
use super::exp::{LEAST, exp_of_negative};
use super::float::{KernelFloat, slice};
use crate::attention::{AttentionRule, AttentionTensors};

/// Elements of a tile.
struct Buffer(Vec<f32>);

impl Buffer {
    fn new() -> Self {
        Self(vec![0.0; QUERIES * STRIDE])
    }
}

/// Returns eˣ for x ≤ 0 or, by rounding, little above, and exactly 0 where it is below the normal
/// numbers.
#[inline(always)]
pub(super) fn exp_or_zero(x: f32) -> f32 {
    let power = exp_of_negative(x);
    if x < LEAST { 0.0 } else { power }
}

/// Implements [`Kernels::tiled_attention`](crate::Kernels::tiled_attention), for tensors of `E`. The output
/// has the order of memory of the queries.
pub(super) fn forward<E: KernelFloat>(
    tensors: &AttentionTensors<FlexTensor>,
    rule: &AttentionRule,
) -> [FlexTensor; 2] {
    let (tensors, bias) = prepared::<E>(tensors);
    let ([batch, heads, queries, _], value_width) =
        (tensors.query.shape().dims(), tensors.value.shape()[3]);
    let problem = problem(&tensors, bias.as_deref(), rule);
    let mut output = NewHeads::<E>::like(&tensors.query, value_width);
    let mut statistics = vec![0f32; batch * heads * queries];
    forward::forward(&problem, output.heads(), &mut statistics);
    let shape = Shape::from([batch, heads, queries, 1]);
    [output.into_tensor(), FlexTensor::from_data(TensorData::new(statistics, shape))]
}

/// Implements [`Kernels::tiled_attention_backward`](crate::Kernels::tiled_attention_backward), for tensors of
/// `E`. Each gradient has the order of memory of its tensor.
pub(super) fn backward<E: KernelFloat>(
    tensors: &AttentionTensors<FlexTensor>,
    [output, statistics]: &[FlexTensor; 2],
    grad: &FlexTensor,
    rule: &AttentionRule,
) -> [FlexTensor; 3] {
    let (tensors, bias) = prepared::<E>(tensors);
    let [output, grad] = [output, grad].map(with_rows);
    let statistics = statistics.to_contiguous();
    let saved = Saved {
        output: Heads::<E>::new(&output),
        statistics: slice(&statistics),
        grad: Heads::new(&grad),
    };
    let mut grads = [&tensors.query, &tensors.key, &tensors.value]
        .map(|tensor| NewHeads::<E>::like(tensor, tensor.shape()[3]));
    let problem = problem(&tensors, bias.as_deref(), rule);
    backward::backward(&problem, saved, grads.each_mut().map(NewHeads::heads));
    grads.map(NewHeads::into_tensor)
}

/// Returns the tensors with rows of consecutive elements, and the elements of the bias.
fn prepared<E: KernelFloat>(
    tensors: &AttentionTensors<FlexTensor>,
) -> (AttentionTensors<FlexTensor>, Option<Vec<f32>>) {
    let [query, key, value] = [&tensors.query, &tensors.key, &tensors.value].map(with_rows);
    let bias = tensors
        .bias
        .as_ref()
        .map(|bias| slice::<E>(&bias.to_contiguous()).iter().map(|number| number.wide()).collect());
    (AttentionTensors { query, key, value, bias: None }, bias)
}

/// Returns the heads of tensors, and how they are computed.
fn problem<'a, E: KernelFloat>(
    tensors: &'a AttentionTensors<FlexTensor>,
    bias: Option<&'a [f32]>,
    rule: &'a AttentionRule,
) -> Problem<'a, E> {
    let [_, heads, queries, width] = tensors.query.shape().dims();
    let [_, key_heads, keys, value_width] = tensors.value.shape().dims();
    Problem {
        sizes: Sizes { heads, group: heads / key_heads, queries, keys, width, value_width },
        query: Heads::new(&tensors.query),
        key: Heads::new(&tensors.key),
        value: Heads::new(&tensors.value),
        bias,
        rule,
    }
}
