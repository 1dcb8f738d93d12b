//! A record of which stream wrote and read each device buffer, for unit tests: it finds accesses
//! that no fence orders, on devices where they do no harm as well.
//!
//! Each stream has a vector clock. A fence carries the clock of the stream that made it, and a wait
//! joins that clock into the waiting stream's. An access is ordered if the accessing stream's clock
//! covers the buffer's last write and, for a write, all reads since. The waits that CubeCL adds by
//! itself do not count (see [`fence`](super::fence)).
//!
//! Burn's own operations are not seen. The first place where the runtime takes a tensor from them
//! stands for their writes ([`wrote`]), and the release of a gather buffer for their reads.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::{Mutex, MutexGuard};

use burn_cubecl::tensor::CubeTensor;
use burn_fusion::custom::StreamId;
use cubecl::server::Handle;
use fsdp_kernels::accesses::Observer;

use crate::error::IgnorePoison;

type Clock = HashMap<StreamId, u64>;

#[derive(Default)]
struct Record {
    clocks: HashMap<StreamId, Clock>,
    fences: HashMap<u64, Clock>,
    /// Stream and time of each buffer's last write.
    writes: HashMap<String, (StreamId, u64)>,
    /// Times of each buffer's reads since the last write.
    reads: HashMap<String, Clock>,
    /// Waits that are left out.
    missing: Option<Waits>,
    violations: Vec<String>,
}

/// The waits of one place in the code.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waits {
    /// End of the path of the file that calls the wait.
    pub(crate) file: &'static str,
    /// Whether the communication thread waits, and not the rank's own.
    pub(crate) on_comm_thread: bool,
}

static RECORD: Mutex<Option<Record>> = Mutex::new(None);

/// Runs `f` with a record, in which the waits of `missing` are left out. Returns a description of
/// each access without order.
#[cfg_attr(not(feature = "cpu"), allow(dead_code, reason = "its tests run on CubeCL's CPU device"))]
pub(crate) fn violations(missing: Option<Waits>, f: impl FnOnce()) -> Vec<String> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().ignore_poison();
    fsdp_kernels::accesses::observe(Observer { reads, writes });
    *lock() = Some(Record { missing, ..Record::default() });
    f();
    lock().take().map_or_else(Vec::new, |record| record.violations)
}

fn lock() -> MutexGuard<'static, Option<Record>> {
    RECORD.lock().ignore_poison()
}

fn id(handle: &Handle) -> String {
    format!("{:?}", handle.memory.descriptor().id)
}

fn join(clock: &mut Clock, other: &Clock) {
    for (stream, time) in other {
        let own = clock.entry(*stream).or_default();
        *own = (*own).max(*time);
    }
}

impl Record {
    /// Advances the clock of a stream, and returns its time.
    fn tick(&mut self, stream: StreamId) -> u64 {
        let own = self.clocks.entry(stream).or_default().entry(stream).or_default();
        *own += 1;
        *own
    }

    fn covers(&self, stream: StreamId, other: StreamId, time: u64) -> bool {
        let clock = self.clocks.get(&stream);
        clock.and_then(|clock| clock.get(&other)).is_some_and(|known| *known >= time)
    }

    fn access(&mut self, buffer: &str, is_write: bool, at: &Location<'_>) {
        let stream = StreamId::current();
        let earlier = self.writes.get(buffer).map(|write| ("write", *write));
        let mut earlier: Vec<_> = earlier.into_iter().collect();
        if is_write {
            let reads = self.reads.get(buffer).into_iter().flatten();
            earlier.extend(reads.map(|(stream, time)| ("read", (*stream, *time))));
        }
        for (what, (other, time)) in earlier {
            if other != stream && !self.covers(stream, other, time) {
                let access = if is_write { "write" } else { "read" };
                self.violations.push(format!(
                    "{access} of {buffer} on {stream} at {at}, after a {what} on {other} without order"
                ));
            }
        }
        let time = self.tick(stream);
        match is_write {
            true => {
                self.writes.insert(buffer.to_string(), (stream, time));
                self.reads.remove(buffer);
            }
            false => {
                self.reads.entry(buffer.to_string()).or_default().insert(stream, time);
            }
        }
    }
}

/// Records that the calling thread's stream reads a buffer.
#[track_caller]
pub(super) fn reads(handle: &Handle) {
    let at = Location::caller();
    if let Some(record) = &mut *lock() {
        record.access(&id(handle), false, at);
    }
}

/// Records that the calling thread's stream writes a buffer.
#[track_caller]
pub(super) fn writes(handle: &Handle) {
    let at = Location::caller();
    if let Some(record) = &mut *lock() {
        record.access(&id(handle), true, at);
    }
}

/// Records that the calling thread's stream reads tensors and writes buffers.
#[track_caller]
pub(super) fn record<'a>(
    read: impl IntoIterator<Item = &'a CubeTensor>,
    written: impl IntoIterator<Item = &'a Handle>,
) {
    for tensor in read {
        reads(&tensor.handle);
    }
    for handle in written {
        writes(handle);
    }
}

/// Records that operations of Burn on the calling thread's stream have written those of the buffers
/// that have no write on record.
///
/// The other buffers count as unchanged. A shard is taken from the module once in a pass, while
/// another rank may still read it for the pass before. A second write on record would leave that
/// read without order.
pub(super) fn wrote(tensors: &[CubeTensor]) {
    if let Some(record) = &mut *lock() {
        let stream = StreamId::current();
        let time = record.tick(stream);
        for tensor in tensors {
            record.writes.entry(id(&tensor.handle)).or_insert((stream, time));
        }
    }
}

/// Records a new fence of the calling thread.
pub(super) fn made(fence: u64) {
    if let Some(record) = &mut *lock() {
        let stream = StreamId::current();
        record.tick(stream);
        let clock = record.clocks.get(&stream).cloned().unwrap_or_default();
        record.fences.insert(fence, clock);
    }
}

/// Records that the calling thread's stream waits for a fence.
pub(super) fn waits(fence: u64, at: &Location<'_>) {
    let Some(record) = &mut *lock() else { return };
    let on_comm_thread =
        std::thread::current().name().is_some_and(|name| name.starts_with("fsdp-comm"));
    let is_missing = record.missing.is_some_and(|missing| {
        at.file().ends_with(missing.file) && missing.on_comm_thread == on_comm_thread
    });
    if is_missing {
        return;
    }
    if let Some(theirs) = record.fences.get(&fence).cloned() {
        join(record.clocks.entry(StreamId::current()).or_default(), &theirs);
    }
}
