//! The record of memory over time while it is kept: the newest changes of the counters, in a ring of
//! bounded size.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::holders::MemoryHolder;
use super::timeline::{MemoryEvent, MemoryMark, MemorySample, MemoryTimeline};
use super::usage::Memory;

/// A change, with the index of its unit.
#[derive(Debug)]
struct Change {
    time: Duration,
    kind: &'static str,
    on_host: bool,
    bytes: usize,
    unit: Option<usize>,
}

/// What a mark stands for, with the index of the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Forward(usize),
    Backward(usize),
    Step(usize),
}

/// A mark, and the number of changes since the record began that precede it.
#[derive(Debug)]
struct Mark {
    time: Duration,
    event: Event,
    changes: usize,
}

/// The counts at the end of a record.
#[derive(Debug)]
pub(super) struct After {
    pub(super) device: Memory,
    pub(super) host: Memory,
    pub(super) holders: Vec<MemoryHolder>,
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
    marks: VecDeque<Mark>,
    dropped_marks: usize,
    steps: usize,
    /// Whether a backward has begun since the last step.
    ran_backward: bool,
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
            marks: VecDeque::new(),
            dropped_marks: 0,
            steps: 0,
            ran_backward: false,
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
        // The memory at an older mark is not known any more.
        while self.marks.front().is_some_and(|mark| mark.changes < self.dropped) {
            self.drop_mark();
        }
    }

    /// Adds the begin of a unit's forward or backward.
    pub(super) fn begin(&mut self, event: Event) {
        self.ran_backward |= matches!(event, Event::Backward(_));
        self.mark(event);
    }

    /// Adds the end of a step, unless no backward has begun since the last one.
    pub(super) fn end_step(&mut self) {
        if std::mem::take(&mut self.ran_backward) {
            self.steps += 1;
            self.mark(Event::Step(self.steps));
        }
    }

    /// Adds a mark, in place of the oldest if there is no room.
    fn mark(&mut self, event: Event) {
        let changes = self.dropped + self.changes.len();
        self.marks.push_back(Mark { time: self.begin.elapsed(), event, changes });
        if self.marks.len() > self.max_samples {
            self.drop_mark();
        }
    }

    fn drop_mark(&mut self) {
        self.marks.pop_front();
        self.dropped_marks += 1;
    }

    /// Returns the record so far. `path` returns the module path of a unit.
    pub(super) fn timeline(&self, after: After, path: &dyn Fn(usize) -> String) -> MemoryTimeline {
        let sample = |change: &Change| MemorySample {
            time: change.time,
            kind: change.kind,
            on_host: change.on_host,
            bytes: change.bytes,
            unit: change.unit.map(path),
        };
        let mark = |mark: &Mark| MemoryMark {
            time: mark.time,
            event: match mark.event {
                Event::Forward(unit) => MemoryEvent::Forward { unit: path(unit) },
                Event::Backward(unit) => MemoryEvent::Backward { unit: path(unit) },
                Event::Step(number) => MemoryEvent::Step { number },
            },
            samples: mark.changes - self.dropped,
        };
        MemoryTimeline {
            device_before: self.device_before,
            host_before: self.host_before,
            samples: self.changes.iter().map(sample).collect(),
            dropped: self.dropped,
            marks: self.marks.iter().map(mark).collect(),
            dropped_marks: self.dropped_marks,
            device_after: after.device,
            host_after: after.host,
            holders: after.holders,
            duration: self.begin.elapsed(),
            failure: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::timeline::{MemoryEvent, MemoryPeak, MemoryTimeline};
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
        // Unit 2 has none, so that the bytes are those of unit 1.
        tracker.give_back(MemoryKind::Gradients, 3, 2);
        tracker.take(MemoryKind::ReducedGradients, 2, None);
        let timeline = tracker.timeline(&path).unwrap();
        let found = timeline
            .samples
            .iter()
            .map(|sample| (sample.kind, sample.on_host, sample.bytes, sample.unit.as_deref()));
        let expected = [
            ("gradients", false, 7, Some("blocks.1")),
            ("gradients", false, 4, Some("blocks.1")),
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
    fn marks_have_the_memory_of_their_moment() {
        let tracker = MemoryTracker::new(false);
        tracker.take(MemoryKind::Shards, 5, 0);
        tracker.start_timeline(4);
        tracker.mark_step();
        tracker.mark_forward(1);
        tracker.take(MemoryKind::Gradients, 7, 1);
        tracker.mark_backward(1);
        tracker.give_back(MemoryKind::Gradients, 7, 1);
        tracker.mark_step();
        tracker.mark_step();
        let timeline = tracker.timeline(&path).unwrap();
        let unit = || "blocks.1".to_string();
        let events: Vec<_> = timeline.marks.iter().map(|mark| mark.event.clone()).collect();
        let expected = [
            MemoryEvent::Forward { unit: unit() },
            MemoryEvent::Backward { unit: unit() },
            MemoryEvent::Step { number: 1 },
        ];
        assert_eq!(events, expected, "a step without a backward is none");
        let totals = |timeline: &MemoryTimeline| {
            let levels = timeline.device_at_marks();
            levels.iter().map(|memory| memory.total.now).collect::<Vec<_>>()
        };
        assert_eq!(totals(&timeline), [5, 12, 5]);
        assert!(timeline.marks.is_sorted_by_key(|mark| mark.time));

        for bytes in 1..=4 {
            tracker.set(MemoryKind::Optimizer, bytes);
        }
        let timeline = tracker.timeline(&path).unwrap();
        assert_eq!((timeline.samples.len(), timeline.dropped), (4, 2));
        // The step was marked after the changes that have been dropped.
        assert_eq!((timeline.marks.len(), timeline.dropped_marks), (1, 2));
        assert_eq!((totals(&timeline), timeline.marks[0].samples), (vec![5], 0));
        for _ in 0..10 {
            tracker.mark_forward(0);
        }
        assert_eq!(tracker.timeline(&path).unwrap().marks.len(), 4, "marks are bounded, too");
    }

    #[test]
    fn the_peak_names_its_holders() {
        let tracker = MemoryTracker::new(false);
        tracker.take(MemoryKind::Shards, 5, 0);
        tracker.start_timeline(100);
        tracker.take(MemoryKind::ReducedGradients, 7, 1);
        tracker.take(MemoryKind::ReducedGradients, 9, 2);
        tracker.take(MemoryKind::GatherBuffers, 3, None);
        tracker.give_back(MemoryKind::GatherBuffers, 3, None);
        // Both units at once.
        tracker.give_back(MemoryKind::ReducedGradients, 16, None);
        tracker.take(MemoryKind::Optimizer, 1, None);
        let timeline = tracker.timeline(&path).unwrap();
        let MemoryPeak { bytes, holders, time } = timeline.device_peak();
        assert_eq!((bytes, time), (24, timeline.samples[2].time));
        let names: Vec<_> = holders.iter().map(|holder| (holder.name(), holder.bytes)).collect();
        let expected = [
            ("gradients of `blocks.2`", 9),
            ("gradients of `blocks.1`", 7),
            ("shards of `blocks.0`", 5),
            ("gathered", 3),
        ];
        assert_eq!(names, expected.map(|(name, bytes)| (name.to_string(), bytes)));
        assert_eq!(timeline.device_after.total.peak, 24);
        let now: Vec<_> = timeline.holders.iter().map(|holder| holder.bytes).collect();
        assert_eq!((now, timeline.host_peak().bytes), (vec![5, 1], 0));
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
