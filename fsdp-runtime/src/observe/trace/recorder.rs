//! The records of a trace, and the threads that they are of.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::error::IgnorePoison;

/// Part of a rank that a thread runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// The user's program.
    Compute,
    /// Collectives.
    Communication,
}

/// A rank's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lane {
    /// The rank's number.
    pub(super) rank: usize,
    pub(super) role: Role,
}

/// One end of an arrow, with the number of its collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrow {
    Start(u64),
    Step(u64),
    End(u64),
}

/// What has happened on a thread.
#[derive(Clone, Debug)]
pub(super) enum What {
    Begin { category: &'static str, name: Arc<str>, bytes: Option<u64> },
    End,
    Arrow(Arrow),
    Memory { kind: &'static str, on_host: bool, bytes: u64 },
}

/// An event at a time, in nanoseconds since the trace began.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) time: u64,
    pub(super) lane: Lane,
    pub(super) what: What,
}

/// Name of an open span, by which its end is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// A span of `tracing`.
    Span(u64),
    /// The forward of a unit.
    Forward(Arc<str>),
    /// A part of the backward of a unit.
    Backward,
}

/// An open span, and whether its begin was recorded.
#[derive(Debug)]
struct Open {
    key: Key,
    recorded: bool,
}

#[derive(Debug)]
struct Thread {
    lane: Lane,
    open: Vec<Open>,
    /// Units whose backward has begun and not ended, the newest last.
    backward: Vec<Arc<str>>,
}

#[derive(Debug, Default)]
struct State {
    threads: HashMap<ThreadId, Thread>,
    records: Vec<Record>,
    dropped: usize,
    /// Completed steps of each rank.
    completed: BTreeMap<usize, u64>,
    /// Ranks that have run a backward pass since their last step.
    ran_backward: BTreeSet<usize>,
}

/// All records of a trace, and what [`json`](super::json) writes beside them.
#[derive(Debug)]
pub(super) struct Records<'a> {
    pub(super) records: &'a [Record],
    /// Nanoseconds from the Unix epoch to the begin of the trace.
    pub(super) epoch: u128,
    pub(super) dropped: usize,
}

/// Collects the records of all threads.
#[derive(Debug)]
pub(super) struct Recorder {
    steps: RangeInclusive<u64>,
    max_records: usize,
    begin: Instant,
    epoch: u128,
    state: Mutex<State>,
}

impl Recorder {
    /// Creates a recorder of the given steps, counted from 1.
    pub(super) fn new(steps: RangeInclusive<u64>, max_records: usize) -> Self {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        let state = Mutex::new(State::default());
        Self { steps, max_records, begin: Instant::now(), epoch, state }
    }

    /// Returns whether a rank has begun.
    pub(super) fn has_ranks(&self) -> bool {
        !self.state.lock().ignore_poison().completed.is_empty()
    }

    /// Returns the number of records for which there was no room.
    pub(super) fn dropped(&self) -> usize {
        self.state.lock().ignore_poison().dropped
    }

    /// Calls `read` with all records so far.
    pub(super) fn with_records<T>(&self, read: impl FnOnce(&Records<'_>) -> T) -> T {
        let state = self.state.lock().ignore_poison();
        let State { records, dropped, .. } = &*state;
        read(&Records { records, epoch: self.epoch, dropped: *dropped })
    }

    /// Says that the calling thread is a rank's.
    pub(super) fn enter_thread(&self, lane: Lane) {
        let state = &mut *self.state.lock().ignore_poison();
        state.completed.entry(lane.rank).or_insert(0);
        let thread = Thread { lane, open: Vec::new(), backward: Vec::new() };
        state.threads.insert(std::thread::current().id(), thread);
    }

    /// Says that the calling thread leaves the rank.
    pub(super) fn leave_thread(&self) {
        self.on_thread(|log| log.close_to(0));
        let id = std::thread::current().id();
        self.state.lock().ignore_poison().threads.remove(&id);
    }

    /// Calls `f` with the log of the calling thread, if it is a rank's.
    pub(super) fn on_thread(&self, f: impl FnOnce(&mut ThreadLog<'_>)) {
        let state = &mut *self.state.lock().ignore_poison();
        let State { threads, records, dropped, completed, ran_backward } = state;
        let Some(thread) = threads.get_mut(&std::thread::current().id()) else { return };
        let rank = thread.lane.rank;
        let completed = completed.entry(rank).or_insert(0);
        let time = u64::try_from(self.begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let is_recorded = self.steps.contains(&(*completed + 1));
        let sink = Sink { records, dropped, max_records: self.max_records, time, is_recorded };
        f(&mut ThreadLog { thread, sink, completed, ran_backward });
    }
}

struct Sink<'a> {
    records: &'a mut Vec<Record>,
    dropped: &'a mut usize,
    max_records: usize,
    time: u64,
    is_recorded: bool,
}

impl Sink<'_> {
    /// Adds a record. Returns whether there was room, and the step is one of those to record.
    fn add(&mut self, lane: Lane, what: What) -> bool {
        if !self.is_recorded {
            return false;
        }
        if self.records.len() >= self.max_records {
            *self.dropped += 1;
            return false;
        }
        self.records.push(Record { time: self.time, lane, what });
        true
    }
}

/// The log of one thread at one moment.
pub(super) struct ThreadLog<'a> {
    thread: &'a mut Thread,
    sink: Sink<'a>,
    completed: &'a mut u64,
    ran_backward: &'a mut BTreeSet<usize>,
}

impl ThreadLog<'_> {
    /// Opens a span.
    pub(super) fn begin(
        &mut self,
        key: Key,
        category: &'static str,
        name: Arc<str>,
        bytes: Option<u64>,
    ) {
        let recorded = self.sink.add(self.thread.lane, What::Begin { category, name, bytes });
        self.thread.open.push(Open { key, recorded });
    }

    /// Closes the newest span of a key, and those that were opened after it.
    pub(super) fn end(&mut self, key: &Key) {
        if let Some(at) = self.thread.open.iter().rposition(|open| open.key == *key) {
            self.close_to(at);
        }
    }

    /// Closes spans until `depth` are open. The end of a recorded span is always recorded.
    fn close_to(&mut self, depth: usize) {
        for open in self.thread.open.drain(depth..).rev() {
            if open.recorded {
                let (time, lane) = (self.sink.time, self.thread.lane);
                self.sink.records.push(Record { time, lane, what: What::End });
            }
        }
    }

    /// Adds an end of an arrow, which is attached to the span that is open.
    pub(super) fn arrow(&mut self, arrow: Arrow) {
        if self.thread.open.last().is_some_and(|open| open.recorded) {
            self.sink.add(self.thread.lane, What::Arrow(arrow));
        }
    }

    /// Adds the bytes of a kind of memory.
    pub(super) fn memory(&mut self, kind: &'static str, on_host: bool, bytes: u64) {
        self.sink.add(self.thread.lane, What::Memory { kind, on_host, bytes });
    }

    /// Begins the backward of a unit, which interrupts that of the unit before it.
    pub(super) fn begin_backward(&mut self, unit: Arc<str>) {
        self.end(&Key::Backward);
        self.thread.backward.push(unit.clone());
        self.open_backward(&unit);
    }

    /// Ends the backward of a unit, and goes on with the newest that has not ended.
    pub(super) fn end_backward(&mut self, unit: &str) {
        let units = &mut self.thread.backward;
        let Some(at) = units.iter().rposition(|other| &**other == unit) else { return };
        let is_newest = at + 1 == units.len();
        units.remove(at);
        if is_newest {
            let next = units.last().cloned();
            self.end(&Key::Backward);
            if let Some(next) = next {
                self.open_backward(&next);
            }
        }
    }

    fn open_backward(&mut self, unit: &str) {
        self.begin(Key::Backward, "backward", format!("backward {unit}").into(), None);
    }

    /// Ends the whole backward pass.
    pub(super) fn end_backward_pass(&mut self) {
        self.thread.backward.clear();
        self.ran_backward.insert(self.thread.lane.rank);
    }

    /// Counts a step, unless no backward pass has run since the last one.
    pub(super) fn end_step(&mut self) {
        if self.ran_backward.remove(&self.thread.lane.rank) {
            *self.completed += 1;
        }
    }
}
