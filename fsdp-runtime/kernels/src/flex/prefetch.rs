//! Software prefetch of memory that a loop will reach soon.

/// Number of elements that a loop without writes processes between two calls of [`prefetch`].
pub(super) const PREFETCH_EVERY: usize = 32;

/// Prefetches the memory 8 KiB after `elements`.
///
/// Hardware prefetchers stop at the end of a page, so a loop that only reads would stall at each
/// new page.
#[inline(always)]
pub(super) fn prefetch<E>(elements: &[E]) {
    prefetch_ahead::<8192, E>(elements);
}

/// Prefetches the memory `AHEAD` bytes after `elements`, as many bytes as `elements` has.
#[inline(always)]
pub(super) fn prefetch_ahead<const AHEAD: usize, E>(elements: &[E]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        const LINE: usize = 64;
        let start: *const i8 = elements.as_ptr().cast();
        for line in (0..size_of_val(elements)).step_by(LINE) {
            // SAFETY: a prefetch is a hint; any address is allowed and none faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(AHEAD + line)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = elements;
}
