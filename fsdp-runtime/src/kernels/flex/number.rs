//! Elements of f32, bf16 and f16, read and written as f32 in blocks.

use burn::tensor::Element;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use multiversion::multiversion;

/// Elements that are widened at a time: they stay in the first cache.
pub(super) const BLOCK: usize = 1024;
/// Elements of a task.
pub(super) const TASK: usize = 1 << 15;

/// A float that kernels take.
pub(super) trait Number: Element + bytemuck::Pod + Send + Sync {
    /// The elements as f32: themselves, or in `wide`, which is at least as long.
    fn widened<'a>(source: &'a [Self], wide: &'a mut [f32]) -> &'a [f32];
    /// Rounds to the nearest, ties to even.
    fn round(wide: &[f32], target: &mut [Self]);
}

impl Number for f32 {
    fn widened<'a>(source: &'a [Self], _: &'a mut [f32]) -> &'a [f32] {
        source
    }

    fn round(wide: &[f32], target: &mut [Self]) {
        target.copy_from_slice(wide);
    }
}

impl Number for bf16 {
    fn widened<'a>(source: &'a [Self], wide: &'a mut [f32]) -> &'a [f32] {
        let wide = &mut wide[..source.len()];
        widen_bf16(source.reinterpret_cast(), wide);
        wide
    }

    fn round(wide: &[f32], target: &mut [Self]) {
        round_bf16(wide, target.reinterpret_cast_mut());
    }
}

impl Number for f16 {
    fn widened<'a>(source: &'a [Self], wide: &'a mut [f32]) -> &'a [f32] {
        let wide = &mut wide[..source.len()];
        source.convert_to_f32_slice(wide);
        wide
    }

    fn round(wide: &[f32], target: &mut [Self]) {
        target.convert_from_f32_slice(wide);
    }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn widen_bf16(source: &[u16], wide: &mut [f32]) {
    for (wide, &bits) in wide.iter_mut().zip(source) {
        *wide = f32::from_bits(u32::from(bits) << 16);
    }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
fn round_bf16(wide: &[f32], target: &mut [u16]) {
    for (target, wide) in target.iter_mut().zip(wide) {
        let bits = wide.to_bits();
        // Half of the last place kept, less one where that is even already.
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
        // Rounding could take a NaN to infinity.
        let nan = (bits >> 16) | 0x40;
        *target = if bits & 0x7FFF_FFFF > 0x7F80_0000 { nan as u16 } else { rounded as u16 };
    }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
pub(super) fn divide(wide: &[f32], target: &mut [f32], divisor: f32) {
    for (target, wide) in target.iter_mut().zip(wide) {
        *target = wide / divisor;
    }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
pub(super) fn divide_by(sum: &mut [f32], divisor: f32) {
    for sum in sum {
        *sum /= divisor;
    }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
pub(super) fn multiply(wide: &[f32], target: &mut [f32], factor: f32) {
    for (target, wide) in target.iter_mut().zip(wide) {
        *target = wide * factor;
    }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"))]
pub(super) fn add(sum: &mut [f32], wide: &[f32]) {
    for (sum, wide) in sum.iter_mut().zip(wide) {
        *sum += wide;
    }
}

/// Runs `$body` with `$number` naming the type of a dtype.
macro_rules! with_number {
    ($dtype:expr, |$number:ident| $body:expr) => {
        match $dtype {
            burn::tensor::DType::F32 => {
                type $number = f32;
                $body
            }
            burn::tensor::DType::BF16 => {
                type $number = half::bf16;
                $body
            }
            burn::tensor::DType::F16 => {
                type $number = half::f16;
                $body
            }
            other => panic!("kernels take f32, bf16 and f16, not {other:?}"),
        }
    };
}
pub(super) use with_number;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_to_bf16_is_that_of_the_half_crate() {
        let bits = (0..=u16::MAX).flat_map(|high| {
            [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(|low| u32::from(high) << 16 | low)
        });
        let wide: Vec<f32> = bits.map(f32::from_bits).collect();
        let mut rounded = vec![bf16::ZERO; wide.len()];
        Number::round(&wide, &mut rounded);
        for (wide, rounded) in wide.iter().zip(&rounded) {
            assert_eq!(rounded.to_bits(), bf16::from_f32(*wide).to_bits(), "{wide:e}");
        }
    }

    #[test]
    fn what_is_widened_rounds_to_itself() {
        fn check<N: Number + PartialEq + std::fmt::Debug>(all: Vec<N>) {
            let mut wide = vec![0.0; all.len()];
            let wide = N::widened(&all, &mut wide).to_vec();
            let mut back = vec![N::zeroed(); all.len()];
            N::round(&wide, &mut back);
            let same = all.iter().zip(&back).filter(|(a, b)| a == b).count();
            let numbers = wide.iter().filter(|wide| !wide.is_nan()).count();
            assert_eq!(same, numbers);
        }
        check((0..=u16::MAX).map(bf16::from_bits).collect());
        check((0..=u16::MAX).map(f16::from_bits).collect());
    }
}
