//! Layer normalization and its gradients against Burn's layer on Flex in f64.

use burn::module::Param;
use burn::nn::LayerNormConfig as BurnConfig;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use fsdp_runtime::nn::{LayerNorm, LayerNormConfig};

use super::support::{device, devices, dtypes, tensor};

const EPSILON: f64 = 1e-5;
/// Rows and features of inputs: one element, less than a vector, whole vectors, odd numbers, and more
/// than one task of a thread pool.
const SHAPES: [[usize; 2]; 7] =
    [[1, 1], [3, 7], [200, 64], [5, 100], [130, 768], [3, 1000], [2, 3001]];

/// An input, the parameters, and the gradient of the output.
struct Case {
    x: Tensor<2>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    weights: Tensor<2>,
}

impl Case {
    fn new(
        [rows, features]: [usize; 2],
        with_beta: bool,
        device: &Device,
        dtype: FloatDType,
    ) -> Self {
        let number = |i: usize, step: usize| ((i * step) % 2003) as f32 * 1e-3 - 1.0;
        let matrix = |step: usize| {
            let values: Vec<f32> =
                (0..rows * features).map(|i| 3.0 * number(i, step) + 0.5).collect();
            tensor(&values, device, dtype).reshape([rows, features])
        };
        let column = |step: usize| {
            let values: Vec<f32> = (0..features).map(|i| 1.0 + number(i, step)).collect();
            tensor(&values, device, dtype)
        };
        let beta = with_beta.then(|| column(389));
        Self { x: matrix(7919), gamma: column(101), beta, weights: matrix(1009) }
    }

    /// Returns the same numbers on Flex in f64.
    fn exact(&self) -> Self {
        let beta = self.beta.as_ref().map(exact);
        Self { x: exact(&self.x), gamma: exact(&self.gamma), beta, weights: exact(&self.weights) }
    }

    /// Returns the output of our layer, and the gradients of the input, the weight and the bias.
    fn ours(&self) -> Vec<Vec<f64>> {
        let param = |tensor: &Tensor<1>| Param::from_tensor(Tensor::from_inner(tensor.clone()));
        let layer = LayerNorm {
            gamma: param(&self.gamma),
            beta: self.beta.as_ref().map(param),
            epsilon: EPSILON,
        };
        let params = std::iter::once(layer.gamma.val()).chain(layer.beta.as_ref().map(Param::val));
        let params: Vec<_> = params.collect();
        self.with_gradients(|x| layer.forward(x), &params)
    }

    /// Returns what [`ours`](Self::ours) does, for Burn's layer.
    fn burns(&self) -> Vec<Vec<f64>> {
        let [features] = self.gamma.dims();
        let config = BurnConfig::new(features).with_epsilon(EPSILON);
        let config = config.with_bias(self.beta.is_some());
        let mut layer = config.init(&self.x.device().autodiff());
        let param = |tensor: &Tensor<1>| Param::from_tensor(Tensor::from_inner(tensor.clone()));
        layer.gamma = param(&self.gamma);
        layer.beta = self.beta.as_ref().map(param);
        let params = std::iter::once(layer.gamma.val()).chain(layer.beta.as_ref().map(Param::val));
        let params: Vec<_> = params.collect();
        self.with_gradients(|x| layer.forward(x), &params)
    }

    fn with_gradients(
        &self,
        forward: impl Fn(Tensor<2>) -> Tensor<2>,
        params: &[Tensor<1>],
    ) -> Vec<Vec<f64>> {
        let x = Tensor::from_inner(self.x.clone()).require_grad();
        let y = forward(x.clone());
        assert_eq!((y.dims(), y.dtype()), (x.dims(), x.dtype()));
        let weights = Tensor::from_inner(self.weights.clone());
        let gradients = (y.clone() * weights).sum().backward();
        let mut found = vec![values(y.inner()), values(x.grad(&gradients).expect("a gradient"))];
        for param in params {
            let gradient = param.grad(&gradients).expect("a gradient");
            assert_eq!((gradient.dims(), gradient.dtype()), (param.dims(), param.dtype()));
            found.push(values(gradient));
        }
        found
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

fn exact<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    let data = TensorData::new(values(tensor.clone()), tensor.dims());
    Tensor::from_data(data, (&Device::flex(), DType::F64))
}

/// Asserts that numbers are apart by at most a share of the largest.
#[track_caller]
fn assert_close(found: &[Vec<f64>], expected: &[Vec<f64>], share: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.len(), expected.len(), "{what}");
        let largest = expected.iter().fold(1.0f64, |largest, value| largest.max(value.abs()));
        for (a, b) in found.iter().zip(expected) {
            assert!((a - b).abs() <= share * largest, "result {at} of {what}: {a}, not {b}");
        }
    }
}

#[test]
fn values_and_gradients_are_those_of_burns_layer() {
    for device in devices() {
        let of_kernels = |dtype: &FloatDType| *dtype == FloatDType::F32 || device != Device::flex();
        for dtype in dtypes(&device).filter(of_kernels) {
            let share = match dtype {
                FloatDType::BF16 => 1.0 / 128.0,
                FloatDType::F16 => 1.0 / 1024.0,
                _ => 2e-5,
            };
            for shape in SHAPES {
                for with_beta in [true, false] {
                    let case = Case::new(shape, with_beta, &device, dtype);
                    let what = format!("{shape:?}, bias {with_beta}, {dtype:?} on {device:?}");
                    assert_close(&case.ours(), &case.exact().burns(), share, &what);
                }
            }
        }
    }
}

/// A row's result depends on that row only: not on the rows of its task.
#[test]
fn a_row_has_the_same_bits_alone() {
    for device in devices() {
        let case = Case::new([300, 384], true, &device, FloatDType::F32);
        let layer = LayerNormConfig::new(384).init(&device);
        let all = values(layer.forward(case.x.clone()));
        for row in [0, 1, 85, 299] {
            let alone = values(layer.forward(case.x.clone().slice(row..row + 1)));
            assert_eq!(alone, all[row * 384..][..384], "row {row} on {device:?}");
        }
    }
}

#[test]
fn a_transposed_input_keeps_its_order() {
    let Some(device) = device() else { return };
    let x = Case::new([6, 11], true, &device, FloatDType::F32).x.transpose();
    let layer = LayerNormConfig::new(6).init(&device);
    let expected = values(layer.forward(Tensor::<2>::from_data(x.to_data(), &device)));
    assert_eq!(values(layer.forward(x)), expected);
}

#[test]
fn other_dtypes_and_empty_inputs_are_those_of_burns_layer() {
    let flex = Device::flex();
    let case = Case::new([3, 8], true, &flex, FloatDType::F32).exact();
    assert_eq!(case.ours(), case.burns());
    let layer = LayerNormConfig::new(8).init(&flex);
    let empty = Tensor::<2>::zeros([0, 8], &flex);
    assert_eq!(layer.forward(empty).dims(), [0, 8]);
}

/// An input that is not tracked has no gradient; the parameters have theirs.
#[test]
fn an_untracked_input_leaves_the_gradients_of_the_parameters() {
    for device in devices() {
        let case = Case::new([9, 32], true, &device, FloatDType::F32);
        let expected = case.ours();
        let layer = LayerNorm {
            gamma: Param::from_tensor(Tensor::from_inner(case.gamma.clone())),
            beta: case.beta.clone().map(|beta| Param::from_tensor(Tensor::from_inner(beta))),
            epsilon: EPSILON,
        };
        let y = layer.forward(Tensor::from_inner(case.x.clone()));
        let gradients = (y * Tensor::from_inner(case.weights.clone())).sum().backward();
        let gamma = layer.gamma.val().grad(&gradients).expect("a gradient");
        assert_eq!(values(gamma), expected[2]);
    }
}

#[test]
fn the_layer_starts_with_ones_and_zeros() {
    let layer = LayerNormConfig::new(4).with_bias(false).init(&Device::flex());
    assert!(layer.beta.is_none());
    let layer = LayerNormConfig::new(4).init(&Device::flex());
    let beta = layer.beta.as_ref().expect("a bias").val();
    assert_eq!((values(layer.gamma.val()), values(beta)), (vec![1.0; 4], vec![0.0; 4]));
}
