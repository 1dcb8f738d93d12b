//! The allocator: activations and gradients of megabytes come and go every step, and its pages stay.
//!
//! Every page that goes back to the system comes back as a page fault and is filled with zeros: a
//! quarter of a training step on a CPU, with most allocators as they are set.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc's `mimalloc.h`, for which the bindings have no name.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// Lets no page go back to the system. `MIMALLOC_PURGE_DELAY=-1` in the environment does the same.
pub fn keep_pages() {
    // SAFETY: the option exists and takes any number. Called while the process has one thread, as
    // options are not synchronised.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
}
