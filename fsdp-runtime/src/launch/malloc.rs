//! Settings of glibc's allocator, so that it keeps freed pages, and has huge ones.
//!
//! A training step allocates and frees megabytes of activations and gradients. By default glibc
//! returns such blocks to the system. The system fills their pages with zeros when they are used
//! again, and these page faults take about a quarter of a training step on a CPU. Matrix products
//! also use more pages of 4 KiB than the processor's cache of addresses (TLB) holds.

/// Configures glibc's allocator to keep freed pages, and asks the system for huge pages for its
/// heap.
///
/// Only the first call of a process has an effect. It has none with another C library, or where the
/// environment configures the allocator. Only a call on the process's main thread asks for huge
/// pages.
pub(super) fn keep_freed_pages() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    glibc::keep_freed_pages();
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod glibc {
    use std::ffi::{OsStr, c_int};
    use std::sync::Once;

    /// The settings, as parameters of `mallopt` and their values.
    ///
    /// With `M_MMAP_MAX` 0, large blocks come from the heap, which keeps them for the next block of
    /// their size. `M_MMAP_THRESHOLD` has this effect only up to 32 MiB. The heap of the first
    /// arena is never trimmed. Further arenas would unmap heaps of 64 MiB that are empty for a
    /// moment. Where the heap cannot grow, glibc maps memory all the same.
    const SETTINGS: [(c_int, c_int); 3] =
        [(libc::M_MMAP_MAX, 0), (libc::M_TRIM_THRESHOLD, -1), (libc::M_ARENA_MAX, 1)];

    pub(super) fn keep_freed_pages() {
        static FIRST: Once = Once::new();
        FIRST.call_once(|| {
            if std::env::vars_os().any(|(name, value)| configures_malloc(&name, &value)) {
                return;
            }
            for (parameter, value) in SETTINGS {
                // SAFETY: `mallopt` locks the allocator, takes any parameter and value, and returns
                // 0 for those that it does not know.
                unsafe { libc::mallopt(parameter, value) };
            }
            #[cfg(target_pointer_width = "64")]
            ask_for_huge_pages();
        });
    }

    /// Extends the heap, and asks for huge pages for the new part, which takes no memory until it
    /// is used. Where the heap cannot grow so far, or the system has no huge pages, nothing
    /// changes. Nothing changes either on a thread with a heap of its own, as threads other than
    /// the main one may have.
    #[cfg(target_pointer_width = "64")]
    fn ask_for_huge_pages() {
        /// Bytes by which the heap grows. Memory beyond them has pages of the usual size.
        const BYTES: usize = 4 << 30;
        const HUGE_PAGE: usize = 2 << 20;
        // SAFETY: the block is not accessed, and is freed. `sbrk(0)` changes nothing.
        let (block, end_of_heap) = unsafe {
            let block = libc::malloc(BYTES);
            libc::free(block);
            (block.addr(), libc::sbrk(0).addr())
        };
        // Where the heap could not grow, the block was a mapping of its own, which is gone.
        if block == 0 || block + BYTES > end_of_heap {
            return;
        }
        let start = block.next_multiple_of(HUGE_PAGE);
        let whole = (block + BYTES - start) / HUGE_PAGE * HUGE_PAGE;
        let start = std::ptr::without_provenance_mut(start);
        // SAFETY: the advice changes the size of pages and not what they hold. The range is part of
        // the heap, which is never trimmed.
        unsafe { libc::madvise(start, whole, libc::MADV_HUGEPAGE) };
    }

    /// Returns whether an environment variable sets one of the allocator's parameters.
    fn configures_malloc(name: &OsStr, value: &OsStr) -> bool {
        let (name, value) = (name.as_encoded_bytes(), value.as_encoded_bytes());
        let contains = |text: &[u8]| value.windows(text.len()).any(|window| window == text);
        name.starts_with(b"MALLOC_") || name == b"GLIBC_TUNABLES" && contains(b"glibc.malloc")
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn the_environment_comes_first() {
            let configures =
                |name: &str, value: &str| configures_malloc(OsStr::new(name), OsStr::new(value));
            assert!(configures("MALLOC_ARENA_MAX", "2"));
            assert!(configures("MALLOC_TRIM_THRESHOLD_", "131072"));
            assert!(configures("GLIBC_TUNABLES", "glibc.rtld.nns=1:glibc.malloc.arena_max=2"));
            assert!(!configures("GLIBC_TUNABLES", "glibc.rtld.nns=1"));
            assert!(!configures("PATH", "/usr/bin:glibc.malloc"));
        }
    }
}
