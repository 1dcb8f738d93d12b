//! A linear layer with bias, activation and low-rank adapter as one operation.
//!
//! The operation saves its input, the input's product with the first factor of the adapter, and, for an
//! activation, the result before it. Dropout of the adapter's input is generated again in backward. The weight and the other parameters are views of gather buffers or
//! parameters themselves, and take no memory of their own.

mod backward;
mod forward;
mod matrices;
mod shared_input;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Tensor};
use fsdp_kernels::{LinearActivation, Tracked};

use self::forward::record;
use self::matrices::{in_shape, rows};
pub(crate) use self::shared_input::SharedInput;
use super::arguments::{Taken, check_dtype, take_all};
use super::error::KernelError;
use crate::backend::model_backend::{FloatTensor, ModelBackend, with_backend};
use crate::module::{AdaptedWeight, Mask, RunningForward};

/// Parameters of a linear layer.
#[derive(Clone, Debug)]
pub(crate) struct LinearParams {
    pub(crate) weight: AdaptedWeight,
    /// `[outputs]`
    pub(crate) bias: Option<Tensor<1>>,
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
    let LinearParams { weight: AdaptedWeight { base, adapter, reduce_dtype }, bias } = params;
    let matrices = || {
        let factors = adapter.iter().flat_map(|adapter| [&adapter.a, &adapter.b]);
        std::iter::once(base).chain(factors)
    };
    let agrees = matrices()
        .all(|matrix| (matrix.device(), matrix.dtype()) == (device.clone(), dtype))
        && bias.iter().all(|bias| (bias.device(), bias.dtype()) == (device.clone(), dtype));
    let has_elements = input.shape().num_elements() > 0
        && matrices().all(|matrix| matrix.shape().num_elements() > 0);
    if !agrees || !has_elements {
        return None;
    }
    let rule = Rule {
        activation,
        adapter: adapter.as_ref().map(|adapter| LowRankRule {
            scale: adapter.scale,
            dropout: adapter.dropout.as_ref().map(|mask| RunningForward::mask(mask, &input.dims())),
        }),
        has_bias: bias.is_some(),
        gradient_dtype: *reduce_dtype,
    };
    let output: Result<Tensor<D>, KernelError> = with_backend!(device, |B, inner| {
        check_dtype::<B>(&inner, dtype).and_then(|()| {
            let matrices = matrices().map(|matrix| matrix.clone().into_dispatch());
            let bias = bias.iter().map(|bias| bias.clone().into_dispatch());
            let input = std::iter::once(input.clone().into_dispatch());
            let taken = take_all::<B>(input.chain(matrices).chain(bias));
            let output = taken.and_then(|tensors| apply::<B>(tensors, &rule, shared));
            let other = || KernelError::OtherDevice { device: format!("{device:?}") };
            Ok(Tensor::from_dispatch(B::into_dispatch(output.ok_or_else(other)?)))
        })
    });
    output.ok()
}

/// How a linear layer is computed. Its tensors are, in order: the input, the weight, both factors of the
/// adapter, if there is one, and the bias, if there is one.
#[derive(Clone, Copy, Debug)]
struct Rule {
    activation: LinearActivation,
    /// Rule of the adapter, if there is one.
    adapter: Option<LowRankRule>,
    has_bias: bool,
    /// Dtype of the gradients of the parameters; `None` for that of the parameters.
    gradient_dtype: Option<DType>,
}

/// How an adapter is computed.
#[derive(Clone, Copy, Debug)]
struct LowRankRule {
    /// Factor of the product of its factors.
    scale: f64,
    /// Mask of its input, if elements of it are dropped.
    dropout: Option<Mask>,
}

/// The parameters of a layer by name.
#[derive(Clone, Debug)]
struct Params<T> {
    weight: T,
    /// The factors of the adapter, and its rule.
    low_rank: Option<([T; 2], LowRankRule)>,
    bias: Option<T>,
}

impl<T> Params<T> {
    /// Returns the parameters of the list that [`Rule`] describes, without the input.
    fn from_list(params: impl IntoIterator<Item = T>, rule: &Rule) -> Self {
        let mut params = params.into_iter();
        let mut next = || params.next().expect("the parameters that the rule names");
        let weight = next();
        let low_rank = rule.adapter.map(|adapter| ([next(), next()], adapter));
        let bias = rule.has_bias.then(next);
        Self { weight, low_rank, bias }
    }
}

/// The products before an activation.
#[derive(Clone, Debug)]
struct Before<T> {
    products: T,
    /// Whether the bias, if there is one, was added to them.
    has_bias: bool,
}

/// Applies the layer to the tensors that the rule describes.
fn apply<B: ModelBackend>(
    tensors: Taken<B>,
    rule: &Rule,
    shared: Option<&SharedInput>,
) -> Option<FloatTensor<B>> {
    let (tensors, context) = match tensors {
        Taken::Plain(tensors) => {
            let mut tensors = tensors.into_iter();
            let input = tensors.next()?;
            let shape = input.shape();
            let params = Params::from_list(tensors, rule);
            let results = forward::forward::<B>(rows::<B>(input), &params, rule.activation);
            return Some(FloatTensor::Plain(in_shape::<B>(results.output, shape)));
        }
        Taken::Autodiff(tensors, context) => (tensors, context),
    };
    let output = match tensors.len() {
        2 => record_list::<B, 2>(tensors, rule, shared),
        3 => record_list::<B, 3>(tensors, rule, shared),
        4 => record_list::<B, 4>(tensors, rule, shared),
        _ => record_list::<B, 5>(tensors, rule, shared),
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
