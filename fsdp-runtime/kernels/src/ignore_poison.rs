//! Locks that outlive a panic.

use std::sync::LockResult;

/// Takes the value of a lock, also after a thread has panicked with the lock held.
///
/// Poisoning may be ignored in these crates for two reasons. No guarded value is left half-updated by
/// a panic: each is changed in single steps that do not panic. And a rank that panics ends the run
/// with an error on every rank. The other threads must be able to return that error: a second panic
/// on a poisoned lock would hide the first cause.
pub trait IgnorePoison {
    /// The guard of the lock, or the reference to its value.
    type Guard;

    /// Returns the guard of a lock even if the lock is poisoned.
    fn ignore_poison(self) -> Self::Guard;
}

/// For `Mutex::lock`, `Mutex::get_mut`, `Mutex::into_inner` and the waits of a `Condvar`.
impl<G> IgnorePoison for LockResult<G> {
    type Guard = G;

    fn ignore_poison(self) -> G {
        self.unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
