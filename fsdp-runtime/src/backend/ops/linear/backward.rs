//! The backward pass.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::tensor::{DType, Shape};
use burn_std::Scalar;
use fsdp_kernels::{Float, Kernels, LinearActivation};

use super::matrices::{Factors, in_shape, masked, product, rows, sum_of_products};
use super::shared_input::GradientSum;
use super::{Before, Params, Rule};
use crate::backend::model_backend::{ModelBackend, Raw, cast_model};
use crate::backend::ops::arguments::register_gradients;
use crate::backend::ops::saved::Saved;

/// Tensors that the gradients depend on.
///
/// The parameters are the tensors of the forward. Where they are views of a gather buffer, backward reads
/// the values that the buffer holds at that time.
#[derive(Clone, Debug)]
pub(super) struct State<B: ModelBackend> {
    /// Rows of the input, if a gradient depends on them.
    pub(super) input: Option<Float<B>>,
    pub(super) params: Params<Float<B>>,
    /// The products before the activation, if it is not the identity.
    pub(super) before: Option<Before<Float<B>>>,
    /// The product of the adapter's input and its first factor, times its scale.
    pub(super) low: Option<Float<B>>,
    /// Shape of the input.
    pub(super) shape: Shape,
    /// Whether each tensor of the list of the [`Rule`] is tracked.
    pub(super) needed: Vec<bool>,
    pub(super) rule: Rule,
    /// Sum that the gradient of the input is added to, in place of the graph's own.
    pub(super) shared: Option<GradientSum<B>>,
    pub(super) saved: Saved,
}

/// Backward of a linear layer. The parents are the tensors of the list of the [`Rule`].
#[derive(Debug)]
pub(super) struct Linear;

impl<B: ModelBackend, const N: usize> Backward<B, N> for Linear {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        register_gradients::<B, _, _, N>(ops, grads, gradients::<B>);
    }
}

/// Returns the gradients of the tensors of the list, given that of the output. Nothing is lowered.
fn gradients<B: ModelBackend>(state: State<B>, grad: Float<B>) -> Vec<Option<Float<B>>> {
    let State { input, params, before, low, shape, needed, rule, shared, saved: _saved } = state;
    let grad =
        before_activation::<B>(rows::<B>(grad), before, params.bias.clone(), rule.activation);
    let dtype = rule.gradient_dtype.unwrap_or_else(|| grad.dtype());
    let mut results = vec![None; needed.len()];
    // The gradient of `low`, times the adapter's scale.
    let of_low = params.low_rank.as_ref().map(|([_, b], rule)| {
        let product = product::<B>([grad.clone(), b.clone()], [false, true], grad.dtype());
        B::float_mul_scalar(product, Scalar::from(rule.scale))
    });
    let mask = rule.adapter.and_then(|adapter| adapter.dropout);
    let bias = rule.has_bias.then(|| needed.len() - 1).filter(|&at| needed[at]);
    match (&input, bias, needed[1]) {
        (Some(input), Some(bias), true) => {
            let [of_weight, of_bias] = affine_gradients::<B>(input.clone(), grad.clone(), dtype);
            (results[1], results[bias]) = (Some(of_weight), Some(of_bias));
        }
        (input, bias, needs_weight) => {
            if let Some(bias) = bias {
                results[bias] = Some(column_sums::<B>(grad.clone(), dtype));
            }
            if let (Some(input), true) = (input, needs_weight) {
                let factors = [input.clone(), grad.clone()];
                results[1] = Some(product::<B>(factors, [true, false], dtype));
            }
        }
    }
    if let (Some(input), Some(of_low), Some(low)) = (&input, &of_low, low) {
        let (of_a, of_b) = (needed[2], needed[3]);
        results[2] = of_a.then(|| {
            let input = masked::<B>(input.clone(), mask);
            product::<B>([input, of_low.clone()], [true, false], dtype)
        });
        results[3] = of_b.then(|| product::<B>([low, grad.clone()], [true, false], dtype));
    }
    drop(input);
    if needed[0] {
        let of = |matrices, mask| Factors { matrices, transposed: true, mask };
        let mut factors = vec![of([grad, params.weight], None)];
        if let (Some(of_low), Some(([a, _], _))) = (of_low, params.low_rank) {
            factors.push(of([of_low, a], mask));
        }
        results[0] = match shared {
            Some(sum) => sum.add(factors),
            None => Some(in_shape::<B>(sum_of_products::<B>(None, factors), shape)),
        };
    }
    results
}

/// Returns the gradient of the products before the activation. Without `before` the activation is the
/// identity.
fn before_activation<B: ModelBackend>(
    grad: Float<B>,
    before: Option<Before<Float<B>>>,
    bias: Option<Float<B>>,
    activation: LinearActivation,
) -> Float<B> {
    let Some(Before { products: product, has_bias }) = before else { return grad };
    let bias = bias.filter(|_| !has_bias);
    let output = (grad.shape(), grad.dtype());
    let tensors = [product, grad].into_iter().chain(bias).collect();
    let mut outputs = B::defer(tensors, vec![output], move |buffers| {
        let mut buffers = buffers.into_iter();
        let mut next = || buffers.next().expect("product and gradient");
        let (product, grad) = (next(), next());
        vec![B::Raw::biased_backward(product, buffers.next(), grad, activation)]
    });
    outputs.pop().expect("`defer` returns one tensor for each output")
}

/// Returns the gradients of weight and bias in `dtype`.
fn affine_gradients<B: ModelBackend>(
    input: Float<B>,
    grad: Float<B>,
    dtype: DType,
) -> [Float<B>; 2] {
    if !Raw::<B>::by_library(&grad.device()) {
        let of_weight = product::<B>([input, grad.clone()], [true, false], dtype);
        return [of_weight, column_sums::<B>(grad, dtype)];
    }
    let columns = grad.shape()[1];
    let weight = Shape::from([input.shape()[1], columns]);
    let outputs = vec![(weight, dtype), (Shape::from([columns]), dtype)];
    let outputs = B::defer(vec![input, grad], outputs, move |buffers| {
        let [input, grad] = <[_; 2]>::try_from(buffers).expect("two matrices");
        Raw::<B>::affine_gradients(input, grad, dtype).into()
    });
    <[_; 2]>::try_from(outputs).expect("`defer` returns one tensor for each output")
}

/// Returns the sums of the columns in `dtype`.
fn column_sums<B: ModelBackend>(grad: Float<B>, dtype: DType) -> Float<B> {
    let output = (Shape::from([grad.shape()[1]]), DType::F32);
    let mut sums = B::defer(vec![grad], vec![output], |buffers| {
        buffers.into_iter().map(B::Raw::column_sums).collect()
    });
    cast_model::<B>(sums.pop().expect("`defer` returns one tensor for each output"), dtype)
}
