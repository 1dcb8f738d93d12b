//! [`MemoryHandle`]: access to the accounting that outlives the model.

use std::sync::Arc;

use super::holders::MemoryHolder;
use super::timeline::MemoryTimeline;
use super::tracker::MemoryTracker;
use crate::error::ScheduleError;

/// The accounting of a model's memory, with the names of the model's units. It does not keep the
/// model alive.
#[derive(Clone, Debug)]
pub(crate) struct MemoryHandle {
    tracker: Arc<MemoryTracker>,
    /// Module path of each unit, by its index.
    paths: Arc<[String]>,
}

impl MemoryHandle {
    /// Returns the handle of a tracker whose units have these module paths.
    pub(crate) fn new(tracker: Arc<MemoryTracker>, paths: impl Iterator<Item = String>) -> Self {
        Self { tracker, paths: paths.collect() }
    }

    /// Returns what holds memory at present, the largest holder first.
    pub(crate) fn holders(&self) -> Vec<MemoryHolder> {
        self.tracker.holders(&|unit| self.paths[unit].clone())
    }

    /// Returns an error if the memory on the device was above the limit at any moment.
    pub(crate) fn check_limit(&self) -> Result<(), ScheduleError> {
        self.tracker.check_limit(&|unit| self.paths[unit].clone())
    }

    /// Starts a record of at most `max_samples` changes, in place of a running one.
    pub(crate) fn start_timeline(&self, max_samples: usize) {
        self.tracker.start_timeline(max_samples);
    }

    /// Returns the record so far, if one is kept.
    pub(crate) fn timeline(&self) -> Option<MemoryTimeline> {
        self.tracker.timeline(&|unit| self.paths[unit].clone())
    }

    /// Ends the record of changes and drops it.
    pub(crate) fn stop_timeline(&self) {
        self.tracker.stop_timeline();
    }
}
