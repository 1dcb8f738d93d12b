//! A linear layer with bias, activation and low-rank adapter as one operation.
//!
//! The operation saves its input, the input's product with the first factor of the adapter, and, for an
//! activation, the result before it. The weight and the other parameters are views of gather buffers or
//! parameters themselves, and take no memory of their own.

mod backward;
mod forward;
mod matrices;
mod shared_input;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Tensor};
use fsdp_kernels::{Float, LinearActivation, Tracked, takes};

use self::forward::record;
use self::matrices::{in_shape, rows};
pub(crate) use self::shared_input::SharedInput;
use super::error::KernelError;
use crate::backend::model_backend::{FloatTensor, ModelBackend, with_backend};

/// Low-rank addition `scale · a · b` to a weight.
#[derive(Clone, Debug)]
pub(crate) struct LowRank {
    /// `[inputs, rank]`
    pub(crate) a: Tensor<2>,
    /// `[rank, outputs]`
    pub(crate) b: Tensor<2>,
    pub(crate) scale: f64,
}

/// Parameters of a linear layer.
#[derive(Clone, Debug)]
pub(crate) struct LinearParams {
    /// `[inputs, outputs]`
    pub(crate) weight: Tensor<2>,
    /// `[outputs]`
    pub(crate) bias: Option<Tensor<1>>,
    pub(crate) low_rank: Option<LowRank>,
    /// Dtype of the gradients of the parameters; `None` for that of the parameters.
    pub(crate) gradient_dtype: Option<DType>,
}

/// Applies a linear layer and an activation, and records them for backward if a tensor is tracked. With a
/// [`SharedInput`], the gradient of the input is added to that of other layers.
///
/// Returns `None` for devices without kernels, for dtypes that the kernels or the device do not take, for
/// tensors without elements, and if the tensors do not agree in device and dtype.
pub(crate) fn linear_tracked<const D: usize>(
    input: &Tensor<D>,
    params: &LinearParams,
    activation: LinearActivation,
    shared: Option<&SharedInput>,
) -> Option<Tensor<D>> {
    let (device, dtype) = (input.device(), input.dtype());
    let LinearParams { weight, bias, low_rank, gradient_dtype } = params;
    let matrices = || {
        let factors = low_rank.iter().flat_map(|low_rank| [&low_rank.a, &low_rank.b]);
        std::iter::once(weight).chain(factors)
    };
    let agrees = matrices()
        .all(|matrix| (matrix.device(), matrix.dtype()) == (device.clone(), dtype))
        && bias.iter().all(|bias| (bias.device(), bias.dtype()) == (device.clone(), dtype));
    let has_elements = input.shape().num_elements() > 0
        && matrices().all(|matrix| matrix.shape().num_elements() > 0);
    if !agrees || !has_elements || !takes(dtype) {
        return None;
    }
    let rule = Rule {
        activation,
        scale: low_rank.as_ref().map(|low_rank| low_rank.scale),
        has_bias: bias.is_some(),
        gradient_dtype: *gradient_dtype,
    };
    let output: Result<Tensor<D>, KernelError> = with_backend!(device, |B, inner| {
        let refused = || KernelError::Dtype { dtype, device: format!("{device:?}") };
        let supported = <B as burn::backend::Backend>::supports_dtype(&inner, dtype);
        let take = |tensor| <B as ModelBackend>::from_dispatch(tensor).ok_or_else(refused);
        supported.then_some(()).ok_or_else(refused).and_then(|()| {
            let matrices = matrices().map(|matrix| matrix.clone().into_dispatch());
            let bias = bias.iter().map(|bias| bias.clone().into_dispatch());
            let input = std::iter::once(input.clone().into_dispatch());
            let tensors = input.chain(matrices).chain(bias).map(take);
            let output = apply::<B>(tensors.collect::<Result<_, _>>()?, &rule, shared);
            Ok(Tensor::from_dispatch(B::into_dispatch(output.ok_or_else(refused)?)))
        })
    });
    output.ok()
}

/// How a linear layer is computed. Its tensors are, in order: the input, the weight, both factors of the
/// adapter, if there is one, and the bias, if there is one.
#[derive(Clone, Copy, Debug)]
struct Rule {
    activation: LinearActivation,
    /// Scale of the adapter, if there is one.
    scale: Option<f64>,
    has_bias: bool,
    /// Dtype of the gradients of the parameters; `None` for that of the parameters.
    gradient_dtype: Option<DType>,
}

/// The parameters of a layer by name.
#[derive(Clone, Debug)]
struct Params<T> {
    weight: T,
    /// The factors of the adapter, and its scale.
    low_rank: Option<([T; 2], f64)>,
    bias: Option<T>,
}

impl<T> Params<T> {
    /// Returns the parameters of the list that [`Rule`] describes, without the input.
    fn from_list(params: impl IntoIterator<Item = T>, rule: &Rule) -> Self {
        let mut params = params.into_iter();
        let mut next = || params.next().expect("the parameters that the rule names");
        let weight = next();
        let low_rank = rule.scale.map(|scale| ([next(), next()], scale));
        let bias = rule.has_bias.then(next);
        Self { weight, low_rank, bias }
    }
}

/// Applies the layer. Returns `None` if some tensors are of an autodiff device and some are not.
fn apply<B: ModelBackend>(
    tensors: Vec<FloatTensor<B>>,
    rule: &Rule,
    shared: Option<&SharedInput>,
) -> Option<FloatTensor<B>> {
    let (mut plain, mut autodiff, mut context) = (Vec::new(), Vec::new(), None);
    for tensor in tensors {
        match tensor {
            FloatTensor::Plain(tensor) => plain.push(tensor),
            FloatTensor::Autodiff(tensor, of_tensor) => {
                context.get_or_insert(of_tensor);
                autodiff.push(tensor);
            }
        }
    }
    let Some(context) = context else {
        let mut tensors = plain.into_iter();
        let input = tensors.next()?;
        let shape = input.shape();
        let params = Params::from_list(tensors, rule);
        let results = forward::forward::<B>(rows::<B>(input), &params, rule.activation);
        return Some(FloatTensor::Plain(in_shape::<B>(results.output, shape)));
    };
    if !plain.is_empty() {
        return None;
    }
    let output = match autodiff.len() {
        2 => record_list::<B, 2>(autodiff, rule, shared),
        3 => record_list::<B, 3>(autodiff, rule, shared),
        4 => record_list::<B, 4>(autodiff, rule, shared),
        _ => record_list::<B, 5>(autodiff, rule, shared),
    };
    Some(FloatTensor::Autodiff(output?, context))
}

/// Records the layer of a list of `N` tensors.
fn record_list<B: ModelBackend, const N: usize>(
    tensors: Vec<Tracked<B>>,
    rule: &Rule,
    shared: Option<&SharedInput>,
) -> Option<Tracked<B>> {
    let tensors = <[Tracked<B>; N]>::try_from(tensors).ok()?;
    let shared = shared.and_then(SharedInput::sum::<B>);
    Some(record::<B, N>(tensors, rule, shared))
}

/// The dtype of the gradients of a layer's parameters.
fn gradient_dtype<B: ModelBackend>(grad: &Float<B>, rule: &Rule) -> DType {
    rule.gradient_dtype.unwrap_or_else(|| grad.dtype())
}
