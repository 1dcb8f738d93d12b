//! Counters of a sharded model's memory, updated at every allocation and release.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::holders::{Holders, MemoryHolder};
use super::recorder::{After, Event, Recorder};
use super::timeline::MemoryTimeline;
use super::usage::Memory;
use crate::error::{IgnorePoison, ScheduleError};

/// Number of holders that the error of a limit names.
const NAMED_HOLDERS: usize = 5;

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

/// The memory in one place, by kind, and by kind and unit.
#[derive(Debug, Default)]
struct Place {
    memory: Memory,
    holders: Holders,
}

/// The first moment at which the memory on the device exceeded the limit.
#[derive(Debug)]
struct Exceeded {
    used: usize,
    holders: Holders,
}

/// Running counts of the memory on the device and on the host.
#[derive(Debug)]
pub(crate) struct MemoryTracker {
    device: Mutex<Place>,
    host: Mutex<Place>,
    /// Whether the storage device is the host.
    offloaded: bool,
    /// Whether an optimizer has stepped the model that does not report its state.
    unknown_optimizer: AtomicBool,
    /// Whether the optimizer's state was measured or reported.
    measured_optimizer: AtomicBool,
    /// Most bytes that the device may hold, or `usize::MAX`.
    limit: AtomicUsize,
    /// It is locked after a count, never before.
    exceeded: Mutex<Option<Exceeded>>,
    /// Record of the changes, while one is kept. It is locked after a count, never before.
    timeline: Mutex<Option<Recorder>>,
}

impl MemoryTracker {
    /// Creates a tracker whose counts are 0. `offloaded` says that the storage device is the host.
    pub(crate) fn new(offloaded: bool) -> Self {
        Self {
            device: Mutex::default(),
            host: Mutex::default(),
            offloaded,
            unknown_optimizer: AtomicBool::new(false),
            measured_optimizer: AtomicBool::new(false),
            limit: AtomicUsize::new(usize::MAX),
            exceeded: Mutex::default(),
            timeline: Mutex::default(),
        }
    }

    /// Returns the present counts of the device.
    pub(crate) fn device(&self) -> Memory {
        lock(&self.device).memory
    }

    /// Returns the present counts of the host.
    pub(crate) fn host(&self) -> Memory {
        lock(&self.host).memory
    }

    /// Returns what holds memory at present on the device and on the host, the largest holder first.
    /// `path` returns the module path of a unit.
    pub(super) fn holders(&self, path: &dyn Fn(usize) -> String) -> Vec<MemoryHolder> {
        let (device, host) = (lock(&self.device), lock(&self.host));
        list(&device, &host, path)
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

    /// Records that an optimizer has stepped the model that does not report its state.
    pub(crate) fn set_unknown_optimizer(&self) {
        self.unknown_optimizer.store(true, Ordering::Relaxed);
    }

    /// Records that the optimizer's state was measured or reported.
    pub(crate) fn set_measured_optimizer(&self) {
        self.measured_optimizer.store(true, Ordering::Relaxed);
    }

    /// Returns whether the counts of the host, or of the device, lack the optimizer's state.
    pub(crate) fn lacks_optimizer(&self, on_host: bool) -> bool {
        self.unknown_optimizer.load(Ordering::Relaxed)
            && !self.measured_optimizer.load(Ordering::Relaxed)
            && MemoryKind::Optimizer.is_on_host(self.offloaded) == on_host
    }

    /// Starts a record of at most `max_samples` changes, in place of a running one.
    pub(super) fn start_timeline(&self, max_samples: usize) {
        let (device, host) = (lock(&self.device), lock(&self.host));
        let recorder = Recorder::new(max_samples, device.memory, host.memory);
        *self.timeline.lock().ignore_poison() = Some(recorder);
    }

    /// Returns the record so far, if one is kept. `path` returns the module path of a unit.
    pub(super) fn timeline(&self, path: &dyn Fn(usize) -> String) -> Option<MemoryTimeline> {
        let (device, host) = (lock(&self.device), lock(&self.host));
        let timeline = self.timeline.lock().ignore_poison();
        let holders = list(&device, &host, path);
        let after = After { device: device.memory, host: host.memory, holders };
        Some(timeline.as_ref()?.timeline(after, path))
    }

    /// Ends the record of changes and drops it.
    pub(super) fn stop_timeline(&self) {
        *self.timeline.lock().ignore_poison() = None;
    }

    /// Marks the begin of a unit's forward in the record.
    pub(crate) fn mark_forward(&self, unit: usize) {
        self.on_record(|recorder| recorder.begin(Event::Forward(unit)));
    }

    /// Marks the begin of a unit's backward in the record.
    pub(crate) fn mark_backward(&self, unit: usize) {
        self.on_record(|recorder| recorder.begin(Event::Backward(unit)));
    }

    /// Marks the end of a step of the optimizer in the record.
    pub(crate) fn mark_step(&self) {
        self.on_record(Recorder::end_step);
    }

    fn on_record(&self, f: impl FnOnce(&mut Recorder)) {
        if let Some(recorder) = &mut *self.timeline.lock().ignore_poison() {
            f(recorder);
        }
    }

    /// Sets the most bytes that the device may hold; `None` for no limit.
    pub(crate) fn set_limit(&self, limit: Option<usize>) {
        let device = lock(&self.device);
        self.limit.store(limit.unwrap_or(usize::MAX), Ordering::Relaxed);
        *self.exceeded.lock().ignore_poison() = None;
        self.note_limit(&device);
    }

    /// Notes the first moment above the limit.
    fn note_limit(&self, device: &Place) {
        let used = device.memory.total.now;
        if used > self.limit.load(Ordering::Relaxed) {
            let exceeded = &mut *self.exceeded.lock().ignore_poison();
            exceeded.get_or_insert_with(|| Exceeded { used, holders: device.holders.clone() });
        }
    }

    /// Returns an error if the memory on the device was above the limit at any moment since the limit
    /// was set. `path` returns the module path of a unit.
    pub(crate) fn check_limit(&self, path: &dyn Fn(usize) -> String) -> Result<(), ScheduleError> {
        let limit = self.limit.load(Ordering::Relaxed);
        if limit == usize::MAX {
            return Ok(());
        }
        let exceeded = self.exceeded.lock().ignore_poison();
        let Some(Exceeded { used, holders }) = &*exceeded else { return Ok(()) };
        let holders = holders.list(false, path).into_iter().take(NAMED_HOLDERS);
        let holders = holders.map(|holder| (holder.name(), holder.bytes)).collect();
        Err(ScheduleError::MemoryLimit { limit, used: *used, holders })
    }

    fn change(&self, kind: MemoryKind, unit: Option<usize>, change: impl FnOnce(usize) -> usize) {
        let on_host = kind.is_on_host(self.offloaded);
        let kind = kind.name();
        let mut place = lock(if on_host { &self.host } else { &self.device });
        let before = place.memory.now(kind);
        let now = change(before);
        if now == before {
            return;
        }
        let parts = if now > before {
            place.holders.add((kind, unit), now - before);
            vec![(unit, now)]
        } else {
            let mut level = before;
            let parts = place.holders.subtract(kind, unit, before - now).into_iter();
            let parts = parts.map(|(unit, bytes)| {
                level -= bytes;
                (unit, level)
            });
            parts.collect()
        };
        place.memory.set(kind, now);
        let bytes = now as u64;
        tracing::trace!(target: "fsdp::trace", %kind, on_host, bytes, "fsdp::memory");
        self.on_record(|recorder| {
            for (unit, bytes) in parts {
                recorder.add(kind, on_host, bytes, unit);
            }
        });
        if !on_host {
            self.note_limit(&place);
        }
    }
}

/// Returns the holders of both places, the largest first.
fn list(device: &Place, host: &Place, path: &dyn Fn(usize) -> String) -> Vec<MemoryHolder> {
    let mut holders = device.holders.list(false, path);
    holders.extend(host.holders.list(true, path));
    super::holders::sort(&mut holders);
    holders
}

/// Locks a count of memory. A panic elsewhere leaves it valid, so a poisoned lock is no error.
fn lock(place: &Mutex<Place>) -> MutexGuard<'_, Place> {
    place.lock().ignore_poison()
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
        let tracker = MemoryTracker::new(false);
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
        let tracker = Arc::new(MemoryTracker::new(false));
        let counted =
            [3, 4].map(|bytes| Counted::new(&tracker, MemoryKind::Activations, bytes, None));
        assert_eq!(tracker.device().activations, Usage { now: 7, peak: 7 });
        drop(counted);
        assert_eq!(tracker.device().activations, Usage { now: 0, peak: 7 });
    }
    #[test]
    fn the_first_moment_above_the_limit_is_an_error_with_its_holders() {
        let path = |unit: usize| format!("blocks.{unit}");
        let tracker = MemoryTracker::new(false);
        tracker.take(MemoryKind::Shards, 10, 0);
        assert_eq!(tracker.check_limit(&path), Ok(()));
        tracker.set_limit(Some(20));
        tracker.take(MemoryKind::Gradients, 10, 1);
        tracker.take(MemoryKind::OffloadedActivations, 100, 1);
        assert_eq!(tracker.check_limit(&path), Ok(()), "20 of 20 bytes, and the host has no limit");
        tracker.take(MemoryKind::GatherBuffers, 1, None);
        tracker.give_back(MemoryKind::Gradients, 10, 1);
        let error = tracker.check_limit(&path).unwrap_err();
        let ScheduleError::MemoryLimit { limit, used, holders } = &error else { panic!("{error}") };
        assert_eq!((*limit, *used), (20, 21));
        let names: Vec<_> = holders.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["gradients of `blocks.1`", "shards of `blocks.0`", "gathered"]);
        tracker.set_limit(Some(20));
        assert_eq!(tracker.check_limit(&path), Ok(()), "the memory is below the limit again");
        tracker.set_limit(Some(10));
        assert!(tracker.check_limit(&path).is_err(), "the memory is above the new limit");
        tracker.set_limit(None);
        assert_eq!(tracker.check_limit(&path), Ok(()));
    }
}
