//! Elements of f32, bf16 and f16, read and written as f32.
//!
//! The conversions are branch-free arithmetic on bits, which the compiler makes vector code of in the
//! loops around them.

use std::mem::MaybeUninit;

use burn::tensor::Element;
use half::{bf16, f16};
use multiversion::multiversion;

// Pairs of elements are taken as one number.
const _: () = assert!(cfg!(target_endian = "little"), "kernels are for little-endian processors");

/// A float that kernels take.
pub(crate) trait Number: Element + bytemuck::Pod + Send + Sync {
    /// As f32, exactly.
    fn wide(self) -> f32;

    /// Rounded to the nearest, ties to even.
    fn narrow(wide: f32) -> Self;

    /// As [`narrow`](Self::narrow), for the product of an element and a finite factor.
    #[inline(always)]
    fn narrow_product(wide: f32) -> Self {
        Self::narrow(wide)
    }

    /// The elements times a finite factor, but zero where sixteen bits are below the threshold: those of
    /// a pair of elements in the lower and the upper half of a number, compared in the upper half, with
    /// a sign.
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

    /// The elements as f32: themselves, or in `room`, which is at least as long.
    fn widened<'a>(source: &'a [Self], room: &'a mut [f32]) -> &'a [f32] {
        let room = &mut room[..source.len()];
        widen(source, room);
        room
    }
}

#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
fn widen<N: Number>(source: &[N], target: &mut [f32]) {
    for (target, source) in target.chunks_mut(LINES).zip(source.chunks(LINES)) {
        prefetch(source);
        for (target, source) in target.iter_mut().zip(source) {
            *target = source.wide();
        }
    }
}

/// Elements that loops which only read go through between two [`prefetch`]es.
pub(super) const LINES: usize = 32;

/// Asks for what lies 8 KiB beyond these elements, to be there when a loop comes to it: alone,
/// processors look ahead within a page, and a loop that writes nothing waits for the next.
#[inline(always)]
pub(super) fn prefetch<N>(elements: &[N]) {
    prefetch_beyond::<8192, N>(elements);
}

/// The same of what lies `AHEAD` bytes beyond.
#[inline(always)]
pub(super) fn prefetch_beyond<const AHEAD: usize, N>(elements: &[N]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        const LINE: usize = 64;
        let start: *const i8 = elements.as_ptr().cast();
        for line in (0..size_of_val(elements)).step_by(LINE) {
            // SAFETY: a hint, to which any address may be given; none faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(AHEAD + line)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = elements;
}

impl Number for f32 {
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

impl Number for bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits();
        // Rounding could take a NaN to infinity.
        let nan = bits | 0x40_0000;
        let bits = if bits & 0x7FFF_FFFF > INFINITY { nan } else { half_added(bits) };
        Self::from_bits((bits >> 16) as u16)
    }

    #[inline(always)]
    fn narrow_product(wide: f32) -> Self {
        // The lower half of a NaN that comes from bf16 is zero, so that rounding leaves it as it is.
        Self::from_bits((half_added(wide.to_bits()) >> 16) as u16)
    }

    /// On each two as one number, so that none is moved from one lane of a register to another.
    #[inline(always)]
    fn dropped<const PAIRS: usize>(
        source: &[[Self; 2]; PAIRS],
        draws: &[u32; PAIRS],
        (threshold, factor): (i32, f32),
        target: &mut [[MaybeUninit<Self>; 2]; PAIRS],
    ) {
        let product = |upper: u32| half_added((f32::from_bits(upper) * factor).to_bits());
        for at in 0..PAIRS {
            let pair: u32 = bytemuck::cast(source[at]);
            let (first, second) = (product(pair << 16) >> 16, product(pair & UPPER) & UPPER);
            let kept_first = if (draws[at] << 16).cast_signed() < threshold { 0 } else { !UPPER };
            let kept_second = if draws[at].cast_signed() < threshold { 0 } else { UPPER };
            let kept = (first | second) & (kept_first | kept_second);
            target[at] = bytemuck::cast::<u32, [Self; 2]>(kept).map(MaybeUninit::new);
        }
    }
}

/// Half of the last place that bf16 keeps, less one where that is even already.
#[inline(always)]
fn half_added(bits: u32) -> u32 {
    bits.wrapping_add(0x7FFF + ((bits >> 16) & 1))
}

/// The half of an f32's bits that bf16 keeps.
const UPPER: u32 = 0xFFFF_0000;
/// The bits of infinity in f32.
const INFINITY: u32 = 0x7F80_0000;
/// What an exponent in f16 lacks to one in f32, in its place there.
const REBIAS: u32 = (127 - 15) << 23;

impl Number for f16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let shifted = (bits & 0x7FFF) << 13;
        let number = f32::from_bits(shifted + REBIAS);
        // Without the implicit one, which a subnormal does not have.
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
        // As for bf16; what is too large becomes infinity by itself, up to twice the largest.
        let rounded = bits.wrapping_sub(REBIAS).wrapping_add(0xFFF + ((bits >> 13) & 1)) >> 13;
        // An addition rounds a subnormal: the sum's last place is that of f16's subnormals.
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

/// Memory that may be written, whatever is in it.
pub(crate) type Room<N> = [MaybeUninit<N>];

/// As [`convert`], in the place of other elements.
pub(super) fn convert_over<I: Number, O: Number>(source: &[I], target: &mut [O]) {
    // SAFETY: the same elements in the same layout, and `convert` leaves all of them initialised.
    let room = unsafe { &mut *(std::ptr::from_mut(target) as *mut Room<O>) };
    convert(source, room);
}

/// Sets each element from its source.
#[inline(always)]
pub(crate) fn each<'a, I: Copy, O>(
    source: &[I],
    target: &'a mut Room<O>,
    f: impl Fn(I) -> O,
) -> &'a mut [O] {
    indexed(source, target, |_, source| f(source))
}

/// Copies and rounds.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
pub(super) fn convert<'a, I: Number, O: Number>(
    source: &[I],
    target: &'a mut Room<O>,
) -> &'a mut [O] {
    each(source, target, |source| O::narrow(source.wide()))
}

/// Divides in f32, and rounds.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
pub(super) fn divide<'a, I: Number, O: Number>(
    source: &[I],
    target: &'a mut Room<O>,
    divisor: f32,
) -> &'a mut [O] {
    each(source, target, |source| O::narrow(source.wide() / divisor))
}

/// The sums of the parts' elements, in their order, divided.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
pub(super) fn mean<'a, I: Number>(
    parts: &[&[I]],
    target: &'a mut Room<f32>,
    divisor: f32,
) -> &'a mut [f32] {
    let len = target.len();
    let (first, more) = parts.split_at(parts.len().min(4));
    let last = if more.is_empty() { divisor } else { 1.0 };
    let sums = match first {
        [a] => each(a, target, |a| a.wide() / last),
        [a, b] => {
            let b = &b[..len];
            indexed(a, target, |at, a| (a.wide() + b[at].wide()) / last)
        }
        [a, b, c] => {
            let (b, c) = (&b[..len], &c[..len]);
            indexed(a, target, |at, a| (a.wide() + b[at].wide() + c[at].wide()) / last)
        }
        [a, b, c, d] => {
            let (b, c, d) = (&b[..len], &c[..len], &d[..len]);
            indexed(a, target, |at, a| {
                (a.wide() + b[at].wide() + c[at].wide() + d[at].wide()) / last
            })
        }
        _ => unreachable!("a mean has parts, of which these are at most four"),
    };
    for (at, part) in more.iter().enumerate() {
        let divisor = if at + 1 == more.len() { divisor } else { 1.0 };
        for (sum, part) in sums.iter_mut().zip(*part) {
            *sum = (*sum + part.wide()) / divisor;
        }
    }
    sums
}

/// As [`each`], which is told the element's place.
#[allow(clippy::needless_range_loop, reason = "`enumerate` counts one by one in debug builds")]
#[inline(always)]
pub(crate) fn indexed<'a, I: Copy, O>(
    source: &[I],
    target: &'a mut Room<O>,
    f: impl Fn(usize, I) -> O,
) -> &'a mut [O] {
    assert_eq!(source.len(), target.len());
    for at in 0..source.len() {
        target[at].write(f(at, source[at]));
    }
    // SAFETY: each element has been written.
    unsafe { target.assume_init_mut() }
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

    /// Every upper half of an f32, with lower halves around the ties of both types.
    fn floats() -> Vec<f32> {
        let lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
        let bits =
            (0..=u16::MAX).flat_map(|high| lower.map(|low: u32| u32::from(high) << 16 | low));
        bits.map(f32::from_bits).collect()
    }

    fn narrowed<N: Number>(wide: &[f32]) -> Vec<N> {
        let mut narrow = vec![N::zeroed(); wide.len()];
        convert_over(wide, &mut narrow);
        narrow
    }

    #[test]
    fn rounding_is_that_of_the_half_crate() {
        let wide = floats();
        for (wide, ours) in wide.iter().zip(narrowed::<bf16>(&wide)) {
            assert_eq!(ours.to_bits(), bf16::from_f32(*wide).to_bits(), "{wide:e}");
        }
        for (wide, ours) in wide.iter().zip(narrowed::<f16>(&wide)) {
            let theirs = f16::from_f32(*wide);
            let same = ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan();
            assert!(same, "{wide:e}: {ours} {theirs}");
        }
    }

    #[test]
    fn widening_is_that_of_the_half_crate() {
        for bits in 0..=u16::MAX {
            let same = |ours: f32, theirs: f32| {
                assert!(
                    ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                    "{bits:x}"
                );
            };
            same(Number::wide(f16::from_bits(bits)), f16::from_bits(bits).to_f32());
            same(Number::wide(bf16::from_bits(bits)), bf16::from_bits(bits).to_f32());
        }
    }

    #[test]
    fn products_are_rounded_as_all_numbers() {
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

    #[test]
    fn a_mean_is_the_sum_in_order_divided() {
        let part = |rank: usize| -> Vec<f32> {
            (0..100).map(|i| ((i * 37 + rank * 101) % 59) as f32 * 0.37 - 9.1).collect()
        };
        for ranks in 1..=9 {
            let parts: Vec<Vec<f32>> = (0..ranks).map(part).collect();
            let slices: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
            let mut ours = Vec::with_capacity(100);
            let ours = mean(&slices, &mut ours.spare_capacity_mut()[..100], ranks as f32);
            for (at, ours) in ours.iter().enumerate() {
                let sum = parts[1..].iter().fold(parts[0][at], |sum, part| sum + part[at]);
                assert_eq!(ours.to_bits(), (sum / ranks as f32).to_bits(), "{ranks} ranks");
            }
        }
    }
}
