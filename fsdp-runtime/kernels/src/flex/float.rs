//! Element types of the kernels: f32, bf16 and f16, with conversions from and to f32.
//!
//! The conversions are branch-free arithmetic on bits, so that the compiler vectorises the loops
//! that call them.

use std::mem::MaybeUninit;

use burn::backend::flex::FlexTensor;
use burn::tensor::Element;
use half::{bf16, f16};
use multiversion::multiversion;

use super::prefetch::{PREFETCH_EVERY, prefetch};

// `dropped` reads pairs of elements as one integer, the first element in the lower half.
const _: () = assert!(cfg!(target_endian = "little"), "kernels are for little-endian processors");

/// Returns the tensor if it is contiguous, else a contiguous copy.
pub(super) fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// Returns the elements of a contiguous tensor.
pub(super) fn slice<E: KernelFloat>(tensor: &FlexTensor) -> &[E] {
    tensor.as_slice().expect("a contiguous tensor of this dtype")
}

/// Element type that the kernels support.
pub(crate) trait KernelFloat: Element + bytemuck::Pod + Send + Sync {
    /// Converts to f32, exactly.
    fn wide(self) -> f32;

    /// Rounds an f32 to the nearest value of this type, ties to even.
    fn narrow(wide: f32) -> Self;

    /// Rounds an f32 as [`narrow`](Self::narrow) does. `wide` must be the product of an element and
    /// a finite factor, which allows a faster implementation.
    #[inline(always)]
    fn narrow_product(wide: f32) -> Self {
        Self::narrow(wide)
    }

    /// Applies dropout: multiplies each element by a finite factor, or writes zero if the element's
    /// draw is below the threshold.
    ///
    /// Each number of `draws` holds the sixteen-bit draws of a pair of elements, the first in its
    /// lower half. A draw is compared with the threshold as the upper half of a signed 32-bit
    /// integer.
    #[inline(always)]
    fn dropped<const PAIRS: usize>(
        source: &[[Self; 2]; PAIRS],
        draws: &[u32; PAIRS],
        (threshold, factor): (i32, f32),
        target: &mut [[MaybeUninit<Self>; 2]; PAIRS],
    ) {
        let draws: &[[u16; 2]] = bytemuck::cast_slice(draws);
        let (source, draws) = (source.as_flattened(), draws.as_flattened());
        for (at, target) in target.as_flattened_mut().iter_mut().enumerate() {
            let product = Self::narrow_product(source[at].wide() * factor);
            let below = (u32::from(draws[at]) << 16).cast_signed() < threshold;
            target.write(if below { Self::zeroed() } else { product });
        }
    }

    /// Returns the elements as f32: `source` itself, or converted in `scratch`, which has at least
    /// the length of `source`.
    fn widened<'a>(source: &'a [Self], scratch: &'a mut [f32]) -> &'a [f32] {
        let scratch = &mut scratch[..source.len()];
        widen(source, scratch);
        scratch
    }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn widen<E: KernelFloat>(source: &[E], target: &mut [f32]) {
    for (target, source) in target.chunks_mut(PREFETCH_EVERY).zip(source.chunks(PREFETCH_EVERY)) {
        prefetch(source);
        for (target, source) in target.iter_mut().zip(source) {
            *target = source.wide();
        }
    }
}

impl KernelFloat for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        wide
    }

    fn widened<'a>(source: &'a [Self], _: &'a mut [f32]) -> &'a [f32] {
        source
    }
}

impl KernelFloat for bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits();
        // Rounding could turn a NaN into infinity, so a NaN keeps its upper bits and becomes quiet.
        let nan = bits | 0x40_0000;
        let bits = if bits & 0x7FFF_FFFF > INFINITY { nan } else { add_half(bits) };
        Self::from_bits((bits >> 16) as u16)
    }

    #[inline(always)]
    fn narrow_product(wide: f32) -> Self {
        // The lower half of a NaN that was widened from bf16 is zero, so rounding does not change
        // it.
        Self::from_bits((add_half(wide.to_bits()) >> 16) as u16)
    }

    /// Processes each pair of elements as one integer, which avoids moves between lanes of a
    /// register.
    #[inline(always)]
    fn dropped<const PAIRS: usize>(
        source: &[[Self; 2]; PAIRS],
        draws: &[u32; PAIRS],
        (threshold, factor): (i32, f32),
        target: &mut [[MaybeUninit<Self>; 2]; PAIRS],
    ) {
        let product = |upper: u32| add_half((f32::from_bits(upper) * factor).to_bits());
        for at in 0..PAIRS {
            let pair: u32 = bytemuck::cast(source[at]);
            let (first, second) = (product(pair << 16) >> 16, product(pair & UPPER) & UPPER);
            let mask_first = if (draws[at] << 16).cast_signed() < threshold { 0 } else { !UPPER };
            let mask_second = if draws[at].cast_signed() < threshold { 0 } else { UPPER };
            let kept = (first | second) & (mask_first | mask_second);
            target[at] = bytemuck::cast::<u32, [Self; 2]>(kept).map(MaybeUninit::new);
        }
    }
}

/// Adds half a unit of the last place of bf16, minus one bit if the last place is even: cutting off
/// the lower half then rounds to the nearest, ties to even.
#[inline(always)]
fn add_half(bits: u32) -> u32 {
    bits.wrapping_add(0x7FFF + ((bits >> 16) & 1))
}

/// Mask of the bits of an f32 that bf16 keeps.
const UPPER: u32 = 0xFFFF_0000;
/// Bits of infinity in f32.
const INFINITY: u32 = 0x7F80_0000;
/// Difference of the exponent biases of f32 and f16, at the position of the exponent in f32.
const REBIAS: u32 = (127 - 15) << 23;

impl KernelFloat for f16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let shifted = (bits & 0x7FFF) << 13;
        let number = f32::from_bits(shifted + REBIAS);
        // A subnormal has no implicit leading one: it is added with the exponent and subtracted
        // again.
        let least = f32::from_bits(REBIAS + (1 << 23));
        let subnormal = f32::from_bits(shifted + REBIAS + (1 << 23)) - least;
        let infinite = f32::from_bits(shifted + 2 * REBIAS);
        let magnitude = match shifted >> 23 {
            0 => subnormal,
            31 => infinite,
            _ => number,
        };
        f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits() & 0x7FFF_FFFF;
        // Rounds as `add_half` does for bf16. A value above the largest f16 carries into the
        // exponent of infinity; this holds below 65,536, the bound of this case.
        let rounded = bits.wrapping_sub(REBIAS).wrapping_add(0xFFF + ((bits >> 13) & 1)) >> 13;
        // The addition rounds a subnormal: the last place of the sum is the spacing of f16's
        // subnormals.
        let magic = ((127 - 15) + (23 - 10) + 1) << 23;
        let sum = f32::from_bits(bits) + f32::from_bits(magic);
        let subnormal = sum.to_bits().wrapping_sub(magic);
        let special = if bits > INFINITY { 0x7E00 } else { 0x7C00 };
        let magnitude = match bits {
            0..0x3880_0000 => subnormal,
            0x3880_0000..0x4780_0000 => rounded,
            _ => special,
        };
        Self::from_bits((magnitude | (wide.to_bits() & 0x8000_0000) >> 16) as u16)
    }
}

/// Evaluates `$body` with `$float` as the Rust type of a dtype.
///
/// # Panics
///
/// For dtypes other than f32, bf16 and f16.
#[macro_export]
macro_rules! with_float_type {
    ($dtype:expr, |$float:ident| $body:expr) => {
        match $dtype {
            burn::tensor::DType::F32 => {
                type $float = f32;
                $body
            }
            burn::tensor::DType::BF16 => {
                type $float = half::bf16;
                $body
            }
            burn::tensor::DType::F16 => {
                type $float = half::f16;
                $body
            }
            other => panic!("kernels take f32, bf16 and f16, not {other:?}"),
        }
    };
}
pub(crate) use with_float_type;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_agrees_with_the_half_crate() {
        for bits in 0..=u16::MAX {
            let same = |ours: f32, theirs: f32| {
                assert!(
                    ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                    "{bits:x}"
                );
            };
            same(KernelFloat::wide(f16::from_bits(bits)), f16::from_bits(bits).to_f32());
            same(KernelFloat::wide(bf16::from_bits(bits)), bf16::from_bits(bits).to_f32());
        }
    }

    #[test]
    fn narrow_product_rounds_like_narrow() {
        for bits in 0..=u16::MAX {
            let element = bf16::from_bits(bits);
            for factor in [1.0, 1.109_375, 2.0, 3.1e38, 1e-30] {
                let ours = bf16::narrow_product(element.wide() * factor);
                let theirs = bf16::from_f32(element.to_f32() * factor);
                let same = ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan();
                assert!(same, "{bits:x} times {factor}: {ours} {theirs}");
            }
        }
    }
}
