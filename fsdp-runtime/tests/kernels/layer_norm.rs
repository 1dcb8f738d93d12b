//! Layer normalization and its gradients against Burn's on Flex in f64.

use burn::module::Param;
use burn::tensor::module::layer_norm;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use fsdp_runtime::nn::{LayerNorm, LayerNormConfig};

use super::rows::{assert_rounded, for_all_dtypes, matrix};
use super::support::{device, devices, elements_of, exact};

const EPSILON: f64 = 1e-5;

/// Input, gamma and beta.
type Tensors = (Tensor<2>, Tensor<1>, Option<Tensor<1>>);

/// Applies this crate's layer.
fn ours((x, gamma, beta): Tensors) -> Tensor<2> {
    let param = |tensor| Param::initialized(burn::module::ParamId::new(), tensor);
    LayerNorm { gamma: param(gamma), beta: beta.map(param), epsilon: EPSILON }.forward(x)
}

/// Applies Burn's function.
fn burns((x, gamma, beta): Tensors) -> Tensor<2> {
    layer_norm(x, gamma, beta, EPSILON)
}

/// Returns the result, and the gradients of its sum weighted by `weights`: of the input, gamma and beta.
fn with_gradients(
    function: fn(Tensors) -> Tensor<2>,
    (x, gamma, beta): Tensors,
    weights: Tensor<2>,
) -> Vec<Vec<f64>> {
    let x = Tensor::<2>::from_inner(x).require_grad();
    let [gamma, beta] =
        [Some(gamma), beta].map(|it| it.map(|it| Tensor::<1>::from_inner(it).require_grad()));
    let gamma = gamma.expect("gamma is there");
    let y = function((x.clone(), gamma.clone(), beta.clone()));
    assert_eq!((y.dims(), y.dtype()), (x.dims(), x.dtype()));
    let mut gradients = (y.clone() * Tensor::from_inner(weights)).sum().backward();
    let mut results = vec![elements_of(&y.inner())];
    results.push(elements_of(&x.grad_remove(&mut gradients).expect("a gradient of the input")));
    for param in std::iter::once(gamma).chain(beta) {
        let gradient = param.grad_remove(&mut gradients).expect("a gradient of the parameter");
        assert_eq!((gradient.dims(), gradient.dtype()), (param.dims(), param.dtype()));
        results.push(elements_of(&gradient));
    }
    results
}

fn tensors(shape: [usize; 2], bias: bool, device: &Device, dtype: FloatDType) -> Tensors {
    let x = matrix(shape, 4.0, 1, device, dtype);
    let row = |seed| matrix([1, shape[1]], 2.0, seed, device, dtype).reshape([shape[1]]);
    (x, row(2), bias.then(|| row(3)))
}

#[test]
fn values_and_gradients_are_exact() {
    for device in devices() {
        for_all_dtypes(&device, |dtype, shape| {
            for bias in [true, false] {
                let of_kernel = tensors(shape, bias, &device, dtype);
                let weights = matrix(shape, 1.0, 4, &device, dtype);
                let (x, gamma, beta) = of_kernel.clone();
                let of_burn = (exact(&x), exact(&gamma), beta.as_ref().map(exact));
                let expected = with_gradients(burns, of_burn, exact(&weights));
                let found = with_gradients(ours, of_kernel, weights);
                assert_eq!(found.len(), if bias { 4 } else { 3 });
                for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let what = format!("result {number} of {shape:?} in {dtype:?} on {device:?}");
                    assert_rounded(found, expected, dtype, &what);
                }
            }
        });
    }
}

#[test]
fn a_large_mean_does_not_cancel() {
    for device in devices() {
        let spread = matrix([3, 768], 1.0, 5, &device, FloatDType::F32);
        let (_, gamma, beta) = tensors([3, 768], true, &device, FloatDType::F32);
        let near = elements_of(&ours((spread.clone(), gamma.clone(), beta.clone())));
        let far = elements_of(&ours((spread + 1024.0, gamma, beta)));
        assert_eq!((near.len(), far.len()), (3 * 768, 3 * 768));
        for (near, far) in near.iter().zip(&far) {
            assert!((near - far).abs() < 1e-3, "{near} {far} on {device:?}");
        }
    }
}

#[test]
fn a_transposed_input_keeps_its_order() {
    for device in devices() {
        let (x, gamma, beta) = tensors([64, 7], true, &device, FloatDType::F32);
        let weights = matrix([64, 7], 1.0, 4, &device, FloatDType::F32);
        let transposed = |x: &Tensor<2>| x.clone().transpose().mul_scalar(1.0).transpose();
        let straight =
            with_gradients(ours, (x.clone(), gamma.clone(), beta.clone()), weights.clone());
        let found = with_gradients(ours, (transposed(&x), gamma, beta), transposed(&weights));
        assert_eq!(found, straight, "{device:?}");
    }
}

#[test]
fn every_leading_dimension_counts_rows() {
    for device in devices() {
        let (x, gamma, beta) = tensors([24, 100], true, &device, FloatDType::F32);
        let layer = LayerNorm {
            gamma: Param::from_tensor(gamma.clone()),
            beta: beta.clone().map(Param::from_tensor),
            epsilon: EPSILON,
        };
        let flat = elements_of(&ours((x.clone(), gamma, beta)));
        let cubic = layer.forward(x.clone().reshape([2, 3, 4, 100]));
        assert_eq!((cubic.dims(), elements_of(&cubic)), ([2, 3, 4, 100], flat.clone()));
        let row = layer.forward(x.narrow(0, 0, 1).reshape([100]));
        assert_eq!(elements_of(&row), flat[..100]);
    }
}

/// The gradients of what is not tracked are not registered.
#[test]
fn a_tracked_parameter_is_enough() {
    for device in devices() {
        let (x, gamma, _) = tensors([3, 64], false, &device, FloatDType::F32);
        let x = Tensor::<2>::from_inner(x);
        let gamma = Tensor::<1>::from_inner(gamma).require_grad();
        let y = ours((x.clone(), gamma.clone(), None));
        let gradients = y.clone().sum().backward();
        assert!(x.grad(&gradients).is_none());
        let found = elements_of(&gamma.grad(&gradients).expect("a gradient"));
        let expected = elements_of(&(y / gamma.unsqueeze()).sum_dim(0).inner());
        assert_rounded(&found, &expected, FloatDType::F32, "gamma's gradient");
    }
}

#[test]
fn other_dtypes_are_composed() {
    let flex = Device::flex();
    for bias in [true, false] {
        let (x, gamma, beta) = tensors([3, 7], bias, &flex, FloatDType::F32);
        let doubles = || (exact(&x), exact(&gamma), beta.as_ref().map(exact));
        let weights = exact(&matrix([3, 7], 1.0, 4, &flex, FloatDType::F32));
        let expected = with_gradients(burns, doubles(), weights.clone());
        assert_eq!(with_gradients(ours, doubles(), weights), expected);
    }
    // Squares of these exceed the numbers of f16.
    let (x, gamma, _) = tensors([3, 64], false, &flex, FloatDType::F16);
    let large = x.mul_scalar(1024.0);
    let expected = elements_of(&burns((exact(&large), exact(&gamma), None)));
    let found = ours((large, gamma, None));
    assert_eq!(found.dtype(), DType::F16);
    assert_rounded(&elements_of(&found), &expected, FloatDType::F16, "f16 on Flex");
}

#[test]
fn an_input_without_elements_has_a_result_without() {
    for device in devices() {
        let layer = LayerNormConfig::new(7).init(&device);
        assert_eq!(layer.forward(Tensor::<3>::zeros([2, 0, 7], &device)).dims(), [2, 0, 7]);
    }
}

#[test]
#[should_panic(expected = "must be `d_model`")]
fn another_width_is_an_error() {
    let Some(device) = device() else { panic!("must be `d_model`: there is no device") };
    LayerNormConfig::new(7).init(&device).forward(Tensor::<2>::zeros([3, 8], &device));
}

#[test]
fn the_layer_is_displayed_and_configured_like_burns() {
    let device = Device::flex();
    let ours = LayerNormConfig::new(7).with_epsilon(1e-3).with_bias(false);
    let burns = burn::nn::LayerNormConfig::new(7).with_epsilon(1e-3).with_bias(false);
    assert_eq!(ours.to_string(), burns.to_string());
    assert_eq!(ours.init(&device).to_string(), burns.init(&device).to_string());
    let (ours, burns) = (LayerNormConfig::new(7), burn::nn::LayerNormConfig::new(7));
    assert_eq!(ours.to_string(), burns.to_string());
    assert_eq!(ours.init(&device).to_string(), burns.init(&device).to_string());
}
