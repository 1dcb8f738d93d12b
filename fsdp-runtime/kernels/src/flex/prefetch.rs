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
        let start = elements.as_ptr().wrapping_byte_add(AHEAD);
        prefetch_lines::<{ std::arch::x86_64::_MM_HINT_T0 }, E>(start, elements.len());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = elements;
}

/// Prefetches the memory of `len` elements. `HINT` is that of `_mm_prefetch`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn prefetch_lines<const HINT: i32, E>(start: *const E, len: usize) {
    const LINE: usize = 64;
    for line in (0..len * size_of::<E>()).step_by(LINE) {
        let address: *const i8 = start.wrapping_byte_add(line).cast();
        // SAFETY: a prefetch is a hint; any address is allowed and none faults.
        unsafe { std::arch::x86_64::_mm_prefetch::<HINT>(address) };
    }
}
