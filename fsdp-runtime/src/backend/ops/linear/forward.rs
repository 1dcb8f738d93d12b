//! The forward pass, and what it saves.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::ops::{Backward, OpsKind};
use burn_std::Scalar;
use fsdp_kernels::{Float, Kernels, LinearActivation, Tracked};

use super::backward::{Linear, State};
use super::matrices::{add_product, in_shape, rows};
use super::shared_input::GradientSum;
use super::{Params, Rule};
use crate::backend::model_backend::ModelBackend;
use crate::backend::ops::saved::Saved;

/// Results of the forward pass, as matrices.
pub(super) struct Results<T> {
    pub(super) output: T,
    /// The products before bias and activation, if the activation is not the identity.
    product: Option<T>,
    /// The product of the input and the first factor of the adapter, times the adapter's scale.
    low: Option<T>,
}

/// Applies the layer to a matrix of rows.
pub(super) fn forward<B: ModelBackend>(
    input: Float<B>,
    params: &Params<Float<B>>,
    activation: LinearActivation,
) -> Results<Float<B>> {
    let mut product = B::float_matmul(input.clone(), params.weight.clone());
    let low = params.low_rank.as_ref().map(|([a, _], scale)| {
        B::float_mul_scalar(B::float_matmul(input, a.clone()), Scalar::from(*scale))
    });
    if let (Some(low), Some(([_, b], _))) = (&low, &params.low_rank) {
        product = add_product::<B>(product, [low.clone(), b.clone()]);
    }
    let kept = (activation != LinearActivation::Identity).then(|| product.clone());
    Results { output: biased::<B>(product, params.bias.clone(), activation), product: kept, low }
}

/// Returns the activation of a product with its bias, without lowering tensors.
fn biased<B: ModelBackend>(
    product: Float<B>,
    bias: Option<Float<B>>,
    activation: LinearActivation,
) -> Float<B> {
    if activation == LinearActivation::Identity && bias.is_none() {
        return product;
    }
    let output = (product.shape(), product.dtype());
    let tensors = std::iter::once(product).chain(bias).collect();
    let mut outputs = B::defer(tensors, vec![output], move |buffers| {
        let mut buffers = buffers.into_iter();
        let product = buffers.next().expect("the product");
        vec![B::Raw::biased(product, buffers.next(), activation)]
    });
    outputs.pop().expect("`defer` returns one tensor for each output")
}

/// Applies the layer, and records it as one autodiff operation.
pub(super) fn record<B: ModelBackend, const N: usize>(
    tensors: [Tracked<B>; N],
    rule: &Rule,
    shared: Option<GradientSum<B>>,
) -> Tracked<B> {
    let nodes = tensors.each_ref().map(|tensor| tensor.node());
    let needed = tensors.each_ref().map(|tensor| tensor.is_tracked()).to_vec();
    let mut tensors = tensors.map(Tracked::<B>::into_primitive).into_iter();
    let input = tensors.next().expect("the input");
    let shape = input.shape();
    let (input, params) = (rows::<B>(input), Params::from_list(tensors, rule));
    let Results { output, product, low } = forward::<B>(input.clone(), &params, rule.activation);
    let output = in_shape::<B>(output, shape.clone());
    let op = Backward::<B, N>::prepare::<NoCheckpointing>(Linear, nodes);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => {
            // Only gradients of a weight and of a first factor read the input.
            let reads_input = needed[1] || rule.scale.is_some();
            let saved = Saved::tensors::<B>(product.iter().chain(&low));
            let input = reads_input.then_some(input);
            let state =
                State { input, params, product, low, shape, needed, rule: *rule, shared, saved };
            op.finish(state, output)
        }
        OpsKind::UnTracked(op) => op.finish(output),
    }
}
