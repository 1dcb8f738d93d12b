//! A norm of a sum beside the addition and the norm as two operations: the same bits in f32 on Flex.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::nn::{LayerNorm, RmsNorm, RmsNormConfig};

use super::rows::{assert_rounded, assert_rounded_from, for_all_dtypes, matrix};
use super::support::{devices, elements_of, exact};

/// Layers with the same gamma.
#[derive(Clone)]
enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl Norm {
    /// Returns an RMS norm, and layer norms without and with a bias.
    fn all(width: usize, device: &Device, dtype: FloatDType) -> [Self; 3] {
        let row = |seed| {
            let row = matrix([1, width], 2.0, seed, device, dtype).reshape([width]);
            Param::initialized(ParamId::new(), Tensor::<1>::from_inner(row).require_grad())
        };
        let layer = |beta| LayerNorm { gamma: row(2), beta, epsilon: 1e-5 };
        [
            Self::Rms(RmsNorm { gamma: row(2), epsilon: 1e-5 }),
            Self::Layer(layer(None)),
            Self::Layer(layer(Some(row(3)))),
        ]
    }

    fn params(&self) -> Vec<Tensor<1>> {
        match self {
            Self::Rms(norm) => vec![norm.gamma.val()],
            Self::Layer(norm) => {
                std::iter::once(&norm.gamma).chain(&norm.beta).map(Param::val).collect()
            }
        }
    }

    /// Returns the norm of a sum, and the sum, as one operation.
    fn one(&self, x: Tensor<2>, residual: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        match self {
            Self::Rms(norm) => norm.forward_residual(x, residual),
            Self::Layer(norm) => norm.forward_residual(x, residual),
        }
    }

    /// Returns the same as two operations.
    fn two(&self, x: Tensor<2>, residual: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        let sum = x + residual;
        let normed = match self {
            Self::Rms(norm) => norm.forward(sum.clone()),
            Self::Layer(norm) => norm.forward(sum.clone()),
        };
        (normed, sum)
    }
}

/// Which results are used.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Used {
    Both,
    Normed,
    Sum,
}

type Function = fn(&Norm, Tensor<2>, Tensor<2>) -> (Tensor<2>, Tensor<2>);

/// Returns both results, and the gradients of input, residual and parameters, of the weighted sum of the results
/// that are used. A parameter without influence has a gradient of zeros.
fn with_gradients(
    function: Function,
    norm: &Norm,
    of: &[Tensor<2>; 4],
    used: Used,
) -> Vec<Vec<f64>> {
    let [x, residual, weights, more] = of.each_ref().map(|it| Tensor::<2>::from_inner(it.clone()));
    let (x, residual) = (x.require_grad(), residual.require_grad());
    let (normed, sum) = function(norm, x.clone(), residual.clone());
    assert_eq!((normed.dims(), sum.dims()), (x.dims(), x.dims()));
    assert_eq!((normed.dtype(), sum.dtype()), (x.dtype(), x.dtype()));
    let (of_normed, of_sum) = ((normed.clone() * weights).sum(), (sum.clone() * more).sum());
    let total = match used {
        Used::Both => of_normed + of_sum,
        Used::Normed => of_normed,
        Used::Sum => of_sum,
    };
    let gradients = total.backward();
    let wide = [&x, &residual].map(|it| elements_of(&it.grad(&gradients).expect("a gradient")));
    let of_param = |param: Tensor<1>| match param.grad(&gradients) {
        Some(gradient) => elements_of(&gradient),
        None => vec![0.0; param.dims()[0]],
    };
    let params = norm.params().into_iter().map(of_param);
    let results = [elements_of(&normed.inner()), elements_of(&sum.inner())];
    results.into_iter().chain(wide).chain(params).collect()
}

fn tensors(shape: [usize; 2], device: &Device, dtype: FloatDType) -> [Tensor<2>; 4] {
    [(4.0, 1), (2.0, 7), (1.0, 4), (1.0, 5)]
        .map(|(scale, seed)| matrix(shape, scale, seed, device, dtype))
}

/// Asserts that results have the same bits on Flex. On other devices Burn's fusion may round a product and the
/// addition of two operations once, so that they are equal to the rounding of `dtype`.
#[track_caller]
fn assert_same(found: &[Vec<f64>], expected: &[Vec<f64>], device: &Device, dtype: FloatDType) {
    if *device == Device::flex() {
        assert_eq!(found, expected);
        return;
    }
    assert_eq!(found.len(), expected.len());
    for (number, (found, expected)) in found.iter().zip(expected).enumerate() {
        let what = format!("result {number} on {device:?}");
        assert_rounded_from(1.0, found, expected, dtype, &what);
    }
}

#[test]
fn the_bits_are_those_of_two_operations() {
    for device in devices() {
        for shape in [[1, 1], [3, 7], [5, 64], [200, 100], [70, 768]] {
            for norm in Norm::all(shape[1], &device, FloatDType::F32) {
                let tensors = tensors(shape, &device, FloatDType::F32);
                for used in [Used::Both, Used::Normed, Used::Sum] {
                    let expected = with_gradients(Norm::two, &norm, &tensors, used);
                    let found = with_gradients(Norm::one, &norm, &tensors, used);
                    assert_same(&found, &expected, &device, FloatDType::F32);
                }
            }
        }
    }
}

#[test]
fn every_dtype_is_as_exact_as_its_rounding() {
    for device in devices() {
        for_all_dtypes(&device, |dtype, shape| {
            if shape[1] == 1 {
                return; // The gradient of an RMS norm of one element is a difference of equal terms.
            }
            let norms = Norm::all(shape[1], &device, dtype);
            let exact_norms = norms.each_ref().map(|norm| {
                let row = |param: &Param<Tensor<1>>| {
                    let row = Tensor::from_inner(exact(&param.val().inner()));
                    Param::initialized(ParamId::new(), row.require_grad())
                };
                match norm {
                    Norm::Rms(norm) => {
                        Norm::Rms(RmsNorm { gamma: row(&norm.gamma), epsilon: norm.epsilon })
                    }
                    Norm::Layer(norm) => Norm::Layer(LayerNorm {
                        gamma: row(&norm.gamma),
                        beta: norm.beta.as_ref().map(row),
                        epsilon: norm.epsilon,
                    }),
                }
            });
            // Sums of these are exact in every dtype.
            let tensors = tensors(shape, &device, dtype);
            let exact_tensors = tensors.each_ref().map(exact);
            for (norm, exact_norm) in norms.iter().zip(&exact_norms) {
                let expected = with_gradients(Norm::two, exact_norm, &exact_tensors, Used::Both);
                let found = with_gradients(Norm::one, norm, &tensors, Used::Both);
                assert_eq!(found.len(), expected.len());
                for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let what = format!("result {number} of {shape:?} in {dtype:?} on {device:?}");
                    assert_rounded(found, expected, dtype, &what);
                }
            }
        });
    }
}

/// A chain, as in a transformer: each sum is the next residual, and its gradient has two parts.
#[test]
fn a_chain_of_sums_has_the_bits_of_additions() {
    for device in devices() {
        let norms = Norm::all(64, &device, FloatDType::F32);
        let [x, residual, weights, _] = tensors([6, 64], &device, FloatDType::F32);
        let run = |function: Function| {
            let [x, residual] =
                [&x, &residual].map(|it| Tensor::<2>::from_inner(it.clone()).require_grad());
            let (mut update, mut sum) = (x.clone(), residual.clone());
            for norm in &norms {
                let normed;
                (normed, sum) = function(norm, update, sum);
                update = normed.clone() * normed;
            }
            let loss = (update + sum) * Tensor::from_inner(weights.clone());
            let gradients = loss.clone().sum().backward();
            let grads = [x, residual].map(|it| elements_of(&it.grad(&gradients).expect("one")));
            let params = norms.iter().flat_map(Norm::params);
            let params = params.map(|it| elements_of(&it.grad(&gradients).expect("a gradient")));
            grads.into_iter().chain(params).chain([elements_of(&loss.inner())]).collect::<Vec<_>>()
        };
        let (found, expected) = (run(Norm::one), run(Norm::two));
        assert_eq!(found.len(), 7);
        assert_same(&found, &expected, &device, FloatDType::F16);
    }
}

/// What is not tracked has no gradient, and a graph that is never run backward is no error.
#[test]
fn one_tracked_tensor_is_enough() {
    for device in devices() {
        let [x, residual, ..] = tensors([3, 64], &device, FloatDType::F32);
        let norm = RmsNormConfig::new(64).init(&device);
        let (plain, plain_sum) = norm.forward_residual(x.clone(), residual.clone());
        let norm = norm.train();
        let x = Tensor::<2>::from_inner(x);
        let residual = Tensor::<2>::from_inner(residual).require_grad();
        let (normed, sum) = norm.forward_residual(x.clone(), residual.clone());
        drop(norm.forward_residual(x.clone(), residual.clone()));
        assert_eq!(normed.clone().inner().into_data(), plain.into_data());
        assert_eq!(sum.clone().inner().into_data(), plain_sum.into_data());
        let gradients = (normed + sum).sum().backward();
        assert!(x.grad(&gradients).is_none());
        assert!(residual.grad(&gradients).is_some());
    }
}

#[test]
#[should_panic(expected = "the residual must have the input's shape")]
fn a_residual_of_another_shape_is_an_error() {
    let device = Device::flex();
    let (x, residual) = (Tensor::<2>::zeros([2, 4], &device), Tensor::zeros([1, 4], &device));
    RmsNormConfig::new(4).init(&device).forward_residual(x, residual);
}
