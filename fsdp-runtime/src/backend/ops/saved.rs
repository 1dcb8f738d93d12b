//! The memory accounting of what operations save for backward.
//!
//! The forward of a sharded unit installs a [`SavedCounter`] for its thread. An operation that runs in it
//! counts what it saves, until its state is dropped.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use burn::backend::Backend;
use fsdp_kernels::Float;

use crate::backend::shard_backend::bytes;

/// Counter of saved bytes.
pub(crate) trait SavedCounter: Send + Sync {
    /// Counts bytes until the returned value is dropped.
    fn count(&self, bytes: usize) -> Box<dyn Any + Send + Sync>;
}

thread_local! {
    /// Counters of the running forwards, the outermost first.
    static COUNTERS: RefCell<Vec<Arc<dyn SavedCounter>>> = const { RefCell::new(Vec::new()) };
}

/// Bytes that are counted for the state of an operation, and for its clones.
#[derive(Clone, Default)]
pub(crate) struct Saved {
    _counted: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Saved")
    }
}

impl Saved {
    /// Counts the elements of tensors for the innermost running forward, if there is one.
    pub(super) fn tensors<'a, B: Backend>(tensors: impl IntoIterator<Item = &'a Float<B>>) -> Self
    where
        Float<B>: 'a,
    {
        Self::bytes(tensors.into_iter().map(bytes::<B>).sum())
    }

    /// Counts bytes for the innermost running forward, if there is one.
    pub(super) fn bytes(bytes: usize) -> Self {
        let count = |counter: Arc<dyn SavedCounter>| Arc::from(counter.count(bytes));
        Self { _counted: current().map(count) }
    }
}

/// Returns the counter of the innermost running forward of this thread.
pub(super) fn current() -> Option<Arc<dyn SavedCounter>> {
    COUNTERS.with_borrow(|counters| counters.last().cloned())
}

/// Installs the counter of a forward that begins on this thread.
pub(crate) fn enter_forward(counter: Arc<dyn SavedCounter>) {
    COUNTERS.with_borrow_mut(|counters| counters.push(counter));
}

/// Removes the counter of the forward that ends on this thread.
pub(crate) fn leave_forward() {
    COUNTERS.with_borrow_mut(|counters| counters.pop());
}

/// Runs `f` with a counter, if there is one.
pub(super) fn counted_by<T>(counter: Option<Arc<dyn SavedCounter>>, f: impl FnOnce() -> T) -> T {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            leave_forward();
        }
    }
    let _leave = counter.map(|counter| {
        enter_forward(counter);
        Leave
    });
    f()
}
