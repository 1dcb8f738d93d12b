//! A probe of an optimizer: small matrices whose steps show whether the optimizer updates each
//! element by itself.
//!
//! A shard is a flat piece of a matrix. Stepping shards gives the result of unsharded training only
//! if the update of an element depends on no other element. All parts of a probe end with the same
//! elements. [`Part::Piece`] consists of them alone, in the shape of a shard. The elements before
//! them have small gradients in [`Part::Small`] and [`Part::Wide`], and huge ones in
//! [`Part::Huge`]:
//!
//! - If the last elements of `Small` differ from `Piece`, the optimizer combines elements. The norm
//!   of `Small` is below any reasonable limit of clipping, so it does more than clip.
//! - If only those of `Huge` differ, the optimizer clips by norm. The squares of the huge gradients
//!   overflow, so any limit scales the other gradients to zero.
//! - If only those of `Wide` differ, the optimizer combines the elements of large matrices, or in
//!   the last step, in which `Wide` has huge gradients too, clips these by norm.
//!
//! Half of the compared elements are 0, so that a small update is not lost in rounding. In the
//! first step their gradients range from 1e-12 to 1e-5, below and above the ε of adaptive
//! optimizers, whose first step hides the scale of larger gradients. Later steps multiply each
//! gradient by a factor of its own. Otherwise ratios such as g²/v would be equal for all elements,
//! and so would be their means over a whole matrix and over a piece. Each step starts at the same
//! values.

use burn::module::ParamId;
use burn::tensor::{Device, Tensor, TensorData};

use crate::layout::mix;

/// Number of steps of a probe. Ratios of gradients to their running averages differ from the second
/// step on.
pub(crate) const STEPS: usize = 3;

/// Number of elements of [`Part::Piece`], the last elements of the other parts.
const COMPARED: usize = 16;

/// Shape of [`Part::Wide`]. Optimizers that treat only large matrices otherwise begin at 128 rows
/// and columns, as Adafactor does in Optax.
const WIDE: [usize; 2] = [160, 160];

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
    Wide,
}

impl Part {
    /// The parts of a full probe.
    pub(crate) const ALL: [Self; 4] = [Self::Huge, Self::Small, Self::Piece, Self::Wide];

    /// The parts of a probe of a few hundred bytes.
    pub(crate) const NARROW: [Self; 3] = [Self::Huge, Self::Small, Self::Piece];

    /// Returns the id under which an optimizer steps this part of the probe of parameter `id`.
    pub(crate) fn id(self, id: ParamId) -> ParamId {
        let mask = match self {
            Self::Huge => 0x9e37_79b9_7f4a_7c15,
            Self::Small => 0xbf58_476d_1ce4_e5b9,
            Self::Piece => 0x94d0_49bb_1331_11eb,
            Self::Wide => 0xd6e8_feb8_6659_fd93,
        };
        ParamId::from(id.val() ^ mask)
    }

    fn shape(self) -> [usize; 2] {
        match self {
            Self::Huge | Self::Small => [4, COMPARED / 2],
            // A shard of a matrix has the shape `[n, 1]`.
            Self::Piece => [COMPARED, 1],
            Self::Wide => WIDE,
        }
    }

    /// Returns the value before each step, without autodiff.
    pub(crate) fn value(self, device: &Device) -> Tensor<2> {
        self.tensor(|i| 3.0 + 0.1 * (i % COMPARED) as f32, compared_value, device)
    }

    /// Returns the gradient of a step, without autodiff. Steps from [`STEPS`] on have gradients of
    /// the same kinds.
    fn gradient(self, step: usize, device: &Device) -> Tensor<2> {
        let kind = step % STEPS;
        // The other elements grow while the compared ones are mixed, and shrink while these grow.
        // So a mean of ratios to running averages differs between the whole and the piece.
        let other = |i: usize| match self {
            Self::Huge => sign(i) * HUGE,
            Self::Wide if kind == STEPS - 1 => sign(i) * HUGE,
            _ => sign(i) * 4e-6 * (1 + i % 5) as f32 * [1.0, 8.0, 0.25][kind],
        };
        let compared = |i: usize| {
            let first = sign(i / 2) * 10f32.powf(-12.0 + 7.0 * i as f32 / 15.0);
            first * if step == 0 { 1.0 } else { factor(step, i) * [1.0, 1.0, 4.0][kind] }
        };
        self.tensor(other, compared, device)
    }

    fn tensor(
        self,
        other: impl Fn(usize) -> f32,
        compared: impl Fn(usize) -> f32,
        device: &Device,
    ) -> Tensor<2> {
        let shape = self.shape();
        let others = (0..shape[0] * shape[1] - COMPARED).map(other);
        let elements: Vec<_> = others.chain((0..COMPARED).map(compared)).collect();
        Tensor::from_data(TensorData::new(elements, shape), device)
    }
}

/// Gradients of probes. Probes on a device share them.
#[derive(Debug, Default)]
pub(crate) struct ProbeGradients(Vec<(Device, Part, usize, Tensor<2>)>);

impl ProbeGradients {
    /// Returns the gradient of a part in a step.
    pub(crate) fn get(&mut self, part: Part, step: usize, device: &Device) -> Tensor<2> {
        let same = |entry: &&(Device, Part, usize, Tensor<2>)| {
            (&entry.0, entry.1, entry.2) == (device, part, step)
        };
        if let Some((.., gradient)) = self.0.iter().find(same) {
            return gradient.clone();
        }
        let gradient = part.gradient(step, device);
        self.0.push((device.clone(), part, step, gradient.clone()));
        gradient
    }
}

/// Returns a pseudo-random factor of one element's gradient: of either sign, and from 1/4 to 4.
fn factor(step: usize, i: usize) -> f32 {
    let bits = mix((step * COMPARED + i) as u64);
    let fraction = (bits >> 40) as f32 / (1u64 << 24) as f32;
    let size = 4f32.powf(2.0 * fraction - 1.0);
    if bits & 1 == 0 { size } else { -size }
}

/// Returns a compared element of a value.
fn compared_value(i: usize) -> f32 {
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
    /// Judges the values after a step, given in the order of [`Part::ALL`] or [`Part::NARROW`].
    pub(crate) fn of(parts: &[Vec<f32>]) -> Self {
        let compared = |part: &Vec<f32>| {
            let from = part.len().checked_sub(COMPARED)?;
            Some(part[from..].to_vec())
        };
        let Some(parts) = parts.iter().map(compared).collect::<Option<Vec<_>>>() else {
            return Self::NeedsMatrix;
        };
        let [huge, small, piece, wide @ ..] = &*parts else {
            unreachable!("a probe has three parts or more")
        };
        let starts = |values: &Vec<f32>| {
            values.iter().enumerate().all(|(i, value)| *value == compared_value(i))
        };
        if parts.iter().all(starts) {
            return Self::Silent;
        }
        if !close(small, piece) {
            Self::NeedsMatrix
        } else if !close(huge, piece) {
            Self::ClipsByNorm
        } else if wide.iter().all(|wide| close(wide, piece)) {
            Self::ElementWise
        } else {
            Self::NeedsMatrix
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
    left.iter().zip(right).all(equal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::param_group::probes::{NARROW_ELEMENTS, WIDE_ELEMENTS};

    #[test]
    fn the_forecast_has_the_sizes_of_the_parts() {
        let numel = |part: &Part| part.shape().iter().product::<usize>();
        assert_eq!(Part::NARROW.iter().map(numel).sum::<usize>(), NARROW_ELEMENTS);
        assert_eq!(numel(&Part::Wide), WIDE_ELEMENTS);
        assert_eq!(Part::ALL.iter().map(numel).sum::<usize>(), NARROW_ELEMENTS + WIDE_ELEMENTS);
    }
}
