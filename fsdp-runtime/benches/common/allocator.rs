//! A memory allocator that is chosen when the program starts: mimalloc, which keeps freed pages, or
//! the system's, as in a program without any code for its allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, Ordering};

use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: Chosen = Chosen;

/// Whether new blocks come from the system's allocator.
static SYSTEM: AtomicBool = AtomicBool::new(false);

/// `mi_option_purge_delay` in mimalloc's `mimalloc.h`. The bindings have no name for it.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// Chooses the allocator of new blocks. Call it before the process starts a second thread.
pub fn choose(system: bool) {
    SYSTEM.store(system, Ordering::Relaxed);
    // SAFETY: the option exists and accepts any number. mimalloc does not synchronise access to its
    // options, and the process still has a single thread here.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
}

struct Chosen;

/// Returns whether mimalloc allocated a block.
fn is_of_mimalloc(block: *mut u8) -> bool {
    // SAFETY: the function compares addresses and reads no memory of the block.
    unsafe { libmimalloc_sys::mi_is_in_heap_region(block.cast()) }
}

// SAFETY: every call is passed on unchanged, and a block goes back to the allocator that it is
// from.
unsafe impl GlobalAlloc for Chosen {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe {
            if SYSTEM.load(Ordering::Relaxed) {
                System.alloc(layout)
            } else {
                MiMalloc.alloc(layout)
            }
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe {
            if SYSTEM.load(Ordering::Relaxed) {
                System.alloc_zeroed(layout)
            } else {
                MiMalloc.alloc_zeroed(layout)
            }
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe {
            if is_of_mimalloc(block) {
                MiMalloc.dealloc(block, layout);
            } else {
                System.dealloc(block, layout);
            }
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe {
            if is_of_mimalloc(block) {
                MiMalloc.realloc(block, layout, size)
            } else {
                System.realloc(block, layout, size)
            }
        }
    }
}
