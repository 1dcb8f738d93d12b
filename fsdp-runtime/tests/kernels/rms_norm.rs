//! RMS norm and its gradients against Burn's on Flex in f64.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use fsdp_runtime::nn::{RmsNorm, RmsNormConfig};

use super::rows::{assert_rounded, assert_rounded_from, for_all_dtypes, matrix};
use super::support::{device, devices, elements_of, exact};

const EPSILON: f64 = 1e-5;

fn layer(gamma: Tensor<1>) -> RmsNorm {
    RmsNorm { gamma: Param::initialized(ParamId::new(), gamma), epsilon: EPSILON }
}

/// Applies this crate's layer.
fn ours(x: Tensor<2>, gamma: Tensor<1>) -> Tensor<2> {
    layer(gamma).forward(x)
}

/// Applies the formula in the dtype of the tensors. (Burn's layer computes the root in f32, also of f64.)
fn plain(x: Tensor<2>, gamma: Tensor<1>) -> Tensor<2> {
    let root = (x.clone().square().mean_dim(1) + EPSILON).sqrt();
    x / root * gamma.unsqueeze()
}

/// Applies Burn's layer.
fn burns(x: Tensor<2>, gamma: Tensor<1>) -> Tensor<2> {
    burn::nn::RmsNorm::from(layer(gamma)).forward(x)
}

/// Returns the result, and the gradients of its sum weighted by `weights`: of the input and of gamma.
fn with_gradients(
    function: fn(Tensor<2>, Tensor<1>) -> Tensor<2>,
    (x, gamma): (Tensor<2>, Tensor<1>),
    weights: Tensor<2>,
) -> [Vec<f64>; 3] {
    let x = Tensor::<2>::from_inner(x).require_grad();
    let gamma = Tensor::<1>::from_inner(gamma).require_grad();
    let y = function(x.clone(), gamma.clone());
    assert_eq!((y.dims(), y.dtype()), (x.dims(), x.dtype()));
    let gradients = (y.clone() * Tensor::from_inner(weights)).sum().backward();
    let of_x = x.grad(&gradients).expect("a gradient of the input");
    let of_gamma = gamma.grad(&gradients).expect("a gradient of gamma");
    assert_eq!((of_gamma.dims(), of_gamma.dtype()), (gamma.dims(), gamma.dtype()));
    [elements_of(&y.inner()), elements_of(&of_x), elements_of(&of_gamma)]
}

fn tensors(shape: [usize; 2], device: &Device, dtype: FloatDType) -> (Tensor<2>, Tensor<1>) {
    let row = matrix([1, shape[1]], 2.0, 2, device, dtype).reshape([shape[1]]);
    (matrix(shape, 4.0, 1, device, dtype), row)
}

#[test]
fn values_and_gradients_are_exact() {
    for device in devices() {
        for_all_dtypes(&device, |dtype, shape| {
            let (x, gamma) = tensors(shape, &device, dtype);
            let weights = matrix(shape, 1.0, 4, &device, dtype);
            let inputs = (exact(&x), exact(&gamma));
            let expected = with_gradients(plain, inputs.clone(), exact(&weights));
            // Both terms of the input's gradient, which cancel in a row of one element.
            let root = inputs.0.square().mean_dim(1).sqrt();
            let terms = elements_of(&(exact(&weights) * inputs.1.unsqueeze() / root));
            let largest = terms.iter().fold(1e-3f64, |largest, term| largest.max(term.abs()));
            let found = with_gradients(ours, (x, gamma), weights);
            for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let what = format!("result {number} of {shape:?} in {dtype:?} on {device:?}");
                let least = if number == 1 { largest } else { 1e-3 };
                assert_rounded_from(least, found, expected, dtype, &what);
            }
        });
    }
}

#[test]
fn burns_layer_has_the_same_results() {
    for device in devices() {
        let tensors = tensors([3, 100], &device, FloatDType::F32);
        let weights = matrix([3, 100], 1.0, 4, &device, FloatDType::F32);
        let expected = with_gradients(burns, tensors.clone(), weights.clone());
        let found = with_gradients(ours, tensors, weights);
        for (found, expected) in found.iter().zip(&expected) {
            assert_rounded(found, expected, FloatDType::F32, &format!("{device:?}"));
        }
    }
}

#[test]
fn a_transposed_input_keeps_its_order() {
    for device in devices() {
        let (x, gamma) = tensors([64, 7], &device, FloatDType::F32);
        let weights = matrix([64, 7], 1.0, 4, &device, FloatDType::F32);
        let transposed = |x: &Tensor<2>| x.clone().transpose().mul_scalar(1.0).transpose();
        let straight = with_gradients(ours, (x.clone(), gamma.clone()), weights.clone());
        let found = with_gradients(ours, (transposed(&x), gamma), transposed(&weights));
        assert_eq!(found, straight, "{device:?}");
    }
}

#[test]
fn every_leading_dimension_counts_rows() {
    for device in devices() {
        let (x, gamma) = tensors([24, 100], &device, FloatDType::F32);
        let flat = elements_of(&ours(x.clone(), gamma.clone()));
        let cubic = layer(gamma.clone()).forward(x.clone().reshape([2, 3, 4, 100]));
        assert_eq!((cubic.dims(), elements_of(&cubic)), ([2, 3, 4, 100], flat.clone()));
        let row = layer(gamma).forward(x.narrow(0, 0, 1).reshape([100]));
        assert_eq!(elements_of(&row), flat[..100]);
    }
}

#[test]
fn other_dtypes_are_composed() {
    let flex = Device::flex();
    let (x, gamma) = tensors([3, 7], &flex, FloatDType::F32);
    let weights = exact(&matrix([3, 7], 1.0, 4, &flex, FloatDType::F32));
    let expected = with_gradients(plain, (exact(&x), exact(&gamma)), weights.clone());
    let found = with_gradients(ours, (exact(&x), exact(&gamma)), weights);
    for (found, expected) in found.iter().zip(&expected) {
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12;
        assert!(found.len() == expected.len() && found.iter().zip(expected).all(close));
    }
    // A gamma in another dtype than the input.
    let expected = elements_of(&plain(exact(&x), exact(&gamma)));
    let found = ours(x.cast(DType::BF16), gamma);
    assert_eq!(found.dtype(), DType::BF16);
    assert_rounded(&elements_of(&found), &expected, FloatDType::BF16, "bf16 times f32");
}

#[test]
fn large_numbers_of_f16_do_not_overflow() {
    for device in devices() {
        let (x, gamma) = tensors([3, 64], &device, FloatDType::F16);
        let large = x.mul_scalar(1024.0);
        let expected = elements_of(&plain(exact(&large), exact(&gamma)));
        let found = ours(large, gamma);
        assert_eq!(found.dtype(), DType::F16);
        assert_rounded(&elements_of(&found), &expected, FloatDType::F16, &format!("{device:?}"));
    }
}

#[test]
fn an_input_without_elements_has_a_result_without() {
    for device in devices() {
        let layer = RmsNormConfig::new(7).init(&device);
        assert_eq!(layer.forward(Tensor::<3>::zeros([2, 0, 7], &device)).dims(), [2, 0, 7]);
        let empty = || Tensor::<3>::zeros([2, 0, 7], &device);
        let (normed, sum) = layer.forward_residual(empty(), empty());
        assert_eq!([normed.dims(), sum.dims()], [[2, 0, 7]; 2]);
    }
}

#[test]
#[should_panic(expected = "must be `d_model`")]
fn another_width_is_an_error() {
    let Some(device) = device() else { panic!("must be `d_model`: there is no device") };
    RmsNormConfig::new(7).init(&device).forward(Tensor::<2>::zeros([3, 8], &device));
}

#[test]
#[should_panic(expected = "epsilon must be positive, and 0 is not")]
fn an_epsilon_of_zero_is_an_error() {
    RmsNormConfig::new(7).with_epsilon(0.0).init(&Device::flex());
}

#[test]
fn the_layer_is_displayed_configured_and_recorded_like_burns() {
    let device = Device::flex();
    let config = RmsNormConfig::new(7).with_epsilon(1e-3);
    let burns = burn::nn::RmsNormConfig::new(7).with_epsilon(1e-3);
    assert_eq!(config.to_string(), burns.to_string());
    let (ours, burns) = (config.init(&device), burns.init(&device));
    assert_eq!(ours.to_string(), burns.to_string());
    assert_eq!(RmsNormConfig::new(7).to_string(), burn::nn::RmsNormConfig::new(7).to_string());

    let (_, gamma) = tensors([1, 7], &device, FloatDType::F32);
    let filled = layer(gamma.clone());
    let loaded = burns.load_record(filled.into_record());
    assert_eq!(loaded.gamma.val().into_data(), gamma.clone().into_data());
    let back = ours.load_record(loaded.into_record());
    assert_eq!(back.gamma.val().into_data(), gamma.into_data());
}
