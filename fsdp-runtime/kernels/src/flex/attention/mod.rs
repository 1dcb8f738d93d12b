//! Attention in tiles of the score matrix, for f32, bf16 and f16, computed in f32. A tile is computed, used and
//! overwritten, in the forward pass and again in the backward pass. Tiles without a key that some query of them
//! sees do not exist.
//!
//! The forward pass has a task for each tile of queries of each head, and the backward pass one for each head of
//! the keys, or more where there are many threads. The bits depend only on the tensors, not on the number of
//! threads.

mod backward;
mod forward;
mod problem;
mod wide;

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
use burn::tensor::{Element, Shape, TensorData};

use self::backward::Saved;
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

/// Implements [`Kernels::tiled_attention`](crate::Kernels::tiled_attention), for tensors of `E`.
pub(super) fn forward<E: KernelFloat>(
    tensors: &AttentionTensors<FlexTensor>,
    rule: &AttentionRule,
) -> [FlexTensor; 2] {
    let tensors = tensors.each_ref().map(FlexTensor::to_contiguous);
    let ([batch, heads, queries, _], value_width) =
        (tensors.query.shape().dims(), tensors.value.shape()[3]);
    let bias = bias::<E>(&tensors);
    let problem = problem(&tensors, bias.as_deref(), rule);
    let mut output = vec![E::zeroed(); batch * heads * queries * value_width];
    let mut statistics = vec![0f32; batch * heads * queries];
    forward::forward(&problem, batch * heads, &mut output, &mut statistics);
    let shape = Shape::from([batch, heads, queries, value_width]);
    [from_vec(output, shape), from_vec(statistics, Shape::from([batch, heads, queries, 1]))]
}

/// Implements [`Kernels::tiled_attention_backward`](crate::Kernels::tiled_attention_backward), for tensors of
/// `E`.
pub(super) fn backward<E: KernelFloat>(
    tensors: &AttentionTensors<FlexTensor>,
    saved: &[FlexTensor; 2],
    grad: &FlexTensor,
    rule: &AttentionRule,
) -> [FlexTensor; 3] {
    let tensors = tensors.each_ref().map(FlexTensor::to_contiguous);
    let [output, statistics] = saved.each_ref().map(FlexTensor::to_contiguous);
    let grad = grad.to_contiguous();
    let saved =
        Saved { output: slice::<E>(&output), statistics: slice(&statistics), grad: slice(&grad) };
    let shapes = [&tensors.query, &tensors.key, &tensors.value].map(|tensor| tensor.shape());
    let mut grads = shapes.each_ref().map(|shape| vec![E::zeroed(); shape.num_elements()]);
    let [query, key, value] = &mut grads;
    let bias = bias::<E>(&tensors);
    let key_heads = shapes[1][0] * shapes[1][1];
    let problem = problem(&tensors, bias.as_deref(), rule);
    backward::backward(&problem, key_heads, saved, [query, key, value]);
    let mut shapes = shapes.into_iter();
    grads.map(|grad| from_vec(grad, shapes.next().expect("three shapes")))
}

/// Returns the elements of the bias.
fn bias<E: KernelFloat>(tensors: &AttentionTensors<FlexTensor>) -> Option<Vec<f32>> {
    let bias = tensors.bias.as_ref()?;
    Some(slice::<E>(bias).iter().map(|number| number.wide()).collect())
}

/// Returns the slices of contiguous tensors.
fn problem<'a, E: KernelFloat>(
    tensors: &'a AttentionTensors<FlexTensor>,
    bias: Option<&'a [f32]>,
    rule: &'a AttentionRule,
) -> Problem<'a, E> {
    let [_, heads, queries, width] = tensors.query.shape().dims();
    let [_, key_heads, keys, value_width] = tensors.value.shape().dims();
    Problem {
        sizes: Sizes { heads, group: heads / key_heads, queries, keys, width, value_width },
        query: slice(&tensors.query),
        key: slice(&tensors.key),
        value: slice(&tensors.value),
        bias,
        rule,
    }
}

fn from_vec<E: Element>(elements: Vec<E>, shape: Shape) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(elements, shape))
}
