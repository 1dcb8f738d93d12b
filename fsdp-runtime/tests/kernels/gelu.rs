//! The GELU and its gradient against Burn's on Flex in f64, which are exact there.

use burn::tensor::activation;
use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::nn::gelu;

use super::support::{LENGTHS, device, devices, dtypes, exact, tensor, with_gradient};

/// Returns the numbers from -20 to 20, unevenly, and large ones.
fn points(len: usize) -> Vec<f32> {
    let point = |i: usize| ((i * 7919) % 40_001) as f32 * 1e-3 - 20.0;
    let mut points: Vec<f32> = (0..len).map(point).collect();
    points.iter_mut().zip([0.0, -0.0, 1e3, -1e3, 1e-30, -1e-30]).for_each(|(to, x)| *to = x);
    points
}

#[test]
fn values_and_gradients_are_exact() {
    for device in devices() {
        let of_kernels = |dtype: &FloatDType| *dtype == FloatDType::F32 || device != Device::flex();
        for dtype in dtypes(&device).filter(of_kernels) {
            // Half a unit in the last place of a number in [1, 2).
            let rounding = match dtype {
                FloatDType::BF16 => 1.0 / 256.0,
                FloatDType::F16 => 1.0 / 2048.0,
                _ => 1.0 / 16_777_216.0,
            };
            for len in LENGTHS {
                let x = tensor(&points(len), &device, dtype);
                let weights: Vec<f32> = (0..len).map(|i| 1.0 + (i % 3) as f32).collect();
                let weights = tensor(&weights, &device, dtype);
                let expected = with_gradient(activation::gelu, exact(&x), exact(&weights));
                let found = with_gradient(gelu, x.clone(), weights);
                let points = exact(&x).into_data();
                for ((values, expected), scale) in found.iter().zip(&expected).zip([3e-7, 2e-6]) {
                    assert_eq!(values.len(), len);
                    for ((y, expected), x) in values.iter().zip(expected).zip(points.iter::<f64>())
                    {
                        let most = scale * x.abs().max(1.0) + rounding * expected.abs();
                        let least = if dtype == FloatDType::F16 { 6e-8 } else { 0.0 };
                        assert!(
                            (y - expected).abs() <= most + least,
                            "{x} gives {y}, not {expected}, on {device:?} in {dtype:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_transposed_input_keeps_its_order() {
    let Some(device) = device() else { return };
    let x = tensor(&points(6 * 11), &device, FloatDType::F32).reshape([6, 11]);
    let straight = gelu(x.clone()).transpose().into_data();
    assert_eq!(gelu(x.transpose()).into_data(), straight);
}

#[test]
fn a_device_without_autodiff_has_values_only() {
    for device in devices() {
        let x = tensor(&points(1031), &device, FloatDType::F32);
        let tracked = gelu(Tensor::from_inner(x.clone()).require_grad()).inner();
        assert_eq!(gelu(x).into_data(), tracked.into_data());
    }
}
