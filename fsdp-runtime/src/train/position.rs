//! The position in the data at which a loader's next iterator starts.

use std::cell::Cell;

/// The start of an iterator over one rank's batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Position {
    /// Number of completed epochs.
    pub(super) epoch: u64,
    /// Number of this rank's items of the epoch that were used before.
    pub(super) items: usize,
}

thread_local! {
    /// Position for the next call of Burn's `DataLoader::iter`, which has no argument for it.
    static NEXT: Cell<Option<Position>> = const { Cell::new(None) };
}

/// Runs `iter`, which makes an iterator that starts at `position`. Also returns whether the loader
/// has taken the position.
pub(super) fn starting_at<T>(position: Position, iter: impl FnOnce() -> T) -> (T, bool) {
    NEXT.set(Some(position));
    let iter = iter();
    (iter, NEXT.take().is_none())
}

/// Returns the position that [`starting_at`] has set, once.
pub(super) fn take() -> Option<Position> {
    NEXT.take()
}
