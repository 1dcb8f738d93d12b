//! Settings of glibc's allocator, so that it keeps freed pages.
//!
//! A training step allocates and frees megabytes of activations and gradients. By default glibc
//! returns such blocks to the system. The system fills their pages with zeros when they are used
//! again, and these page faults take about a quarter of a training step on a CPU.

/// Tells glibc's allocator to keep freed pages. The first call of a process does it; it has no effect
/// with another C library, and where the environment configures the allocator.
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
    /// Without mappings of their own, large blocks come from the heap, which keeps them for the next
    /// block of their size. `M_MMAP_THRESHOLD` would do so only up to 32 MiB. The heap of the first
    /// arena is never trimmed. Further arenas would unmap heaps of 64 MiB that are empty for a moment.
    /// Where the heap cannot grow, glibc maps memory all the same.
    const SETTINGS: [(c_int, c_int); 3] =
        [(libc::M_MMAP_MAX, 0), (libc::M_TRIM_THRESHOLD, -1), (libc::M_ARENA_MAX, 1)];

    pub(super) fn keep_freed_pages() {
        static FIRST: Once = Once::new();
        FIRST.call_once(|| {
            if std::env::vars_os().any(|(name, value)| configures_malloc(&name, &value)) {
                return;
            }
            for (parameter, value) in SETTINGS {
                // SAFETY: `mallopt` locks the allocator, takes any parameter and value, and returns 0
                // for those that it does not know.
                unsafe { libc::mallopt(parameter, value) };
            }
        });
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
