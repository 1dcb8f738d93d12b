//! The position in the data at which a loader's next iterator starts.

use std::cell::Cell;

use crate::error::LearnerError;

/// The start of an iterator over one rank's batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Position {
    /// Number of completed epochs.
    pub(super) epoch: u64,
    /// Number of items of the epoch that this rank has already trained on or evaluated.
    pub(super) items: usize,
    /// Whether the batches are for training, which needs equal lengths on all ranks.
    pub(super) trains: bool,
}

impl Position {
    /// Returns the error of a position beyond the `items` that this rank has in the epoch.
    pub(super) fn beyond(self, items: usize) -> LearnerError {
        let epoch = self.epoch as usize + 1;
        LearnerError::PositionBeyondData { epoch, position: self.items, items }
    }
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

/// Returns a number of items that `count` asks a loader for, which is that of training.
pub(super) fn in_training(count: impl FnOnce() -> usize) -> usize {
    NEXT.set(Some(Position { trains: true, ..Position::default() }));
    let count = count();
    NEXT.take();
    count
}

/// Returns whether the caller of the loader is a training epoch.
pub(super) fn trains() -> bool {
    NEXT.get().is_some_and(|position| position.trains)
}

/// Returns the position that [`starting_at`] has set, once.
pub(super) fn take() -> Option<Position> {
    NEXT.take()
}
