//! The softmax and its gradient against Burn's on Flex in f64.

use burn::tensor::activation;
use burn::tensor::{Device, FloatDType, Tensor};
use fsdp_runtime::nn::softmax;

use super::rows::{assert_rounded, assert_rounded_from, for_all, matrix};
use super::support::{devices, elements_of, exact, tensor, with_gradient};

/// Asserts that a result and its gradient are those expected. The gradient is computed from the rounded
/// result, and weights up to 1.
#[track_caller]
fn assert_results(found: [Vec<f64>; 2], expected: [Vec<f64>; 2], dtype: FloatDType, what: &str) {
    let [y, gradient] = expected;
    let largest = y.iter().fold(0.0f64, |largest, y| largest.max(*y));
    assert_rounded(&found[0], &y, dtype, what);
    assert_rounded_from(largest, &found[1], &gradient, dtype, &format!("gradient, {what}"));
}

#[test]
fn values_and_gradients_are_exact() {
    for device in devices() {
        for_all(&device, |dtype, shape| {
            for scale in [0.5, 16.0] {
                let x = matrix(shape, scale, 1, &device, dtype);
                let weights = matrix(shape, 1.0, 2, &device, dtype);
                let burns = |x| activation::softmax(x, 1);
                let expected = with_gradient(burns, exact(&x), exact(&weights));
                let found = with_gradient(|x| softmax(x, 1), x, weights);
                let what = format!("{shape:?} times {scale} in {dtype:?} on {device:?}");
                assert_results(found, expected, dtype, &what);
            }
        });
    }
}

#[test]
fn masked_elements_are_zero_and_have_no_gradient() {
    for device in devices() {
        for_all(&device, |dtype, [rows, width]| {
            if rows == 200 || width == 1 {
                return;
            }
            let x = matrix([rows, width], 1.0, 1, &device, dtype);
            let masked = |at: usize| at % width % 3 == 1;
            for mask in [f32::NEG_INFINITY, -1e9, -100.0] {
                let elements = elements_of(&x).into_iter().enumerate();
                let elements: Vec<f32> =
                    elements.map(|(at, x)| if masked(at) { mask } else { x as f32 }).collect();
                let input = tensor(&elements, &device, dtype).reshape([rows, width]);
                let weights = matrix([rows, width], 1.0, 2, &device, dtype);
                let burns = |x| activation::softmax(x, 1);
                let expected = with_gradient(burns, exact(&input), exact(&weights));
                let found = with_gradient(|x| softmax(x, 1), input, weights);
                let what = format!("{mask} in {dtype:?} on {device:?}");
                for found in &found {
                    let mut of_masked = (0..rows * width).filter(|&at| masked(at));
                    assert!(of_masked.all(|at| found[at] == 0.0), "{what}");
                }
                assert_results(found, expected, dtype, &what);
            }
        });
    }
}

/// Burn has NaN in these rows as well.
#[test]
fn a_row_without_a_softmax_is_nan_and_others_are_not() {
    for device in devices() {
        for_all(&device, |dtype, [rows, width]| {
            if rows != 3 {
                return;
            }
            for wrong in [f32::NAN, f32::NEG_INFINITY] {
                let mut elements = vec![0.25; 3 * width];
                // One NaN, or a row of nothing but negative infinity.
                let row = if wrong.is_nan() { width - 1..width } else { 0..width };
                elements[width..2 * width][row].fill(wrong);
                let input = tensor(&elements, &device, dtype).reshape([3, width]);
                let found = elements_of(&softmax(input.clone(), 1));
                let expected = elements_of(&activation::softmax(exact(&input), 1));
                assert_eq!((found.len(), expected.len()), (3 * width, 3 * width));
                for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert_eq!(expected.is_nan(), at / width == 1);
                    assert_eq!(found.is_nan(), expected.is_nan(), "{wrong} {dtype:?} {device:?}");
                    assert!(found.is_nan() || (found - expected).abs() < 0.01);
                }
            }
        });
    }
}

#[test]
fn a_transposed_input_keeps_its_order() {
    for device in devices() {
        let x = matrix([64, 7], 4.0, 1, &device, FloatDType::F32);
        let weights = matrix([64, 7], 1.0, 2, &device, FloatDType::F32);
        let transposed = |x: &Tensor<2>| x.clone().transpose().mul_scalar(1.0).transpose();
        let straight = with_gradient(|x| softmax(x, 1), x.clone(), weights.clone());
        let found = with_gradient(|x| softmax(x, 1), transposed(&x), transposed(&weights));
        assert_eq!(found, straight, "{device:?}");
    }
}

#[test]
fn every_leading_dimension_counts_rows() {
    for device in devices() {
        let x = matrix([24, 100], 4.0, 1, &device, FloatDType::F32);
        let flat = elements_of(&softmax(x.clone(), -1));
        let cubic = softmax(x.clone().reshape([2, 3, 4, 100]), 3);
        assert_eq!((cubic.dims(), elements_of(&cubic)), ([2, 3, 4, 100], flat.clone()));
        assert_eq!(elements_of(&softmax(x.narrow(0, 0, 1).reshape([100]), 0)), flat[..100]);
    }
}

#[test]
fn other_dimensions_and_dtypes_are_composed() {
    for device in devices() {
        let x = matrix([5, 7], 4.0, 1, &device, FloatDType::F32);
        let found = elements_of(&softmax(x.clone(), 0));
        let expected = elements_of(&activation::softmax(exact(&x), 0));
        assert_rounded(&found, &expected, FloatDType::F32, "over the first dimension");
    }
    let x = exact(&matrix([5, 7], 4.0, 1, &Device::flex(), FloatDType::F32));
    let weights = exact(&matrix([5, 7], 1.0, 2, &Device::flex(), FloatDType::F32));
    let expected = with_gradient(|x| activation::softmax(x, 1), x.clone(), weights.clone());
    assert_eq!(with_gradient(|x| softmax(x, 1), x, weights), expected);
}

#[test]
fn a_tensor_without_elements_has_a_result_without() {
    for device in devices() {
        assert_eq!(softmax(Tensor::<3>::zeros([2, 0, 7], &device), 2).dims(), [2, 0, 7]);
    }
}

#[test]
#[should_panic]
fn a_dimension_that_is_not_there_is_an_error() {
    softmax(Tensor::<2>::zeros([2, 7], &Device::flex()), 2);
}
