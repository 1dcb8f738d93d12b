//! Counters of a sharded model's memory, updated at every allocation and release.

use std::sync::{Arc, Mutex, MutexGuard};

use super::timeline::{MemoryTimeline, Recorder};
use super::usage::Memory;
use crate::error::IgnorePoison;

/// A finer division of the kinds of [`Memory`], which decides whether bytes count for the device or
/// for the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// Shards of sharded parameters, on their storage device.
    Shards,
    /// Replicated parameters, on their storage device.
    Replicated,
    /// Device copies of replicated parameters, for unsharded units.
    ReplicatedCopies,
    /// Device copies of shards, kept from forward to backward.
    ShardCopies,
    /// Gather buffers.
    GatherBuffers,
    /// Shards cast or copied for an all-gather, until it ends.
    AllGatherInputs,
    /// Full gradients, until they are reduced.
    Gradients,
    /// Results of a running reduction, on the device.
    ReductionOutputs,
    /// Reduced gradients, on their storage device.
    ReducedGradients,
    /// Inputs of units under activation checkpointing, and what operations of this crate save for
    /// backward in a unit's forward, on the device.
    Activations,
    /// Inputs of units under activation checkpointing, on the host.
    OffloadedActivations,
    /// The optimizer's state, on the storage device.
    Optimizer,
    /// The copy in f32 of a parameter that is being stepped, on the storage device.
    StepCopies,
    /// Moving averages of parameters, on the storage device.
    Averages,
    /// State that the optimizer's check leaves on the host, for a model on another device.
    OptimizerProbes,
}

impl MemoryKind {
    /// Returns the name of the kind of [`Memory`] that counts this kind.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Shards | Self::ShardCopies => "shards",
            Self::Replicated | Self::ReplicatedCopies => "replicated",
            Self::GatherBuffers | Self::AllGatherInputs => "gathered",
            Self::Gradients | Self::ReductionOutputs | Self::ReducedGradients => "gradients",
            Self::Activations | Self::OffloadedActivations => "activations",
            Self::Optimizer | Self::StepCopies | Self::OptimizerProbes => "optimizer",
            Self::Averages => "averages",
        }
    }

    /// Returns whether bytes of this kind are on the host. `offloaded` says that the storage device
    /// is the host.
    fn is_on_host(self, offloaded: bool) -> bool {
        match self {
            Self::Shards
            | Self::Replicated
            | Self::ReducedGradients
            | Self::Optimizer
            | Self::StepCopies
            | Self::Averages => offloaded,
            Self::OffloadedActivations | Self::OptimizerProbes => true,
            Self::ReplicatedCopies
            | Self::ShardCopies
            | Self::GatherBuffers
            | Self::AllGatherInputs
            | Self::Gradients
            | Self::ReductionOutputs
            | Self::Activations => false,
        }
    }
}

/// Running counts of the memory on the device and on the host.
#[derive(Debug, Default)]
pub(crate) struct MemoryTracker {
    device: Mutex<Memory>,
    host: Mutex<Memory>,
    /// Whether the storage device is the host.
    offloaded: bool,
    /// Record of the changes, while one is kept. It is locked after a count, never before.
    timeline: Mutex<Option<Recorder>>,
}

impl MemoryTracker {
    /// Creates a tracker whose counts are 0. `offloaded` says that the storage device is the host.
    pub(crate) fn new(offloaded: bool) -> Self {
        Self { offloaded, ..Self::default() }
    }

    /// Returns the present counts of the device.
    pub(crate) fn device(&self) -> Memory {
        *lock(&self.device)
    }

    /// Returns the present counts of the host.
    pub(crate) fn host(&self) -> Memory {
        *lock(&self.host)
    }

    /// Adds `bytes` to a kind, for a unit (by its index) or for several.
    pub(crate) fn take(&self, kind: MemoryKind, bytes: usize, unit: impl Into<Option<usize>>) {
        self.change(kind, unit.into(), |now| now + bytes);
    }

    /// Subtracts `bytes` from a kind, for a unit (by its index) or for several.
    pub(crate) fn give_back(&self, kind: MemoryKind, bytes: usize, unit: impl Into<Option<usize>>) {
        self.change(kind, unit.into(), |now| now.saturating_sub(bytes));
    }

    /// Sets a kind to `bytes`.
    pub(crate) fn set(&self, kind: MemoryKind, bytes: usize) {
        self.change(kind, None, |_| bytes);
    }

    /// Starts a record of at most `max_samples` changes, in place of a running one.
    pub(crate) fn start_timeline(&self, max_samples: usize) {
        let (device, host) = (lock(&self.device), lock(&self.host));
        let recorder = Recorder::new(max_samples, *device, *host);
        *self.timeline.lock().ignore_poison() = Some(recorder);
    }

    /// Returns the record so far, if one is kept. `path` returns the module path of a unit.
    pub(crate) fn timeline(&self, path: &dyn Fn(usize) -> String) -> Option<MemoryTimeline> {
        Some(self.timeline.lock().ignore_poison().as_ref()?.timeline(path))
    }

    /// Ends the record of changes and drops it.
    pub(crate) fn stop_timeline(&self) {
        *self.timeline.lock().ignore_poison() = None;
    }

    fn change(&self, kind: MemoryKind, unit: Option<usize>, change: impl FnOnce(usize) -> usize) {
        let on_host = kind.is_on_host(self.offloaded);
        let mut memory = lock(if on_host { &self.host } else { &self.device });
        let before = memory.now(kind.name());
        let now = change(before);
        memory.set(kind.name(), now);
        if now != before {
            let (kind, bytes) = (kind.name(), now as u64);
            tracing::trace!(target: "fsdp::trace", %kind, on_host, bytes, "fsdp::memory");
        }
        if now != before
            && let Some(recorder) = &mut *self.timeline.lock().ignore_poison()
        {
            recorder.add(kind.name(), on_host, now, unit);
        }
    }
}

/// Locks a count of memory. A panic elsewhere leaves it valid, so a poisoned lock is no error.
fn lock(memory: &Mutex<Memory>) -> MutexGuard<'_, Memory> {
    memory.lock().ignore_poison()
}

/// Bytes that count for a kind of memory until this value is dropped.
#[derive(Debug)]
pub(crate) struct Counted {
    tracker: Arc<MemoryTracker>,
    kind: MemoryKind,
    bytes: usize,
    unit: Option<usize>,
}

impl Counted {
    /// Adds `bytes` to a kind of memory, for a unit (by its index) or for several, until the
    /// returned value is dropped.
    pub(crate) fn new(
        tracker: &Arc<MemoryTracker>,
        kind: MemoryKind,
        bytes: usize,
        unit: impl Into<Option<usize>>,
    ) -> Self {
        let unit = unit.into();
        tracker.take(kind, bytes, unit);
        Self { tracker: tracker.clone(), kind, bytes, unit }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.tracker.give_back(self.kind, self.bytes, self.unit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::param_group::memory::Usage;

    #[test]
    fn the_peak_of_the_total_is_of_one_moment() {
        let tracker = MemoryTracker::default();
        tracker.take(MemoryKind::GatherBuffers, 10, 0);
        tracker.give_back(MemoryKind::GatherBuffers, 10, 0);
        tracker.take(MemoryKind::Gradients, 7, None);
        let memory = tracker.device();
        assert_eq!(memory.gathered, Usage { now: 0, peak: 10 });
        assert_eq!(memory.total, Usage { now: 7, peak: 10 });
        tracker.set(MemoryKind::Optimizer, 20);
        assert_eq!(tracker.device().total, Usage { now: 27, peak: 27 });
        assert!(tracker.device().to_string().contains("gradients"));
        assert_eq!(tracker.host(), Memory::default());
    }

    #[test]
    fn offloaded_kinds_count_for_the_host() {
        let tracker = MemoryTracker::new(true);
        for kind in [
            MemoryKind::Shards,
            MemoryKind::Replicated,
            MemoryKind::ReducedGradients,
            MemoryKind::Optimizer,
        ] {
            tracker.take(kind, 1, None);
        }
        for kind in [
            MemoryKind::ReplicatedCopies,
            MemoryKind::ShardCopies,
            MemoryKind::GatherBuffers,
            MemoryKind::Gradients,
        ] {
            tracker.take(kind, 100, None);
        }
        assert_eq!((tracker.host().total.now, tracker.device().total.now), (4, 400));
        let tracker = MemoryTracker::new(false);
        tracker.take(MemoryKind::OffloadedActivations, 5, None);
        assert_eq!((tracker.host().activations.now, tracker.device().total.now), (5, 0));
    }

    #[test]
    fn dropping_counted_bytes_gives_them_back() {
        let tracker = Arc::new(MemoryTracker::default());
        let counted =
            [3, 4].map(|bytes| Counted::new(&tracker, MemoryKind::Activations, bytes, None));
        assert_eq!(tracker.device().activations, Usage { now: 7, peak: 7 });
        drop(counted);
        assert_eq!(tracker.device().activations, Usage { now: 0, peak: 7 });
    }
}
