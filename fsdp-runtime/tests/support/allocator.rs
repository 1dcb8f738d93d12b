//! An allocator that counts what passes through it: live bytes, their peak, and large allocations.
//!
//! A test that uses it lies in a binary of its own, and is the only one there or holds a lock: the
//! counters cover all threads of the process, ranks included. Each binary declares
//!
//! ```ignore
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting::new();
//! ```
#![allow(dead_code, reason = "each test reads some of the counters")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

pub struct Counting {
    live: AtomicUsize,
    peak: AtomicUsize,
    largest: AtomicUsize,
    threshold: usize,
    large: AtomicUsize,
}

impl Counting {
    /// Counts live bytes and the largest allocation.
    pub const fn new() -> Self {
        Self::with_threshold(usize::MAX)
    }

    /// Counts allocations of at least `threshold` bytes as well.
    pub const fn with_threshold(threshold: usize) -> Self {
        Self {
            live: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            largest: AtomicUsize::new(0),
            threshold,
            large: AtomicUsize::new(0),
        }
    }

    /// Returns the bytes that are allocated now.
    pub fn live(&self) -> usize {
        self.live.load(SeqCst)
    }

    /// Waits until no thread allocates or frees, and returns the live bytes.
    pub fn settled(&self) -> usize {
        let mut live = self.live();
        loop {
            std::thread::sleep(std::time::Duration::from_millis(20));
            match self.live() {
                same if same == live => return live,
                other => live = other,
            }
        }
    }

    /// Returns the most bytes that were live at once since the last
    /// [`reset_peak`](Self::reset_peak).
    pub fn peak(&self) -> usize {
        self.peak.load(SeqCst)
    }

    /// Starts a new peak. Returns the bytes that are live now.
    pub fn reset_peak(&self) -> usize {
        let live = self.live();
        self.peak.store(live, SeqCst);
        live
    }

    /// Returns the bytes of the largest single allocation since the last call, and 0 if there was
    /// none.
    pub fn take_largest(&self) -> usize {
        self.largest.swap(0, SeqCst)
    }

    /// Allocations of at least the threshold since the last call.
    pub fn take_large(&self) -> usize {
        self.large.swap(0, SeqCst)
    }

    fn count(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, SeqCst) + bytes;
        self.peak.fetch_max(live, SeqCst);
        self.largest.fetch_max(bytes, SeqCst);
        if bytes >= self.threshold {
            self.large.fetch_add(1, SeqCst);
        }
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        self.live.fetch_sub(layout.size(), SeqCst);
        // SAFETY: `ptr` comes from the system's allocator, by one of the calls above.
        unsafe { System.dealloc(ptr, layout) }
    }
}
