//! Layer normalization as one operation, which saves its input and gamma for backward.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;
use fsdp_kernels::{Float, Kernels, Tracked};

use super::arguments::{check_dtype, has_row_kernels, register_gradients};
use super::error::KernelError;
use crate::backend::model_backend::{FloatTensor, ModelBackend, with_backend};

/// Normalises the rows of the last dimension, and records it for backward if a tensor is tracked.
///
/// Returns `None` for devices without kernels, for dtypes that the kernels of the device do not take,
/// for tensors without elements, and if the three tensors do not agree in device, dtype and length of a
/// row.
pub(crate) fn layer_norm_tracked<const D: usize>(
    input: &Tensor<D>,
    gamma: &Tensor<1>,
    beta: Option<&Tensor<1>>,
    epsilon: f64,
) -> Option<Tensor<D>> {
    let (device, dtype, len) = (input.device(), input.dtype(), input.dims()[D - 1]);
    let agrees = |param: &Tensor<1>| {
        param.dims() == [len] && param.dtype() == dtype && param.device() == device
    };
    let params: Vec<&Tensor<1>> = std::iter::once(gamma).chain(beta).collect();
    if !has_row_kernels(input) || !params.iter().copied().all(agrees) {
        return None;
    }
    let output: Result<Tensor<D>, KernelError> = with_backend!(device, |B, inner| {
        check_dtype::<B>(&inner, dtype).and_then(|()| {
            let other = || KernelError::OtherDevice { device: format!("{device:?}") };
            let params = params.iter().map(|&param| param.clone().into_dispatch());
            let tensors = std::iter::once(input.clone().into_dispatch()).chain(params);
            let values: Option<Vec<_>> = tensors.map(B::from_dispatch).collect();
            let value = apply::<B>(values.ok_or_else(other)?, epsilon as f32);
            Ok(Tensor::from_dispatch(B::into_dispatch(value.ok_or_else(other)?)))
        })
    });
    output.ok()
}

/// Applies layer normalization to `tensors`: the input, gamma and, if there is one, beta. Returns
/// `None` if only some of the tensors are on an autodiff device.
fn apply<B: ModelBackend>(tensors: Vec<FloatTensor<B>>, epsilon: f32) -> Option<FloatTensor<B>> {
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
        return Some(FloatTensor::Plain(forward::<B>(plain, epsilon)));
    };
    if !plain.is_empty() {
        return None;
    }
    let output = match <[_; 3]>::try_from(autodiff) {
        Ok(tensors) => record::<B, 3>(tensors, epsilon),
        Err(tensors) => record::<B, 2>(<[_; 2]>::try_from(tensors).ok()?, epsilon),
    };
    Some(FloatTensor::Autodiff(output, context))
}

/// Normalises the first tensor by the others without lowering them.
fn forward<B: ModelBackend>(tensors: Vec<Float<B>>, epsilon: f32) -> Float<B> {
    let output = (tensors[0].shape(), tensors[0].dtype());
    let mut outputs = B::defer(tensors, vec![output], move |buffers| {
        let mut buffers = buffers.into_iter();
        let mut next = || buffers.next().expect("the input and gamma");
        let (input, gamma) = (next(), next());
        vec![B::Raw::layer_norm(input, gamma, buffers.next(), epsilon)]
    });
    outputs.pop().expect("`defer` returns one tensor for each output")
}

/// Returns the gradients of the input, of gamma and of beta, given that of the result. Nothing is
/// lowered.
fn backward<B: ModelBackend>(state: State<B>, grad: Float<B>) -> Vec<Float<B>> {
    let State { input, gamma, epsilon } = state;
    let (shape, dtype) = (input.shape(), input.dtype());
    let outputs = vec![(shape, dtype), (gamma.shape(), dtype), (gamma.shape(), dtype)];
    B::defer(vec![input, gamma, grad], outputs, move |buffers| {
        let [input, gamma, grad] = <[_; 3]>::try_from(buffers).expect("three inputs");
        B::Raw::layer_norm_backward(input, gamma, grad, epsilon).into()
    })
}

/// Normalises the first tensor by the others, and records it as one autodiff operation.
fn record<B: ModelBackend, const N: usize>(tensors: [Tracked<B>; N], epsilon: f32) -> Tracked<B> {
    let nodes = tensors.each_ref().map(|tensor| tensor.node());
    let values = Vec::from(tensors.map(Tracked::<B>::into_primitive));
    let state = State { input: values[0].clone(), gamma: values[1].clone(), epsilon };
    let output = forward::<B>(values, epsilon);
    let op = Backward::<B, N>::prepare::<NoCheckpointing>(LayerNorm, nodes);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => op.finish(state, output),
        OpsKind::UnTracked(op) => op.finish(output),
    }
}

/// Tensors that the gradients depend on.
///
/// Gamma is the tensor of the forward. If it is a view of a gather buffer, backward reads the
/// values that the buffer holds at that time.
#[derive(Clone, Debug)]
struct State<B: ModelBackend> {
    input: Float<B>,
    gamma: Float<B>,
    epsilon: f32,
}

/// Backward of layer normalization. The parents are the input, gamma, and beta if there is one.
#[derive(Debug)]
struct LayerNorm;

impl<B: ModelBackend, const N: usize> Backward<B, N> for LayerNorm {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        register_gradients::<B, _, _, N>(ops, grads, |state, grad| {
            backward::<B>(state, grad).into_iter().map(Some)
        });
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{DType, Device, Tensor};

    use super::layer_norm_tracked;
    use crate::backend::ops::softmax_tracked;

    fn tensor<const D: usize>(shape: [usize; D], dtype: DType) -> Tensor<D> {
        Tensor::zeros(shape, (&Device::flex(), dtype))
    }

    fn has_kernel(x: Tensor<2>, gamma: Tensor<1>, beta: Option<Tensor<1>>) -> bool {
        layer_norm_tracked(&x, &gamma, beta.as_ref(), 1e-5).is_some()
    }

    #[test]
    fn the_kernels_are_used_where_there_are_kernels() {
        let (x, row) = (tensor([2, 3], DType::F32), tensor([3], DType::F32));
        assert!(has_kernel(x.clone(), row.clone(), None));
        assert!(has_kernel(x.clone(), row.clone(), Some(row.clone())));
        let [tracked, weight] =
            [Tensor::from_inner(x.clone()), Tensor::from_inner(row.clone().unsqueeze())];
        let weight = weight.squeeze_dim::<1>(0);
        assert!(has_kernel(tracked.clone(), weight.clone(), None));
        assert!(softmax_tracked(&x).is_some() && softmax_tracked(&tracked).is_some());

        for dtype in [DType::F64, DType::F16, DType::BF16] {
            let (x, other) = (tensor([2, 3], dtype), tensor([3], dtype));
            assert!(!has_kernel(x.clone(), other.clone(), None), "{dtype:?}");
            assert!(softmax_tracked(&x).is_none(), "{dtype:?}");
            assert!(!has_kernel(tensor([2, 3], DType::F32), other, None), "{dtype:?}");
        }
        assert!(!has_kernel(x.clone(), weight.clone(), None), "a tracked parameter alone");
        assert!(!has_kernel(tracked, row.clone(), None), "a tracked input alone");
        assert!(!has_kernel(x, row.clone(), Some(weight)), "a tracked bias alone");
        assert!(!has_kernel(tensor([2, 4], DType::F32), row.clone(), None), "another length");
        assert!(!has_kernel(tensor([0, 3], DType::F32), row, None), "no rows");
        assert!(softmax_tracked(&tensor([2, 0], DType::F32)).is_none(), "no elements");
    }
}
