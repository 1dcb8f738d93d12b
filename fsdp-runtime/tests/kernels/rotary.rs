//! Rotary positions and their gradients against Burn's layer, and against the formula in f64.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Device, FloatDType, Int, Tensor};
use fsdp_runtime::nn::{RotaryEncoding, RotaryEncodingConfig, RotaryPairs};

use super::rows::{assert_rounded, matrix};
use super::support::{devices, dtypes, elements_of, exact, with_gradient};

const PAIRS: [RotaryPairs; 2] = [RotaryPairs::Interleaved, RotaryPairs::Halves];
/// Shapes `[batch, heads, length, width]`: the least, pairs of single elements, and several tasks.
const SHAPES: [[usize; 4]; 4] = [[1, 1, 1, 2], [2, 3, 5, 6], [2, 2, 7, 64], [3, 8, 40, 128]];

fn rotary(width: usize, pairs: RotaryPairs, device: &Device) -> RotaryEncoding {
    RotaryEncodingConfig::new(50, width).with_pairs(pairs).init(device)
}

fn heads(shape: [usize; 4], seed: usize, device: &Device, dtype: FloatDType) -> Tensor<4> {
    let rows = shape[..3].iter().product();
    matrix([rows, shape[3]], 2.0, seed, device, dtype).reshape(shape)
}

/// Returns rows rotated in f64 by the formula, at positions `[batch, length]`.
fn plain(x: &Tensor<4>, positions: &[Vec<usize>], pairs: RotaryPairs, sign: f64) -> Vec<f64> {
    let [_, heads, length, width] = x.dims();
    let mut elements = elements_of(x);
    for (index, row) in elements.chunks_mut(width).enumerate() {
        let position = positions[index / (heads * length)][index % length];
        for pair in 0..width / 2 {
            let (i, j) = match pairs {
                RotaryPairs::Interleaved => (2 * pair, 2 * pair + 1),
                _ => (pair, pair + width / 2),
            };
            let frequency = 10_000f64.powf(-2.0 * pair as f64 / width as f64);
            let angle = sign * position as f64 * frequency;
            let (a, b) = (row[i], row[j]);
            row[i] = a * angle.cos() - b * angle.sin();
            row[j] = b * angle.cos() + a * angle.sin();
        }
    }
    elements
}

/// Returns positions that begin again in the middle of a row, `[batch, length]`.
fn packed([batch, _, length, _]: [usize; 4]) -> Vec<Vec<usize>> {
    let row = |batch: usize| (0..length).map(|at| (at + batch) % (length / 2 + 1)).collect();
    (0..batch).map(row).collect()
}

fn positions_of(positions: &[Vec<usize>], device: &Device) -> Tensor<2, Int> {
    let shape = [positions.len(), positions[0].len()];
    let numbers: Vec<i64> = positions.concat().iter().map(|&position| position as i64).collect();
    Tensor::<1, Int>::from_data(numbers.as_slice(), device).reshape(shape)
}

#[test]
fn values_and_gradients_are_exact() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for (shape, pairs) in SHAPES.into_iter().flat_map(|shape| PAIRS.map(|it| (shape, it))) {
                let rotary = rotary(shape[3], pairs, &device);
                let x = heads(shape, 1, &device, dtype);
                let weights = heads(shape, 2, &device, dtype);
                let [batch, _, length, _] = shape;
                let following: Vec<Vec<usize>> = vec![(3..3 + length).collect(); batch];
                let packed = packed(shape);
                let given = positions_of(&packed, &device);
                let results = [
                    (with_gradient(|x| rotary.apply(x, 3), x.clone(), weights.clone()), following),
                    (
                        with_gradient(
                            |x| rotary.forward_with_positions(x, given.clone()),
                            x.clone(),
                            weights.clone(),
                        ),
                        packed,
                    ),
                ];
                for ([values, gradient], positions) in results {
                    let what = format!("{shape:?} {pairs:?} in {dtype:?} on {device:?}");
                    assert_rounded(&values, &plain(&x, &positions, pairs, 1.0), dtype, &what);
                    let expected = plain(&weights, &positions, pairs, -1.0);
                    assert_rounded(&gradient, &expected, dtype, &format!("gradient of {what}"));
                }
            }
        }
    }
}

#[test]
fn burns_layer_has_the_same_results() {
    for device in devices() {
        let ours = rotary(16, RotaryPairs::default(), &device);
        let burns = burn::nn::RotaryEncodingConfig::new(50, 16).init(&device);
        let x = heads([2, 3, 20, 16], 1, &device, FloatDType::F32);
        let cube = x.clone().reshape([6, 20, 16]);
        let check = |found: Vec<f64>, expected: Vec<f64>| {
            assert_rounded(&found, &expected, FloatDType::F32, &format!("{device:?}"));
        };
        check(elements_of(&ours.forward(x.clone())), elements_of(&burns.forward(x.clone())));
        check(elements_of(&ours.apply(x.clone(), 7)), elements_of(&burns.apply(x, 7)));
        let found = ours.forward(cube.clone());
        assert_eq!(found.dims(), [6, 20, 16]);
        check(elements_of(&found), elements_of(&burns.forward(cube)));
        assert_eq!(ours.to_string(), burns.to_string());
    }
}

/// Heads that are a view of `[batch, length, heads, width]` are read in place.
#[test]
fn heads_may_be_transposed_or_sliced() {
    for device in devices() {
        for (pairs, width) in
            PAIRS.into_iter().flat_map(|pairs| [6, 64].map(|width| (pairs, width)))
        {
            let rotary = rotary(width, pairs, &device);
            let x = heads([2, 3, 5, width], 1, &device, FloatDType::F32);
            let weights = heads([2, 3, 5, width], 2, &device, FloatDType::F32);
            let expected = with_gradient(|x| rotary.forward(x), x.clone(), weights.clone());
            let transposed =
                |x: &Tensor<4>| x.clone().swap_dims(1, 2).mul_scalar(1.0).swap_dims(1, 2);
            let found = with_gradient(|x| rotary.forward(x), transposed(&x), transposed(&weights));
            assert_eq!(found, expected, "{pairs:?} {width} {device:?}");

            let last = rotary.forward(transposed(&x).narrow(1, 1, 2));
            let expected = rotary.forward(x.clone()).narrow(1, 1, 2);
            assert_eq!(last.into_data(), expected.into_data(), "{pairs:?} {width} {device:?}");
            // Rows whose elements are no neighbours.
            let crossed = x.clone().swap_dims(2, 3).mul_scalar(1.0).swap_dims(2, 3);
            assert_eq!(rotary.forward(crossed).into_data(), rotary.forward(x).into_data());
        }
    }
}

#[test]
fn query_and_key_may_differ_in_heads() {
    for device in devices() {
        let rotary = rotary(8, RotaryPairs::Halves, &device);
        let query = heads([2, 4, 5, 8], 1, &device, FloatDType::F32);
        let key = heads([2, 1, 5, 8], 2, &device, FloatDType::F32);
        let given = positions_of(&packed([2, 4, 5, 8]), &device);
        for positions in [None, Some(given)] {
            let (q, k) = rotary.forward_query_key(query.clone(), key.clone(), positions.clone());
            let alone = |x: &Tensor<4>| match &positions {
                None => rotary.forward(x.clone()),
                Some(positions) => rotary.forward_with_positions(x.clone(), positions.clone()),
            };
            assert_eq!(q.into_data(), alone(&query).into_data());
            assert_eq!(k.into_data(), alone(&key).into_data());
        }
    }
}

#[test]
fn other_dtypes_are_composed() {
    let flex = Device::flex();
    let shape = [2, 3, 5, 6];
    let [x, weights] = [1, 2].map(|seed| exact(&heads(shape, seed, &flex, FloatDType::F32)));
    let packed = packed(shape);
    for pairs in PAIRS {
        let rotary = rotary(6, pairs, &flex.clone().autodiff());
        let given = positions_of(&packed, &flex.clone().autodiff());
        let rotate = |x| rotary.forward_with_positions(x, given.clone());
        let [values, gradient] = with_gradient(rotate, x.clone(), weights.clone());
        // The table is in f32.
        assert_rounded(&values, &plain(&x, &packed, pairs, 1.0), FloatDType::F32, "values");
        let expected = plain(&weights, &packed, pairs, -1.0);
        assert_rounded(&gradient, &expected, FloatDType::F32, "gradient");
    }
}

#[test]
fn an_input_without_elements_has_a_result_without() {
    for device in devices() {
        let rotary = rotary(8, RotaryPairs::Halves, &device);
        let found = rotary.forward(Tensor::<4>::zeros([2, 0, 5, 8], &device));
        assert_eq!(found.dims(), [2, 0, 5, 8]);
    }
}

/// Returns the message of a panic.
fn panic_of(f: impl FnOnce() -> Tensor<4>) -> String {
    let panic = catch_unwind(AssertUnwindSafe(f)).expect_err("a panic");
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|it| it.to_string())).expect("a message")
}

#[test]
fn wrong_uses_say_what_would_be_right() {
    let device = Device::flex();
    let rotary = rotary(8, RotaryPairs::Halves, &device);
    let x = |length, width| Tensor::<4>::zeros([1, 1, length, width], &device);
    let message = panic_of(|| rotary.forward(x(3, 6)));
    assert!(message.contains("must be `d_model`"), "{message}");
    let message = panic_of(|| rotary.forward(x(51, 8)));
    assert!(message.contains("position 50 is beyond this encoding"), "{message}");
    let message = panic_of(|| rotary.apply(x(3, 8), 48));
    assert!(message.contains("whose `max_sequence_length` is 50"), "{message}");
    let at = |positions: &[Vec<usize>]| {
        let positions = positions_of(positions, &device);
        panic_of(|| rotary.forward_with_positions(x(3, 8), positions))
    };
    let message = at(&[vec![0, 1]]);
    assert!(message.contains("positions must be `[batch, length]`"), "{message}");
    let message = at(&[vec![0, 50, 1]]);
    assert!(message.contains("position 50 is beyond the rotary encoding"), "{message}");
    let negative = Tensor::<2, Int>::from_data([[0, -1, 1]], &device);
    let message = panic_of(|| rotary.forward_with_positions(x(3, 8), negative));
    assert!(message.contains("positions must not be negative"), "{message}");
}

/// The host does not know the positions of a CubeCL device.
#[test]
fn positions_beyond_the_table_are_nan_on_other_devices() {
    for device in devices().filter(|device| *device != Device::flex()) {
        for pairs in PAIRS {
            let rotary = rotary(8, pairs, &device);
            let x = heads([1, 2, 4, 8], 1, &device, FloatDType::F32);
            let positions = Tensor::<2, Int>::from_data([[49, 50, -1, 0]], &device);
            let found = elements_of(&rotary.forward_with_positions(x, positions));
            assert_eq!(found.len(), 64);
            for (at, x) in found.iter().enumerate() {
                assert_eq!(x.is_nan(), [1, 2].contains(&(at / 8 % 4)), "{x} at {at}");
            }
        }
    }
}
