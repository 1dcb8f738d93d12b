//! Memory allocator that keeps freed pages.
//!
//! A training step allocates and frees megabytes of activations and gradients. Most allocators
//! return such pages to the system. The system fills each returned page with zeros when it is used
//! again, and these page faults take about a quarter of a training step on a CPU.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` in mimalloc's `mimalloc.h`. The bindings have no name for it.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// Disables the return of freed pages to the system, as `MIMALLOC_PURGE_DELAY=-1` in the
/// environment does. Call it before the process starts a second thread.
pub fn keep_pages() {
    // SAFETY: the option exists and accepts any number. mimalloc does not synchronise access to its
    // options, and the process still has a single thread here.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
}
