//! Memory over time, as data: the changes of the counters, and the marks of units and steps.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::super::mib::mib;
use super::holders::{MemoryHolder, sort};
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

/// A moment of the training in a [`MemoryTimeline`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryMark {
    /// Time since the record began.
    pub time: Duration,
    /// What happened.
    pub event: MemoryEvent,
    /// Number of samples of the timeline that precede the mark.
    pub samples: usize,
}

/// What happened at a [`MemoryMark`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryEvent {
    /// The forward of a unit began. The module path of the outermost unit is empty.
    Forward {
        /// Module path of the unit.
        unit: String,
    },
    /// The backward of a unit began.
    Backward {
        /// Module path of the unit.
        unit: String,
    },
    /// A step of the optimizer ended.
    Step {
        /// Number of the step, counted from 1 since the record began.
        number: usize,
    },
}

/// The moment at which a rank held the most memory in one place, the device or the host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPeak {
    /// Time since the record began.
    pub time: Duration,
    /// Bytes of all kinds together.
    pub bytes: usize,
    /// What held the bytes, the largest holder first. Their sum is `bytes`.
    pub holders: Vec<MemoryHolder>,
}

/// Number of holders that the text of a peak names.
const NAMED_HOLDERS: usize = 5;

impl fmt::Display for MemoryPeak {
    /// Prints the bytes and the five largest holders: ``5.00 MiB: shards, 3.00 MiB; gradients of
    /// `blocks.2`, 2.00 MiB``.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} MiB", mib(self.bytes))?;
        for (index, holder) in self.holders.iter().take(NAMED_HOLDERS).enumerate() {
            write!(f, "{}{holder}", if index == 0 { ": " } else { "; " })?;
        }
        Ok(())
    }
}

/// Memory of a sharded model on one rank over time.
///
/// [`Stats::memory_timeline`](crate::model::Stats::memory_timeline) returns it.
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
    /// Begins of units and ends of steps, in the order in which they happened. Those before the
    /// first sample that is left are left out.
    pub marks: Vec<MemoryMark>,
    /// Number of older marks that are left out.
    pub dropped_marks: usize,
    /// Memory on the device at the end of the record. Its peaks are those since the model was
    /// sharded.
    pub device_after: Memory,
    /// Memory on the host at the end of the record, with the peaks since the model was sharded.
    pub host_after: Memory,
    /// What holds memory on the device and on the host at the end of the record, the largest holder
    /// first.
    pub holders: Vec<MemoryHolder>,
    /// Duration of the record.
    pub duration: Duration,
    /// Error that ended the run, which pictures and files show. The record leaves it `None`; a program
    /// may set it.
    pub failure: Option<String>,
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

    /// Returns the memory on the device at each mark. Peaks are those since the record began.
    pub fn device_at_marks(&self) -> Vec<Memory> {
        self.at_marks(self.device_before, false)
    }

    /// Returns the memory on the host at each mark, as [`device_at_marks`](Self::device_at_marks)
    /// does.
    pub fn host_at_marks(&self) -> Vec<Memory> {
        self.at_marks(self.host_before, true)
    }

    /// Returns the moment at which the rank held the most memory on the device, and what held it. If
    /// older changes were [dropped](Self::dropped), it is the moment among those that are left.
    pub fn device_peak(&self) -> MemoryPeak {
        self.peak(self.device_before, false)
    }

    /// Returns the moment at which the rank held the most memory on the host, as
    /// [`device_peak`](Self::device_peak) does.
    pub fn host_peak(&self) -> MemoryPeak {
        self.peak(self.host_before, true)
    }

    fn changes(&self, on_host: bool) -> impl DoubleEndedIterator<Item = &MemorySample> {
        self.samples.iter().filter(move |sample| sample.on_host == on_host)
    }

    fn levels(&self, before: Memory, on_host: bool) -> Vec<(Duration, Memory)> {
        let mut memory = before;
        let after = self.changes(on_host).map(|sample| {
            memory.set(sample.kind, sample.bytes);
            (sample.time, memory)
        });
        let after: Vec<_> = after.collect();
        std::iter::once((Duration::ZERO, before)).chain(after).collect()
    }

    fn at_marks(&self, before: Memory, on_host: bool) -> Vec<Memory> {
        let mut memory = before;
        let mut done = 0;
        let marks = self.marks.iter().map(|mark| {
            for sample in &self.samples[done..mark.samples] {
                if sample.on_host == on_host {
                    memory.set(sample.kind, sample.bytes);
                }
            }
            done = mark.samples;
            memory
        });
        marks.collect()
    }

    /// Returns the first moment of the highest total. The holders at that moment are those at the
    /// end, without the changes in between.
    fn peak(&self, before: Memory, on_host: bool) -> MemoryPeak {
        let levels = self.levels(before, on_host);
        let highest = levels.iter().map(|(_, memory)| memory.total.now).max().unwrap_or(0);
        let at = levels.iter().position(|(_, memory)| memory.total.now == highest).unwrap_or(0);
        let after = self.holders.iter().filter(|holder| holder.on_host == on_host);
        let mut held: BTreeMap<(&'static str, Option<&str>), i128> = after
            .map(|holder| ((holder.kind, holder.unit.as_deref()), holder.bytes as i128))
            .collect();
        let mut now = before;
        for (index, sample) in self.changes(on_host).enumerate() {
            let earlier = now.now(sample.kind);
            now.set(sample.kind, sample.bytes);
            if index >= at {
                *held.entry((sample.kind, sample.unit.as_deref())).or_default() -=
                    sample.bytes as i128 - earlier as i128;
            }
        }
        let holder = |((kind, unit), bytes): ((&'static str, Option<&str>), i128)| MemoryHolder {
            kind,
            on_host,
            unit: unit.map(Into::into),
            bytes: usize::try_from(bytes).unwrap_or(0),
        };
        let mut holders: Vec<_> = held.into_iter().map(holder).collect();
        holders.retain(|holder| holder.bytes > 0);
        sort(&mut holders);
        MemoryPeak { time: levels[at].0, bytes: highest, holders }
    }
}
