//! The forward pass, and what it saves.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::ops::{Backward, OpsKind};
use burn::tensor::Shape;
use burn_std::Scalar;
use fsdp_kernels::{Float, Kernels, LinearActivation, Tracked};

use super::backward::{Linear, State};
use super::matrices::{Factors, add_product, in_shape, masked, product, rows};
use super::shared_input::GradientSum;
use super::{Before, Params, Rule};
use crate::backend::model_backend::{ModelBackend, Raw};
use crate::backend::ops::saved::Saved;

/// Results of the forward pass, as matrices.
pub(super) struct Results<T> {
    pub(super) output: T,
    /// The products before the activation, if it is not the identity.
    before: Option<Before<T>>,
    /// The product of the adapter's input and its first factor, times its scale.
    low: Option<T>,
}

/// Applies the layer to a matrix of rows.
pub(super) fn forward<B: ModelBackend>(
    input: Float<B>,
    params: &Params<Float<B>>,
    activation: LinearActivation,
) -> Results<Float<B>> {
    let dtype = input.dtype();
    let has_bias = Raw::<B>::by_library(&input.device());
    if has_bias && params.low_rank.is_none() {
        let factors = [input, params.weight.clone()];
        let (output, products) = biased_product::<B>(factors, params.bias.clone(), activation);
        let before = products.map(|products| Before { products, has_bias });
        return Results { output, before, low: None };
    }
    let factors = [input.clone(), params.weight.clone()];
    let mut products = match has_bias {
        true => biased_product::<B>(factors, params.bias.clone(), LinearActivation::Identity).0,
        false => product::<B>(factors, [false; 2], dtype),
    };
    let low = params.low_rank.as_ref().map(|([a, _], rule)| {
        let input = masked::<B>(input, rule.dropout);
        let low = product::<B>([input, a.clone()], [false; 2], dtype);
        B::float_mul_scalar(low, Scalar::from(rule.scale))
    });
    if let (Some(low), Some(([_, b], _))) = (&low, &params.low_rank) {
        let matrices = [low.clone(), b.clone()];
        let factors = Factors { matrices, transposed: false, mask: None };
        products = add_product::<B>(products, factors);
    }
    let kept = (activation != LinearActivation::Identity)
        .then(|| Before { products: products.clone(), has_bias });
    let bias = params.bias.clone().filter(|_| !has_bias);
    Results { output: biased::<B>(products, bias, activation), before: kept, low }
}

/// Returns `activation(a · b + bias)`, and the sums before an activation that is not the identity.
fn biased_product<B: ModelBackend>(
    factors: [Float<B>; 2],
    bias: Option<Float<B>>,
    activation: LinearActivation,
) -> (Float<B>, Option<Float<B>>) {
    let shape = Shape::from([factors[0].shape()[0], factors[1].shape()[1]]);
    let count = if activation == LinearActivation::Identity { 1 } else { 2 };
    let outputs = vec![(shape, factors[0].dtype()); count];
    let tensors = factors.into_iter().chain(bias).collect();
    let outputs = B::defer(tensors, outputs, move |buffers| {
        let mut buffers = buffers.into_iter();
        let mut next = || buffers.next().expect("two matrices");
        let factors = [next(), next()];
        let (output, sums) = Raw::<B>::biased_product(factors, buffers.next(), activation);
        std::iter::once(output).chain(sums).collect()
    });
    let mut outputs = outputs.into_iter();
    (outputs.next().expect("`defer` returns one tensor for each output"), outputs.next())
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
    let Results { output, before, low } = forward::<B>(input.clone(), &params, rule.activation);
    let output = in_shape::<B>(output, shape.clone());
    let op = Backward::<B, N>::prepare::<NoCheckpointing>(Linear, nodes);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => {
            // Only gradients of a weight and of a first factor read the input.
            let reads_input = needed[1] || rule.adapter.is_some();
            let products = before.iter().map(|before| &before.products);
            let saved = Saved::tensors::<B>(products.chain(&low));
            let input = reads_input.then_some(input);
            let state =
                State { input, params, before, low, shape, needed, rule: *rule, shared, saved };
            op.finish(state, output)
        }
        OpsKind::UnTracked(op) => op.finish(output),
    }
}
