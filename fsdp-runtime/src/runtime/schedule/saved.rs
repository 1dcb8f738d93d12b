//! The accounting of what operations of this crate save for backward, inside of a unit's forward.

use std::any::Any;
use std::sync::Arc;

use super::core::Schedule;
use crate::backend::ModelBackend;
use crate::backend::ops::saved::{SavedCounter, enter_forward};
use crate::param_group::memory::{Counted, MemoryKind, MemoryTracker};

/// Counts what the operations of a unit's forward save as activations of the unit.
struct UnitActivations {
    tracker: Arc<MemoryTracker>,
    unit: usize,
}

impl SavedCounter for UnitActivations {
    fn count(&self, bytes: usize) -> Box<dyn Any + Send + Sync> {
        Box::new(Counted::new(&self.tracker, MemoryKind::Activations, bytes, self.unit))
    }
}

impl<B: ModelBackend> Schedule<B> {
    /// Counts what the operations of a forward save, which begins now on this thread.
    pub(super) fn count_saved_of(&self, unit: usize) {
        enter_forward(Arc::new(UnitActivations { tracker: self.tracker.clone(), unit }));
    }
}
