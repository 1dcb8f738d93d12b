//! The activation of SwiGLU and its gradients against Burn's on Flex in f64.

use burn::module::Module;
use burn::tensor::activation::silu;
use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::nn::{SwiGlu, SwiGluConfig, swiglu};

use super::rows::{assert_rounded, matrix};
use super::support::{LENGTHS, device, devices, dtypes, elements_of, exact, tensor};

fn burns(gate: Tensor<1>, up: Tensor<1>) -> Tensor<1> {
    silu(gate) * up
}

/// Returns the result, and the gradients of gate and up of its sum weighted by `weights`.
fn with_gradients(
    function: fn(Tensor<1>, Tensor<1>) -> Tensor<1>,
    [gate, up, weights]: [Tensor<1>; 3],
) -> [Vec<f64>; 3] {
    let [gate, up] = [gate, up].map(|it| Tensor::<1>::from_inner(it).require_grad());
    let y = function(gate.clone(), up.clone());
    assert_eq!((y.dims(), y.dtype()), (gate.dims(), gate.dtype()));
    let gradients = (y.clone() * Tensor::from_inner(weights)).sum().backward();
    let grads = [gate, up].map(|it| it.grad(&gradients).expect("a gradient"));
    let [of_gate, of_up] = grads.each_ref().map(elements_of);
    [elements_of(&y.inner()), of_gate, of_up]
}

/// Returns numbers from -`scale` to `scale`, unevenly, of which the first are large, small and 0.
fn points(len: usize, scale: f32, step: usize) -> Vec<f32> {
    let mut points: Vec<f32> =
        (0..len).map(|i| ((i * step) % 2001) as f32 * scale / 1000.0 - scale).collect();
    points.iter_mut().zip([0.0, -0.0, 200.0, -200.0, 1e-4]).for_each(|(to, x)| *to = x);
    points
}

#[test]
fn values_and_gradients_are_exact() {
    for device in devices() {
        for dtype in dtypes(&device) {
            // Half a unit in the last place of a number in [1, 2).
            let rounding = match dtype {
                FloatDType::BF16 => 1.0 / 256.0,
                FloatDType::F16 => 1.0 / 2048.0,
                _ => 1e-6,
            };
            for len in LENGTHS {
                let of = |scale, step| tensor(&points(len, scale, step), &device, dtype);
                let tensors = [of(20.0, 7919), of(3.0, 104_729), of(1.0, 613)];
                let inputs = tensors.each_ref().map(exact);
                let expected = with_gradients(burns, inputs.clone());
                let found = with_gradients(swiglu, tensors);
                // The factors of a term, which may cancel.
                let [gate, up, weights] = inputs.map(|it| elements_of(&it));
                for (found, expected) in found.iter().zip(&expected) {
                    assert_eq!((found.len(), expected.len()), (len, len));
                    for at in 0..len {
                        let scale = gate[at].abs().max(1.0) * up[at].abs().max(weights[at].abs());
                        let most = rounding * expected[at].abs() + 1e-6 * scale + 1e-7;
                        assert!(
                            (found[at] - expected[at]).abs() <= most,
                            "{} gives {}, not {}, on {device:?} in {dtype:?}",
                            gate[at],
                            found[at],
                            expected[at]
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn transposed_inputs_keep_their_order() {
    let Some(device) = device() else { return };
    let [gate, up] = [1, 2].map(|seed| matrix([6, 11], 4.0, seed, &device, FloatDType::F32));
    let straight = swiglu(gate.clone(), up.clone()).transpose().into_data();
    let found = swiglu(gate.transpose(), up.transpose()).into_data();
    assert_eq!(found, straight);
}

#[test]
fn one_tracked_tensor_is_enough() {
    for device in devices() {
        let [gate, up] = [1, 2].map(|seed| matrix([3, 64], 4.0, seed, &device, FloatDType::F32));
        let plain = swiglu(gate.clone(), up.clone());
        let [gate, up] = [gate, up].map(Tensor::<2>::from_inner);
        let up = up.require_grad();
        let y = swiglu(gate.clone(), up.clone());
        assert_eq!(y.clone().inner().into_data(), plain.into_data());
        let gradients = y.sum().backward();
        assert!(gate.grad(&gradients).is_none());
        let (found, expected) = (up.grad(&gradients).expect("one"), silu(gate.inner()));
        let what = "the gradient of `up`";
        assert_rounded(&elements_of(&found), &elements_of(&expected), FloatDType::F32, what);
    }
}

#[test]
fn other_dtypes_are_composed() {
    let flex = Device::flex();
    let tensors =
        [7919, 613, 31].map(|step| exact(&tensor(&points(50, 4.0, step), &flex, FloatDType::F32)));
    assert_eq!(with_gradients(swiglu, tensors.clone()), with_gradients(burns, tensors));
}

#[test]
#[should_panic(expected = "`gate` and `up` must have one shape")]
fn shapes_that_differ_are_an_error() {
    let device = Device::flex();
    swiglu(Tensor::<2>::zeros([2, 3], &device), Tensor::zeros([1, 3], &device));
}

#[test]
fn the_layer_is_burns_but_for_rounding() {
    for device in devices() {
        let config = SwiGluConfig::new(8, 6).with_bias(true);
        let ours = config.init(&device);
        let burns = burn::nn::SwiGluConfig::new(8, 6).with_bias(true);
        assert_eq!(config.to_string(), burns.to_string());
        assert_eq!(
            SwiGluConfig::new(8, 6).to_string(),
            burn::nn::SwiGluConfig::new(8, 6).to_string()
        );
        let burns = burns.init(&device).load_record(ours.clone().into_record());
        assert_eq!(ours.to_string(), burns.to_string());
        let x = matrix([5, 8], 2.0, 1, &device, FloatDType::F32);
        let expected = elements_of(&burns.forward(x.clone()));
        for layer in [ours, SwiGlu::from(burns)] {
            let found = elements_of(&layer.forward(x.clone()));
            assert_rounded(&found, &expected, FloatDType::F32, &format!("{device:?}"));
            let back = burn::nn::SwiGlu::from(layer).forward(x.clone());
            assert_eq!(elements_of(&back), expected);
        }
    }
}
