//! The position in the data at which a loader's next iterator starts.

use std::cell::Cell;
use std::fmt;

use serde::{Deserialize, Serialize};

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

/// What a position in the data refers to: the order in which a [`RankLoader`](super::RankLoader)
/// gives out the items of its dataset. Checkpoints contain it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DataOrder {
    /// Number of items in the dataset.
    pub(super) items: u64,
    /// Seed of the shuffles; `None` for the order of the dataset.
    pub(super) seed: Option<u64>,
    /// Number of items in a batch of all ranks.
    pub(super) batch: u64,
}

impl DataOrder {
    /// Returns whether the items of an epoch have the same order. The batch does not change it.
    pub(super) fn has_items_of(self, other: Self) -> bool {
        (self.items, self.seed) == (other.items, other.seed)
    }
}

impl fmt::Display for DataOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seed {
            Some(seed) => write!(f, "{} items shuffled with seed {seed}", self.items),
            None => write!(f, "{} items in the order of the dataset", self.items),
        }
    }
}

thread_local! {
    /// Order that a loader has reported, since Burn's `DataLoader` has no method for it.
    static REPORTED: Cell<Option<DataOrder>> = const { Cell::new(None) };
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

/// Returns a number of items that `count` asks a loader for, which is that of training, and the
/// order of the items. The order is `None` for a loader that is no `RankLoader`.
pub(super) fn in_training(count: impl FnOnce() -> usize) -> (usize, Option<DataOrder>) {
    NEXT.set(Some(Position { trains: true, ..Position::default() }));
    REPORTED.take();
    let count = count();
    NEXT.take();
    (count, REPORTED.take())
}

/// Reports the order of a loader's items to [`in_training`].
pub(super) fn report(order: DataOrder) {
    REPORTED.set(Some(order));
}

/// Returns whether the caller of the loader is a training epoch.
pub(super) fn trains() -> bool {
    NEXT.get().is_some_and(|position| position.trains)
}

/// Returns the position that [`starting_at`] has set, once.
pub(super) fn take() -> Option<Position> {
    NEXT.take()
}
