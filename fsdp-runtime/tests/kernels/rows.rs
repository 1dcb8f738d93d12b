//! Shapes, numbers and comparisons for the kernels on rows.

use burn::tensor::{Device, FloatDType, Tensor};

use super::support::{dtypes, tensor};

/// Numbers of rows: one, several, and more than groups of rows on a CPU.
const ROWS: [usize; 3] = [1, 3, 200];
/// Lengths of rows: one element, less than a vector, whole vectors, vectors of two sizes.
const WIDTHS: [usize; 6] = [1, 7, 64, 100, 768, 1000];

/// Calls `f` with every shape, and with f32 on Flex and every dtype that other devices support.
pub fn for_all(device: &Device, f: impl Fn(FloatDType, [usize; 2])) {
    let of_kernels = |dtype: &FloatDType| *dtype == FloatDType::F32 || *device != Device::flex();
    for_shapes(dtypes(device).filter(of_kernels), f);
}

/// Calls `f` with every shape, and with every dtype that the device supports.
pub fn for_all_dtypes(device: &Device, f: impl Fn(FloatDType, [usize; 2])) {
    for_shapes(dtypes(device), f);
}

fn for_shapes(dtypes: impl Iterator<Item = FloatDType>, f: impl Fn(FloatDType, [usize; 2])) {
    for dtype in dtypes {
        for (rows, width) in ROWS.into_iter().flat_map(|rows| WIDTHS.map(|width| (rows, width))) {
            f(dtype, [rows, width]);
        }
    }
}

/// Returns a matrix of numbers from `-scale` to `scale`, unevenly. Multiples of `scale` / 128 are exact
/// in every dtype if `scale` is a power of two.
pub fn matrix(
    [rows, width]: [usize; 2],
    scale: f32,
    seed: usize,
    device: &Device,
    dtype: FloatDType,
) -> Tensor<2> {
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 257) as f32 / 128.0 - 1.0;
    let numbers: Vec<f32> = (0..rows * width).map(|i| number(i) * scale).collect();
    tensor(&numbers, device, dtype).reshape([rows, width])
}

/// Returns some units in the last place of `dtype`, relative to the number.
pub fn share(dtype: FloatDType) -> f64 {
    match dtype {
        FloatDType::BF16 => 1.0 / 128.0,
        FloatDType::F16 => 1.0 / 1024.0,
        _ => 4e-6,
    }
}

/// Asserts that the elements of two tensors are equal to some units in the last place of `dtype`,
/// relative to the largest element.
#[track_caller]
pub fn assert_rounded(found: &[f64], expected: &[f64], dtype: FloatDType, what: &str) {
    assert_rounded_by(share(dtype), found, expected, what);
}

/// Asserts like [`assert_rounded`], relative to `least` where all elements are smaller.
#[track_caller]
pub fn assert_rounded_from(
    least: f64,
    found: &[f64],
    expected: &[f64],
    dtype: FloatDType,
    what: &str,
) {
    assert_shares([share(dtype), least], found, expected, what);
}

/// Asserts that the elements of two tensors are equal to this share of the largest element.
#[track_caller]
pub fn assert_rounded_by(share: f64, found: &[f64], expected: &[f64], what: &str) {
    assert_shares([share, 1e-3], found, expected, what);
}

#[track_caller]
fn assert_shares([share, least]: [f64; 2], found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    assert!(!found.is_empty(), "{what}");
    let largest = expected.iter().fold(least, |largest, x| largest.max(x.abs()));
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let close = (found - expected).abs() <= share * largest;
        assert!(close, "element {at} is {found}, not {expected}, of at most {largest}: {what}");
    }
}
