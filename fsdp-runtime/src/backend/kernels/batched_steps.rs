//! Steps on several parameters in one launch.
//!
//! Burn's [`ModuleOptimizer`](burn::optim::ModuleOptimizer) hands an optimizer one parameter after the
//! other, and looks at none of what it gets back: so a step may be launched later, together with others.
//! That is done while a sharded model is mapped, as the end of it is known.

use std::cell::Cell;

thread_local! {
    static OPEN: Cell<bool> = const { Cell::new(false) };
}

/// Whether a step may be put off: inside [`scope`].
pub(crate) fn is_open() -> bool {
    OPEN.get()
}

/// Runs `f`, in which steps may be put off, and then what has been.
pub(crate) fn scope<T>(f: impl FnOnce() -> T) -> T {
    struct Scope {
        outer: bool,
    }
    impl Drop for Scope {
        fn drop(&mut self) {
            OPEN.set(self.outer);
            #[cfg(feature = "cube")]
            if std::thread::panicking() {
                crate::backend::kernels::cube::optim::discard();
            } else {
                crate::backend::kernels::cube::optim::flush();
            }
        }
    }
    let _scope = Scope { outer: OPEN.replace(true) };
    f()
}
