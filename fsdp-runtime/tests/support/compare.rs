//! Comparisons of numbers and of model states that fail on missing or extra elements.
//!
//! A `zip` ends with the shorter side, so that a comparison of pairs alone passes where one side is
//! empty. Everything here first asserts that both sides have the same number of elements, and that
//! there are any.
//!
//! Tests of the workspace include this file by its path.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::BTreeMap;
use std::fmt::{Debug, Display};

use burn::tensor::TensorData;
use fsdp_runtime::state::FullState;

/// The largest difference between a value and the expected one.
#[derive(Clone, Copy, Debug)]
pub enum Within {
    /// The same bound for every element.
    Absolute(f64),
    /// A share of the expected value's magnitude.
    Relative(f64),
    /// A share of the expected value's magnitude, or of 1 where the magnitude is smaller.
    Scaled(f64),
    /// A share of the expected value's magnitude, or of `least` where the magnitude is smaller.
    ScaledFrom { least: f64, share: f64 },
}

impl Within {
    fn bound(self, expected: f64) -> f64 {
        match self {
            Self::Absolute(bound) => bound,
            Self::Relative(share) => share * expected.abs(),
            Self::Scaled(share) => share * expected.abs().max(1.0),
            Self::ScaledFrom { least, share } => share * expected.abs().max(least),
        }
    }
}

/// Asserts that `found` has as many elements as `expected`, at least one, and each within the
/// bound.
///
/// NaN and infinity are within no bound.
#[track_caller]
pub fn assert_close<T: Copy + Debug + Into<f64>>(
    found: &[T],
    expected: &[T],
    within: Within,
    what: impl Display,
) {
    assert_comparable(found.len(), expected.len(), &what);
    for (index, (&a, &b)) in found.iter().zip(expected).enumerate() {
        let (a, b): (f64, f64) = (a.into(), b.into());
        let bound = within.bound(b);
        let is_close = bound.is_finite() && (a - b).abs() <= bound;
        assert!(is_close, "{what}, element {index}: {a} is not {b} within {bound:e}");
    }
}

/// Asserts that `found` has as many elements as `expected`, at least one, and each the same bits.
#[track_caller]
pub fn assert_same_bits<T: Bits>(found: &[T], expected: &[T], what: impl Display) {
    assert_comparable(found.len(), expected.len(), &what);
    let differing = found.iter().zip(expected).position(|(a, b)| a.bits() != b.bits());
    if let Some(index) = differing {
        let (a, b) = (found[index], expected[index]);
        panic!("{what}, element {index} differs first: {a:?} and {b:?}");
    }
}

#[track_caller]
fn assert_comparable(found: usize, expected: usize, what: &impl Display) {
    assert_eq!(found, expected, "{what}: number of elements");
    assert!(found > 0, "{what}: there is nothing to compare");
}

/// A number that can be compared by its bits, by which 0 and -0 differ and NaN equals itself.
pub trait Bits: Copy + Debug {
    fn bits(self) -> u64;
}

impl Bits for f32 {
    fn bits(self) -> u64 {
        self.to_bits().into()
    }
}

impl Bits for f64 {
    fn bits(self) -> u64 {
        self.to_bits()
    }
}

/// The elements of parameters by path.
pub type Parameters = BTreeMap<String, Vec<f32>>;

/// Asserts that `found` has the parameters of `expected`, at least one, and each element within the
/// bound.
#[track_caller]
pub fn assert_parameters_close(
    found: &Parameters,
    expected: &Parameters,
    within: Within,
    what: impl Display,
) {
    assert_comparable(found.len(), expected.len(), &what);
    for (path, expected) in expected {
        let found = found.get(path).unwrap_or_else(|| panic!("{what}: `{path}` is missing"));
        assert_close(found, expected, within, format_args!("{what}, `{path}`"));
    }
}

/// Asserts that two states have the same tensors, at least one, with the same shapes and bits.
#[track_caller]
pub fn assert_same_state(found: &FullState, expected: &FullState, what: impl Display) {
    assert_same_tensors(found, expected, &what);
    for (path, data) in found {
        assert!(data.as_bytes() == expected[path].as_bytes(), "{what}: `{path}` differs");
    }
}

/// Asserts that two states have the same tensors with the same shapes, and differ in some element.
#[track_caller]
pub fn assert_state_differs(one: &FullState, other: &FullState, what: impl Display) {
    assert_same_tensors(one, other, &what);
    let differs = |(path, data): (&String, &TensorData)| data.as_bytes() != other[path].as_bytes();
    assert!(one.iter().any(differs), "{what}: every element is the same");
}

#[track_caller]
fn assert_same_tensors(one: &FullState, other: &FullState, what: &impl Display) {
    assert_comparable(one.len(), other.len(), what);
    for (path, data) in one {
        let other = other.get(path).unwrap_or_else(|| panic!("{what}: `{path}` is missing"));
        assert_eq!(
            (data.dtype(), data.shape()),
            (other.dtype(), other.shape()),
            "{what}: `{path}`"
        );
        assert!(data.num_elements() > 0, "{what}: `{path}` is empty");
    }
}
