//! The exponential function as arithmetic that the compiler vectorises.

/// Smallest exponent for which eˣ is a normal f32, rounded up to an integer.
pub(super) const LEAST: f32 = -87.0;

/// Returns eˣ for x ≤ 0, accurate to 2 units in the last place. Below [`LEAST`] it is e to the power of
/// `LEAST`.
///
/// Computes 2ⁿ · eʳ with |r| ≤ ln 2 / 2, where the Taylor polynomial of degree 7 for eʳ leaves a
/// remainder below 6e-9. The code has neither branches nor calls, so that the compiler vectorises
/// the loops around it.
#[inline(always)]
pub(super) fn exp_of_negative(x: f32) -> f32 {
    /// 1.5 · 2²³. Adding and subtracting it rounds an f32 to an integer; after the addition the
    /// low bits of the sum hold that integer.
    const ROUND: f32 = 12_582_912.0;
    // Unlike `f32::max` this keeps a NaN.
    let x = if x < LEAST { LEAST } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let high = 1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0)));
    let power = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * high)));
    let exponent = (shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127)) << 23;
    power * f32::from_bits(exponent)
}
