//! Deferred optimizer steps, so that several parameters share one kernel launch.
//!
//! Burn's [`ModuleOptimizer`](burn::optim::ModuleOptimizer) passes parameters to an optimizer one
//! at a time and does not read the updated tensors in between. So a step may be launched later,
//! together with the steps of other parameters. Steps are deferred only while a sharded model is
//! mapped by the optimizer: at the end of that call the remaining ones are launched.

use std::cell::Cell;

thread_local! {
    static OPEN: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread is inside [`scope`], where steps may be deferred.
pub(crate) fn is_open() -> bool {
    OPEN.get()
}

/// Runs `f`, in which this thread may defer steps, then launches the deferred steps. If `f` panics
/// they are discarded.
pub(crate) fn scope<T>(f: impl FnOnce() -> T) -> T {
    struct Scope {
        was_open: bool,
    }
    impl Drop for Scope {
        fn drop(&mut self) {
            OPEN.set(self.was_open);
            #[cfg(feature = "cube")]
            if std::thread::panicking() {
                super::cube::discard_deferred_steps();
            } else {
                super::cube::launch_deferred_steps();
            }
        }
    }
    let _scope = Scope { was_open: OPEN.replace(true) };
    f()
}
