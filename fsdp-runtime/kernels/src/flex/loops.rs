//! Elementwise loops over slices of f32, bf16 and f16.

use multiversion::multiversion;

use super::float::KernelFloat;
use super::new_tensor::Uninit;

/// Converts like [`convert`], into initialised memory.
pub(super) fn convert_over<I: KernelFloat, O: KernelFloat>(source: &[I], target: &mut [O]) {
    // SAFETY: `MaybeUninit<O>` has the layout of `O`, and `convert` leaves every element
    // initialised.
    let target = unsafe { &mut *(std::ptr::from_mut(target) as *mut Uninit<O>) };
    convert(source, target);
}

/// Writes `f(source[i])` to each `target[i]`.
///
/// # Panics
///
/// If the slices differ in length.
#[inline(always)]
pub(crate) fn each<'a, I: Copy, O>(
    source: &[I],
    target: &'a mut Uninit<O>,
    f: impl Fn(I) -> O,
) -> &'a mut [O] {
    indexed(source, target, |_, source| f(source))
}

/// Copies elements, rounded to the type of `target`.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
pub(super) fn convert<'a, I: KernelFloat, O: KernelFloat>(
    source: &[I],
    target: &'a mut Uninit<O>,
) -> &'a mut [O] {
    each(source, target, |source| O::narrow(source.wide()))
}

/// Divides elements in f32 and rounds the quotients to the type of `target`.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
pub(super) fn divide<'a, I: KernelFloat, O: KernelFloat>(
    source: &[I],
    target: &'a mut Uninit<O>,
    divisor: f32,
) -> &'a mut [O] {
    each(source, target, |source| O::narrow(source.wide() / divisor))
}

/// Adds the parts elementwise in f32, in their order, then divides by `divisor`.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2"), dispatcher = "direct")]
pub(super) fn mean<'a, I: KernelFloat>(
    parts: &[&[I]],
    target: &'a mut Uninit<f32>,
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
        _ => unreachable!("a mean has at least one part, and `first` at most four"),
    };
    for (at, part) in more.iter().enumerate() {
        let divisor = if at + 1 == more.len() { divisor } else { 1.0 };
        for (sum, part) in sums.iter_mut().zip(*part) {
            *sum = (*sum + part.wide()) / divisor;
        }
    }
    sums
}

/// Writes `f(i, source[i])` to each `target[i]`.
///
/// # Panics
///
/// If the slices differ in length.
#[allow(clippy::needless_range_loop, reason = "`enumerate` is slow in debug builds")]
#[inline(always)]
pub(crate) fn indexed<'a, I: Copy, O>(
    source: &[I],
    target: &'a mut Uninit<O>,
    f: impl Fn(usize, I) -> O,
) -> &'a mut [O] {
    assert_eq!(source.len(), target.len());
    for at in 0..source.len() {
        target[at].write(f(at, source[at]));
    }
    // SAFETY: the loop wrote every element.
    unsafe { target.assume_init_mut() }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// Returns all upper halves of an f32, each with lower halves at and around the ties of bf16
    /// and f16.
    fn floats() -> Vec<f32> {
        let lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
        let bits =
            (0..=u16::MAX).flat_map(|high| lower.map(|low: u32| u32::from(high) << 16 | low));
        bits.map(f32::from_bits).collect()
    }

    fn narrowed<E: KernelFloat>(wide: &[f32]) -> Vec<E> {
        let mut narrow = vec![E::zeroed(); wide.len()];
        convert_over(wide, &mut narrow);
        narrow
    }

    #[test]
    fn rounding_agrees_with_the_half_crate() {
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
    fn a_mean_is_the_sum_in_order_divided_once() {
        let part = |rank: usize| -> Vec<f32> {
            (0..100).map(|i| ((i * 37 + rank * 101) % 59) as f32 * 0.37 - 9.1).collect()
        };
        for ranks in 1..=9 {
            let parts: Vec<Vec<f32>> = (0..ranks).map(part).collect();
            let slices: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
            let mut ours = Vec::with_capacity(100);
            let ours = mean(&slices, &mut ours.spare_capacity_mut()[..100], ranks as f32);
            assert_eq!(ours.len(), 100);
            for (at, ours) in ours.iter().enumerate() {
                let sum = parts[1..].iter().fold(parts[0][at], |sum, part| sum + part[at]);
                assert_eq!(ours.to_bits(), (sum / ranks as f32).to_bits(), "{ranks} ranks");
            }
        }
    }
}
