//! Memory over time: the newest changes of the counters, in a ring of bounded size.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::usage::Memory;

/// A change of one kind of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemorySample {
    /// Time since the record began.
    pub time: Duration,
    /// Kind of memory, under its name in [`Memory::kinds`].
    pub kind: &'static str,
    /// Whether the bytes are in host memory in place of device memory.
    pub on_host: bool,
    /// Bytes of this kind after the change.
    pub bytes: usize,
    /// Module path of the unit whose memory changed; empty for the outermost unit, and `None` where
    /// the memory of several units changed.
    pub unit: Option<String>,
}

/// Memory of a sharded model on one rank over time.
///
/// [`Stats::memory_timeline`](crate::Stats::memory_timeline) returns it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryTimeline {
    /// Memory on the device before the first sample.
    pub device_before: Memory,
    /// Memory on the host before the first sample.
    pub host_before: Memory,
    /// Changes, in the order in which they happened.
    pub samples: Vec<MemorySample>,
    /// Number of older changes that the record had no room for.
    pub dropped: usize,
    /// Duration of the record.
    pub duration: Duration,
}

impl MemoryTimeline {
    /// Returns the memory on the device over time. The first entry, at time 0, is the memory before
    /// the first change. The others are those after each change.
    ///
    /// Peaks are those since the first entry.
    pub fn device(&self) -> Vec<(Duration, Memory)> {
        self.levels(self.device_before, false)
    }

    /// Returns the memory on the host, as [`device`](Self::device) does.
    pub fn host(&self) -> Vec<(Duration, Memory)> {
        self.levels(self.host_before, true)
    }

    fn levels(&self, before: Memory, on_host: bool) -> Vec<(Duration, Memory)> {
        let changes = self.samples.iter().filter(|sample| sample.on_host == on_host);
        let mut memory = before;
        let after = changes.map(|sample| {
            memory.set(sample.kind, sample.bytes);
            (sample.time, memory)
        });
        let after: Vec<_> = after.collect();
        std::iter::once((Duration::ZERO, before)).chain(after).collect()
    }
}

/// A change, with the index of its unit.
#[derive(Debug)]
struct Change {
    time: Duration,
    kind: &'static str,
    on_host: bool,
    bytes: usize,
    unit: Option<usize>,
}

/// The record of memory over time, while it is kept.
#[derive(Debug)]
pub(super) struct Recorder {
    begin: Instant,
    max_samples: usize,
    device_before: Memory,
    host_before: Memory,
    changes: VecDeque<Change>,
    dropped: usize,
}

impl Recorder {
    /// Starts a record of changes of memory. `device` and `host` are the present counts.
    pub(super) fn new(max_samples: usize, device: Memory, host: Memory) -> Self {
        Self {
            begin: Instant::now(),
            max_samples,
            device_before: device.without_peaks(),
            host_before: host.without_peaks(),
            changes: VecDeque::new(),
            dropped: 0,
        }
    }

    /// Adds a change, in place of the oldest if there is no room.
    pub(super) fn add(
        &mut self,
        kind: &'static str,
        on_host: bool,
        bytes: usize,
        unit: Option<usize>,
    ) {
        let time = self.begin.elapsed();
        self.changes.push_back(Change { time, kind, on_host, bytes, unit });
        if self.changes.len() <= self.max_samples {
            return;
        }
        if let Some(Change { kind, on_host, bytes, .. }) = self.changes.pop_front() {
            let before = if on_host { &mut self.host_before } else { &mut self.device_before };
            before.set(kind, bytes);
            *before = before.without_peaks();
            self.dropped += 1;
        }
    }

    /// Returns the record so far. `path` returns the module path of a unit.
    pub(super) fn timeline(&self, path: &dyn Fn(usize) -> String) -> MemoryTimeline {
        let sample = |change: &Change| MemorySample {
            time: change.time,
            kind: change.kind,
            on_host: change.on_host,
            bytes: change.bytes,
            unit: change.unit.map(path),
        };
        MemoryTimeline {
            device_before: self.device_before,
            host_before: self.host_before,
            samples: self.changes.iter().map(sample).collect(),
            dropped: self.dropped,
            duration: self.begin.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tracker::{MemoryKind, MemoryTracker};

    fn path(unit: usize) -> String {
        format!("blocks.{unit}")
    }

    #[test]
    fn a_record_has_every_change_after_its_start() {
        let tracker = MemoryTracker::new(true);
        tracker.take(MemoryKind::Shards, 5, 0);
        assert_eq!(tracker.timeline(&path), None);
        tracker.start_timeline(10);
        tracker.take(MemoryKind::Gradients, 7, 1);
        tracker.take(MemoryKind::Gradients, 0, 1);
        tracker.give_back(MemoryKind::Gradients, 3, 2);
        tracker.take(MemoryKind::ReducedGradients, 2, None);
        let timeline = tracker.timeline(&path).unwrap();
        let found = timeline
            .samples
            .iter()
            .map(|sample| (sample.kind, sample.on_host, sample.bytes, sample.unit.as_deref()));
        let expected = [
            ("gradients", false, 7, Some("blocks.1")),
            ("gradients", false, 4, Some("blocks.2")),
            ("gradients", true, 2, None),
        ];
        assert_eq!(found.collect::<Vec<_>>(), expected);
        assert_eq!((timeline.host_before.shards.now, timeline.dropped), (5, 0));
        assert!(timeline.samples.is_sorted_by_key(|sample| sample.time));
        assert!(timeline.samples.iter().all(|sample| sample.time <= timeline.duration));
        tracker.stop_timeline();
        assert_eq!(tracker.timeline(&path), None);
    }

    #[test]
    fn levels_are_those_of_the_counters() {
        let tracker = MemoryTracker::new(false);
        tracker.take(MemoryKind::Gradients, 100, None);
        tracker.give_back(MemoryKind::Gradients, 100, None);
        tracker.take(MemoryKind::Shards, 5, None);
        tracker.start_timeline(100);
        tracker.take(MemoryKind::GatherBuffers, 8, 0);
        tracker.take(MemoryKind::Gradients, 2, 0);
        tracker.give_back(MemoryKind::GatherBuffers, 8, 0);
        let device = tracker.timeline(&path).unwrap().device();
        let totals: Vec<_> = device.iter().map(|(_, memory)| memory.total.now).collect();
        assert_eq!(totals, [5, 13, 15, 7]);
        let last = device.last().unwrap().1;
        assert_eq!((last.gathered.now, last.gathered.peak, last.total.peak), (0, 8, 15));
        assert_eq!(last.gradients.peak, 2, "an earlier peak does not count");
        assert_eq!(last.total.now, tracker.device().total.now);
        assert_eq!(tracker.timeline(&path).unwrap().host().len(), 1);
    }

    #[test]
    fn the_newest_changes_are_kept_and_levels_stay_right() {
        let tracker = MemoryTracker::new(false);
        tracker.start_timeline(3);
        for bytes in 1..=10 {
            tracker.set(MemoryKind::Optimizer, bytes);
            tracker.set(MemoryKind::Shards, 100 * bytes);
        }
        let timeline = tracker.timeline(&path).unwrap();
        assert_eq!((timeline.samples.len(), timeline.dropped), (3, 17));
        let totals: Vec<_> = timeline.device().iter().map(|(_, memory)| memory.total.now).collect();
        assert_eq!(totals, [9 + 800, 9 + 900, 10 + 900, 10 + 1000]);
    }
}
