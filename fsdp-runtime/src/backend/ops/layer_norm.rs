//! Layer normalization as one operation, which saves its input, its weight and two numbers for each
//! row.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::tensor::{DType, Shape, Tensor};

use super::arguments::check_dtype;
use super::error::KernelError;
use crate::backend::kernels::{Kernels, SavedLayerNorm};
use crate::backend::model_backend::{
    AutodiffContext, FloatTensor, ModelBackend, is_flex, with_backend,
};
use crate::backend::tensor::{Float, Tracked};

/// Normalizes the rows of a tensor, and records the operation for backward if a tensor is tracked.
/// Returns `None` where Burn's own operations must do it: for devices without kernels, dtypes that the
/// kernels do not take, tensors of several dtypes or devices, and tensors without elements.
pub(crate) fn layer_norm_tracked<const D: usize>(
    x: &Tensor<D>,
    gamma: &Tensor<1>,
    beta: Option<&Tensor<1>>,
    epsilon: f64,
) -> Option<Tensor<D>> {
    let (device, dtype) = (x.device(), x.dtype());
    let params = || std::iter::once(gamma).chain(beta);
    if is_flex(&device) && dtype != DType::F32
        || params().any(|param| param.dtype() != dtype || param.device() != device)
        || x.shape().num_elements() == 0
    {
        return None;
    }
    let other = || KernelError::OtherDevice { device: format!("{device:?}") };
    let output: Result<Tensor<D>, KernelError> = with_backend!(device, |B, inner| {
        check_dtype::<B>(&inner, dtype).and_then(|()| {
            let take = |tensor| B::from_dispatch(tensor).ok_or_else(other);
            let input = take(x.clone().into_dispatch())?;
            let params = params().map(|param| take(param.clone().into_dispatch()));
            let params = params.collect::<Result<Vec<_>, _>>()?;
            let output = normalize::<B>(input, params, epsilon as f32).ok_or_else(other)?;
            Ok(Tensor::from_dispatch(B::into_dispatch(output)))
        })
    });
    output.ok()
}

/// Normalizes the rows of `x`. `params` has the weight, and the bias if there is one. Returns `None` if
/// some of the tensors are on an autodiff device and others are not.
fn normalize<B: ModelBackend>(
    x: FloatTensor<B>,
    params: Vec<FloatTensor<B>>,
    epsilon: f32,
) -> Option<FloatTensor<B>> {
    match x {
        FloatTensor::Plain(x) => {
            let plain = params.into_iter().map(|param| match param {
                FloatTensor::Plain(param) => Some(param),
                FloatTensor::Autodiff(..) => None,
            });
            let [y, _] = forward::<B>(x, plain.collect::<Option<Vec<_>>>()?, epsilon);
            Some(FloatTensor::Plain(y))
        }
        FloatTensor::Autodiff(x, context) => {
            let tracked = params.into_iter().map(|param| match param {
                FloatTensor::Autodiff(param, _) => Some(param),
                FloatTensor::Plain(_) => None,
            });
            let tracked = tracked.collect::<Option<Vec<_>>>()?;
            Some(record::<B>(x, tracked, epsilon, context))
        }
    }
}

/// Returns the normalized rows, and the mean and inverse standard deviation of each. Nothing is lowered.
fn forward<B: ModelBackend>(x: Float<B>, params: Vec<Float<B>>, epsilon: f32) -> [Float<B>; 2] {
    let (shape, dtype) = (x.shape(), x.dtype());
    let rows = shape.num_elements() / params[0].shape().num_elements();
    let outputs = vec![(shape, dtype), (Shape::from([rows, 2]), DType::F32)];
    let inputs = std::iter::once(x).chain(params).collect();
    let outputs = B::defer(inputs, outputs, move |buffers| {
        let mut buffers = buffers.into_iter();
        let mut next = || buffers.next();
        let (x, gamma) = (next().expect("the input"), next().expect("the weight"));
        B::Raw::layer_norm(x, gamma, next(), epsilon).into()
    });
    <[_; 2]>::try_from(outputs).expect("`defer` returns one tensor for each output")
}

/// Normalizes the rows and records that as one autodiff operation.
fn record<B: ModelBackend>(
    x: Tracked<B>,
    params: Vec<Tracked<B>>,
    epsilon: f32,
    context: AutodiffContext,
) -> FloatTensor<B> {
    let (x, x_node) = x.into_parts();
    let (params, mut nodes): (Vec<_>, Vec<_>) =
        params.into_iter().map(Tracked::<B>::into_parts).unzip();
    let gamma = params[0].clone();
    let [y, stats] = forward::<B>(x.clone(), params, epsilon);
    let saved = SavedLayerNorm { x, gamma, stats };
    let beta_node = (nodes.len() == 2).then(|| nodes.pop()).flatten();
    let gamma_node = nodes.pop().expect("the weight's node");
    let y = match beta_node {
        Some(beta_node) => finish::<B, 3>([x_node, gamma_node, beta_node], saved, y),
        None => finish::<B, 2>([x_node, gamma_node], saved, y),
    };
    FloatTensor::Autodiff(y, context)
}

/// Records the operation with these parents.
fn finish<B: ModelBackend, const N: usize>(
    nodes: [NodeGuard; N],
    saved: SavedLayerNorm<Float<B>>,
    y: Float<B>,
) -> Tracked<B> {
    let op = Backward::<B, N>::prepare::<NoCheckpointing>(LayerNorm, nodes);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(saved, y),
        OpsKind::UnTracked(op) => op.finish(y),
    }
}

/// Backward of a layer normalization. Its parents are the input, the weight, and the bias if there is
/// one.
#[derive(Debug)]
struct LayerNorm;

impl<B: ModelBackend, const N: usize> Backward<B, N> for LayerNorm {
    type State = SavedLayerNorm<Float<B>>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let SavedLayerNorm { x, gamma, stats } = ops.state;
        let like = |tensor: &Float<B>| (tensor.shape(), tensor.dtype());
        let outputs = vec![like(&x), like(&gamma), like(&gamma)];
        let found = B::defer(vec![x, gamma, stats, grad], outputs, |buffers| {
            let [x, gamma, stats, grad] = <[_; 4]>::try_from(buffers).expect("all four inputs");
            B::Raw::layer_norm_backward(SavedLayerNorm { x, gamma, stats }, grad).into()
        });
        for (parent, grad) in ops.parents.into_iter().zip(found) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}
