//! Attention as one operation, which saves its inputs, its output and one number for each query.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::{DType, Shape, Tensor};
use fsdp_kernels::{AttentionRule, AttentionTensors, Float, Kernels, Tracked};

use super::arguments::register_gradients;
use super::error::KernelError;
use super::saved::Saved;
use crate::backend::model_backend::{FloatTensor, ModelBackend, with_backend};

/// Applies attention, and records it for backward if a tensor is tracked. `bias` is added to the scores
/// of each key, `[batch, keys]`, and has no gradient.
///
/// Returns `None` for devices without kernels, for dtypes that the device does not support, for tensors
/// without elements, and if query, key and value do not agree in device and dtype.
pub(crate) fn attention_tracked(
    [query, key, value]: [&Tensor<4>; 3],
    bias: Option<Tensor<2>>,
    rule: &AttentionRule,
) -> Option<Tensor<4>> {
    let (device, dtype) = (query.device(), query.dtype());
    let agrees = |tensor: &&Tensor<4>| {
        let has_elements = tensor.shape().num_elements() > 0;
        has_elements && tensor.dtype() == dtype && tensor.device() == device
    };
    if ![query, key, value].iter().all(agrees) {
        return None;
    }
    let output: Result<Tensor<4>, KernelError> = with_backend!(device, |B, inner| {
        let refused = || KernelError::Dtype { dtype, device: format!("{device:?}") };
        let supported = <B as burn::backend::Backend>::supports_dtype(&inner, dtype);
        let take = |tensor| <B as ModelBackend>::from_dispatch(tensor).ok_or_else(refused);
        supported.then_some(()).ok_or_else(refused).and_then(|()| {
            let tensors = [query, key, value].map(|tensor| tensor.clone().into_dispatch());
            let [query, key, value] = tensors.map(take);
            let bias = bias.map(|bias| take(bias.into_dispatch())).transpose()?;
            let bias = bias.map(FloatTensor::into_inner);
            let output = apply::<B>([query?, key?, value?], bias, rule).ok_or_else(refused)?;
            Ok(Tensor::from_dispatch(B::into_dispatch(output)))
        })
    });
    output.ok()
}

/// Applies attention. Returns `None` if some tensors are of an autodiff device and some are not.
fn apply<B: ModelBackend>(
    tensors: [FloatTensor<B>; 3],
    bias: Option<Float<B>>,
    rule: &AttentionRule,
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
    match context {
        None => {
            let tensors = AttentionTensors::from_vec(plain.into_iter().chain(bias).collect());
            let [output, _] = forward::<B>(tensors, *rule);
            Some(FloatTensor::Plain(output))
        }
        Some(context) => {
            let tensors = <[Tracked<B>; 3]>::try_from(autodiff).ok()?;
            Some(FloatTensor::Autodiff(record::<B>(tensors, bias, *rule), context))
        }
    }
}

/// Returns the output and the row statistics, without lowering the tensors.
fn forward<B: ModelBackend>(
    tensors: AttentionTensors<Float<B>>,
    rule: AttentionRule,
) -> [Float<B>; 2] {
    let ([batch, heads, queries, _], dtype) = (tensors.query.shape().dims(), tensors.query.dtype());
    let width = tensors.value.shape()[3];
    let statistics = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let outputs = vec![
        (Shape::from([batch, heads, queries, width]), dtype),
        (Shape::from([batch, heads, queries, 1]), statistics),
    ];
    let results = B::defer(tensors.into_vec(), outputs, move |buffers| {
        B::Raw::tiled_attention(&AttentionTensors::from_vec(buffers), &rule).into()
    });
    results.try_into().expect("`defer` returns one tensor for each output")
}

/// Returns the gradients of query, key and value, given that of the output, without lowering tensors.
fn backward<B: ModelBackend>(state: State<B>, grad: Float<B>) -> [Float<B>; 3] {
    let State { tensors, results: [output, statistics], rule, saved: _saved } = state;
    let outputs = [&tensors.query, &tensors.key, &tensors.value]
        .map(|tensor| (tensor.shape(), tensor.dtype()));
    let mut inputs = vec![output, statistics, grad];
    inputs.extend(tensors.into_vec());
    let gradients = B::defer(inputs, outputs.into(), move |mut buffers| {
        let tensors = AttentionTensors::from_vec(buffers.split_off(3));
        let [output, statistics, grad] = <[_; 3]>::try_from(buffers).expect("three buffers");
        B::Raw::tiled_attention_backward(&tensors, &[output, statistics], &grad, &rule).into()
    });
    gradients.try_into().expect("`defer` returns one tensor for each output")
}

/// Applies attention and records it as one autodiff operation.
fn record<B: ModelBackend>(
    tensors: [Tracked<B>; 3],
    bias: Option<Float<B>>,
    rule: AttentionRule,
) -> Tracked<B> {
    let nodes = tensors.each_ref().map(|tensor| tensor.node());
    let tensors = tensors.into_iter().map(Tracked::<B>::into_primitive).chain(bias);
    let tensors = AttentionTensors::from_vec(tensors.collect());
    let results = forward::<B>(tensors.clone(), rule);
    let output = results[0].clone();
    let op = Backward::<B, 3>::prepare::<NoCheckpointing>(Attention, nodes);
    match op.compute_bound().stateful() {
        OpsKind::Tracked(op) => {
            let inputs = tensors.clone().into_vec();
            let saved = Saved::tensors::<B>(inputs.iter().chain(&results));
            op.finish(State { tensors, results, rule, saved }, output)
        }
        OpsKind::UnTracked(op) => op.finish(output),
    }
}

/// Inputs and results of attention, and how it is computed.
#[derive(Clone, Debug)]
struct State<B: ModelBackend> {
    tensors: AttentionTensors<Float<B>>,
    /// Output and row statistics.
    results: [Float<B>; 2],
    rule: AttentionRule,
    saved: Saved,
}

/// Backward of attention. The parents are query, key and value.
#[derive(Debug)]
struct Attention;

impl<B: ModelBackend> Backward<B, 3> for Attention {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        register_gradients::<B, _, _, 3>(ops, grads, |state, grad| {
            backward::<B>(state, grad).map(Some)
        });
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{Device, Distribution};

    use super::*;
    use crate::backend::ops::MaskSource;

    const SOURCE: MaskSource = MaskSource { key: [5, 6], counter: [7, 8], prob: 0.3 };

    fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
        tensor.into_data().iter::<f64>().collect()
    }

    fn rule(causal: bool) -> AttentionRule {
        AttentionRule { causal, scale: 0.3, dropout: Some(SOURCE) }
    }

    /// Returns the mask of `[batch, heads, queries, keys]` weights: equal scores, and the unit matrix as
    /// the values.
    fn mask([batch, heads, queries, keys]: [usize; 4], device: &Device, dtype: DType) -> Vec<f64> {
        let options = (device, dtype);
        let [query, key] =
            [queries, keys].map(|length| Tensor::<4>::zeros([batch, heads, length, 2], options));
        let value = Tensor::<2>::eye(keys, device).cast(dtype).reshape([1, 1, keys, keys]);
        let value = value.repeat_dim(0, batch).repeat_dim(1, heads);
        let output = attention_tracked([&query, &key, &value], None, &rule(false)).unwrap();
        numbers(output.mul_scalar(keys as f64))
    }

    /// The tiles of f32, the blocks of f64, and CubeCL devices.
    #[test]
    fn the_mask_is_the_same_in_every_form() {
        for shape in [[2, 3, 200, 300], [1, 2, 130, 256], [1, 1, 3, 5]] {
            let tiles = mask(shape, &Device::flex(), DType::F32);
            let mut others = vec![mask(shape, &Device::flex(), DType::F64)];
            #[cfg(feature = "cpu")]
            others.push(mask(shape, &Device::cpu(), DType::F32));
            for other in others.drain(..) {
                assert_eq!(tiles.len(), other.len());
                for (at, (a, b)) in tiles.iter().zip(&other).enumerate() {
                    assert!((a - b).abs() < 1e-4, "{a} {b} at {at} of {shape:?}");
                }
            }
            let zeros = tiles.iter().filter(|&&x| x == 0.0).count() as f64 / tiles.len() as f64;
            assert!(tiles.len() < 1000 || (zeros - 0.3).abs() < 0.01, "{zeros}");
        }
    }

    /// The same mask again in backward: the gradients are those of Burn's operations with the mask that
    /// forward had.
    #[test]
    fn backward_has_the_mask_of_forward() {
        let device = Device::flex().autodiff();
        device.seed(3);
        let shape @ [batch, heads, queries, keys] = [2, 2, 150, 300];
        for (causal, dtype) in [(false, DType::F32), (true, DType::F32), (true, DType::F64)] {
            let heads = |length| {
                let options = (&device, dtype);
                let distribution = Distribution::Normal(0.0, 1.0);
                Tensor::<4>::random([batch, heads, length, 8], distribution, options).require_grad()
            };
            let tensors @ [query, key, value] = &[heads(queries), heads(keys), heads(keys)];
            let mask = mask(shape, &Device::flex(), DType::F32);
            let mask = burn::tensor::TensorData::new(mask, shape);
            let mask = Tensor::<4>::from_data(mask, (&device, dtype));
            let mut scores = query.clone().matmul(key.clone().transpose()).mul_scalar(0.3);
            if causal {
                let hidden = Tensor::<2, burn::tensor::Bool>::tril_mask(
                    [queries, keys],
                    (keys - queries) as i64,
                    &device,
                );
                scores = scores.mask_fill(hidden.reshape([1, 1, queries, keys]), -1e30);
            }
            let weights = burn::tensor::activation::softmax(scores, 3) * mask;
            let expected = weights.matmul(value.clone());
            let found = attention_tracked([query, key, value], None, &rule(causal)).unwrap();
            let results = [found, expected].map(|output| {
                let gradients = output.clone().powi_scalar(2).sum().backward();
                let grads = tensors.each_ref().map(|tensor| tensor.grad(&gradients).unwrap());
                [output.inner()].into_iter().chain(grads).flat_map(numbers).collect::<Vec<_>>()
            });
            let [found, expected] = &results;
            assert_eq!(found.len(), expected.len());
            for (at, (a, b)) in found.iter().zip(expected).enumerate() {
                assert!((a - b).abs() < 2e-5 * b.abs().max(1.0), "{a} {b} at {at}, {dtype:?}");
            }
        }
    }
}
