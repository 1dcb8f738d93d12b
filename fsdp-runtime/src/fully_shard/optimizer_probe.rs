//! A probe of an optimizer: three small matrices whose steps show whether the optimizer updates
//! each element by itself.
//!
//! A shard is a flat piece of a matrix. Stepping shards gives the result of unsharded training only
//! if the update of an element depends on no other element. All parts of a probe have the same
//! elements in their second half. [`Part::Piece`] consists of them alone, in the shape of a shard.
//! [`Part::Small`] has small gradients in its first half, and [`Part::Huge`] has huge ones:
//!
//! - If the second half of `Small` differs from `Piece`, the optimizer combines elements. The norm
//!   of `Small` is below any reasonable limit of clipping, so it does more than clip.
//! - If only `Huge` differs, the optimizer clips by norm. The squares of the huge gradients
//!   overflow, so any limit scales the gradients of the second half to zero.
//!
//! Half of the compared elements are 0, so that a small update is not lost in rounding. Their
//! gradients range from 1e-12 to 1e-5, below and above the ε of adaptive optimizers, whose first
//! step hides the scale of larger gradients.

use burn::module::ParamId;
use burn::tensor::{Device, Tensor, TensorData};

/// Number of elements of [`Part::Piece`], half of those of the other parts.
const HALF: usize = 16;

/// A gradient whose square overflows.
const HUGE: f32 = 1e30;

/// Largest relative difference that counts as rounding.
const ROUNDING: f32 = 1e-3;

/// A matrix of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Huge,
    Small,
    Piece,
}

impl Part {
    pub(crate) const ALL: [Self; 3] = [Self::Huge, Self::Small, Self::Piece];

    /// Returns the id under which an optimizer steps this part of the probe of parameter `id`.
    pub(crate) fn id(self, id: ParamId) -> ParamId {
        let mask = match self {
            Self::Huge => 0x9e37_79b9_7f4a_7c15,
            Self::Small => 0xbf58_476d_1ce4_e5b9,
            Self::Piece => 0x94d0_49bb_1331_11eb,
        };
        ParamId::from(id.val() ^ mask)
    }

    /// Returns the value before the first step, without autodiff.
    pub(crate) fn value(self, device: &Device) -> Tensor<2> {
        self.tensor(|i| 3.0 + 0.1 * i as f32, second_value, device)
    }

    /// Returns the gradient of the first step, without autodiff.
    pub(crate) fn gradient(self, device: &Device) -> Tensor<2> {
        let first = |i: usize| match self {
            Self::Huge => sign(i) * HUGE,
            _ => sign(i) * 4e-6 * (1 + i % 5) as f32,
        };
        let second = |i: usize| sign(i / 2) * 10f32.powf(-12.0 + 7.0 * i as f32 / 15.0);
        self.tensor(first, second, device)
    }

    /// Returns a tensor of the shape of this part. A shard of a matrix has the shape `[n, 1]`.
    fn tensor(
        self,
        first: impl Fn(usize) -> f32,
        second: impl Fn(usize) -> f32,
        device: &Device,
    ) -> Tensor<2> {
        let second = (0..HALF).map(second);
        let data = match self {
            Self::Piece => TensorData::new(second.collect::<Vec<_>>(), [HALF, 1]),
            _ => {
                let elements: Vec<_> = (0..HALF).map(first).chain(second).collect();
                TensorData::new(elements, [4, HALF / 2])
            }
        };
        Tensor::from_data(data, device)
    }
}

/// Returns an element of the second half of a value.
fn second_value(i: usize) -> f32 {
    if i.is_multiple_of(2) { 0.0 } else { 0.25 + 0.05 * i as f32 }
}

fn sign(i: usize) -> f32 {
    if i.is_multiple_of(3) { -1.0 } else { 1.0 }
}

/// Result of the steps of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing changed: the learning rate is 0, or the optimizer did not get the gradients.
    Silent,
    /// The update of an element depends on this element alone.
    ElementWise,
    /// Gradients are clipped by norm.
    ClipsByNorm,
    /// The update of an element depends on other elements.
    NeedsMatrix,
}

impl Verdict {
    /// Judges stepped values, given in the order of [`Part::ALL`].
    pub(crate) fn of([huge, small, piece]: &[Vec<f32>; 3]) -> Self {
        let starts =
            |values: &[f32]| values.iter().enumerate().all(|(i, value)| *value == second_value(i));
        let (Some(huge), Some(small)) = (huge.get(HALF..), small.get(HALF..)) else {
            return Self::NeedsMatrix;
        };
        if [huge, small, piece].into_iter().all(starts) {
            return Self::Silent;
        }
        match (close(small, piece), close(huge, piece)) {
            (true, true) => Self::ElementWise,
            (true, false) => Self::ClipsByNorm,
            (false, _) => Self::NeedsMatrix,
        }
    }
}

/// Returns whether two results are equal up to rounding.
fn close(left: &[f32], right: &[f32]) -> bool {
    let equal = |(a, b): (&f32, &f32)| {
        // A device may flush subnormal numbers to zero.
        let limit = ROUNDING * a.abs().max(b.abs()) + f32::MIN_POSITIVE;
        a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= limit
    };
    left.len() == right.len() && left.iter().zip(right).all(equal)
}
