//! The communication thread of a rank, which runs collectives in issue order while the rank
//! computes.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::group::AnyProcessGroup;
use crate::error::{CollectiveError, IgnorePoison, panic_message};
use crate::layout::Rank;

type Job = Box<dyn FnOnce() + Send>;

/// Returns the span of the life of a rank's thread, by which a trace knows whose thread it is.
pub(crate) fn rank_span(rank: Rank, thread: &'static str) -> tracing::Span {
    let rank = rank.index() as u64;
    tracing::trace_span!(target: "fsdp::trace", "fsdp::rank", rank, thread = %thread)
}

/// Handle to the communication thread of a rank, with which the rank issues its collectives.
///
/// The thread ends once the last handle is dropped and its queue is empty.
pub(crate) struct Communicator {
    group: Arc<AnyProcessGroup>,
    shared: Arc<CommunicationThread>,
}

/// The communication thread of a rank, and its queue.
struct CommunicationThread {
    jobs: Mutex<Sender<Job>>,
    handle: JoinHandle<()>,
    /// Nanoseconds that the thread has spent in collectives, including waits for other ranks.
    busy: Arc<AtomicU64>,
    blocked: Arc<Blocked>,
    /// Number of collectives that were issued.
    issued: AtomicU64,
}

/// Number of times that a rank has blocked in [`Work::wait`], and the time that it waited.
#[derive(Debug, Default)]
struct Blocked {
    waits: AtomicUsize,
    nanos: AtomicU64,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").field("group", &self.group).finish_non_exhaustive()
    }
}

impl Communicator {
    /// Starts the communication thread of a rank; `group` is the process group of all ranks.
    pub(crate) fn start(group: Arc<AnyProcessGroup>) -> std::io::Result<Arc<Self>> {
        let (jobs, queue) = channel::<Job>();
        let own = group.clone();
        let name = format!("fsdp-comm-{}", group.rank());
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let _span = rank_span(own.rank(), "communication").entered();
            queue.into_iter().for_each(|job| job());
            own.leave();
        })?;
        let shared = CommunicationThread {
            jobs: Mutex::new(jobs),
            handle: thread,
            busy: Arc::default(),
            blocked: Arc::default(),
            issued: AtomicU64::new(0),
        };
        Ok(Arc::new(Self { group, shared: Arc::new(shared) }))
    }

    /// Returns a handle to the same thread, for which the members of `group` are all ranks.
    pub(crate) fn among(&self, group: Arc<AnyProcessGroup>) -> Arc<Self> {
        Arc::new(Self { group, shared: self.shared.clone() })
    }

    /// Drops a handle. If it is the last one, waits for the thread to end.
    ///
    /// A process must not exit before: NCCL ends a communicator on its GPU, and CUDA crashes if it is
    /// used while the process exits.
    pub(crate) fn end(handle: Arc<Self>) {
        let shared = Arc::into_inner(handle).map(|handle| handle.shared);
        if let Some(CommunicationThread { jobs, handle, .. }) = shared.and_then(Arc::into_inner) {
            drop(jobs);
            // A panic of the thread was reported as the failure of its collective.
            let _ = handle.join();
        }
    }

    /// Returns the process group of all ranks.
    pub(crate) fn world(&self) -> &Arc<AnyProcessGroup> {
        &self.group
    }

    /// Queues a collective of all ranks.
    pub(crate) fn issue<T: Send + 'static>(
        &self,
        collective: impl FnOnce(&AnyProcessGroup) -> Result<T, CollectiveError> + Send + 'static,
    ) -> Work<T> {
        self.issue_on(&self.group, collective)
    }

    /// Queues a collective of the members of `group`.
    pub(crate) fn issue_on<T: Send + 'static>(
        &self,
        group: &Arc<AnyProcessGroup>,
        collective: impl FnOnce(&AnyProcessGroup) -> Result<T, CollectiveError> + Send + 'static,
    ) -> Work<T> {
        let (sender, result) = sync_channel(1);
        let group = group.clone();
        let rank = group.rank();
        let (busy, blocked) = (self.shared.busy.clone(), self.shared.blocked.clone());
        let id = self.shared.issued.fetch_add(1, Ordering::Relaxed);
        tracing::trace!(target: "fsdp::trace", id, "fsdp::issue");
        let job = move || {
            let _span = tracing::trace_span!(target: "fsdp::trace", "fsdp::work", id).entered();
            let begin = Instant::now();
            let outcome = catch_unwind(AssertUnwindSafe(|| collective(&group)));
            add_elapsed(&busy, begin);
            let outcome = outcome.unwrap_or_else(|panic| {
                let failure = CollectiveError::PeerFailed { rank, reason: panic_message(&*panic) };
                group.fail(failure.clone());
                Err(failure)
            });
            // The receiver is gone if the unit was dropped before the collective ended.
            let _ = sender.send(outcome);
        };
        // A send fails when the thread has ended; then `Work::wait` finds the channel closed.
        let _ = self.shared.jobs.lock().ignore_poison().send(Box::new(job));
        Work { result, outcome: None, rank, blocked, id }
    }

    /// Returns how long the thread has spent in collectives, and how long this rank has blocked on
    /// their results.
    pub(crate) fn times(&self) -> (Duration, Duration) {
        let read = |time: &AtomicU64| Duration::from_nanos(time.load(Ordering::Relaxed));
        (read(&self.shared.busy), read(&self.shared.blocked.nanos))
    }

    /// Returns how often this rank has blocked on the result of a collective.
    pub(crate) fn waits(&self) -> usize {
        self.shared.blocked.waits.load(Ordering::Relaxed)
    }
}

/// A collective that has been issued. Waiting for its result consumes it.
#[derive(Debug)]
#[must_use = "a collective is complete only once it was waited for"]
pub(crate) struct Work<T> {
    result: Receiver<Result<T, CollectiveError>>,
    /// Result, once it was received.
    outcome: Option<Result<T, CollectiveError>>,
    rank: Rank,
    blocked: Arc<Blocked>,
    /// Number of the collective among those of its rank.
    id: u64,
}

/// Adds the time since `begin` to `time`, in nanoseconds.
fn add_elapsed(time: &AtomicU64, begin: Instant) {
    let nanos = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    time.fetch_add(nanos, Ordering::Relaxed);
}

impl<T> Work<T> {
    /// Returns whether the collective is complete. Does not block.
    pub(super) fn is_complete(&mut self) -> bool {
        if self.outcome.is_none() {
            self.outcome = self.result.try_recv().ok();
        }
        self.outcome.is_some()
    }

    /// Blocks until the collective is complete.
    pub(super) fn block(&mut self) {
        let id = self.id;
        let _span = tracing::trace_span!(target: "fsdp::trace", "fsdp::wait", id).entered();
        if !self.is_complete() {
            let begin = Instant::now();
            let outcome = self.result.recv();
            self.blocked.waits.fetch_add(1, Ordering::Relaxed);
            add_elapsed(&self.blocked.nanos, begin);
            let closed = CollectiveError::Closed { rank: self.rank };
            self.outcome = Some(outcome.unwrap_or(Err(closed)));
        }
    }

    /// Blocks until the collective is complete, and returns its result.
    pub(crate) fn wait(mut self) -> Result<T, CollectiveError> {
        self.block();
        self.outcome.expect("`block` has received the result")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::collectives::local::{Hub, LocalGroup};
    use crate::layout::WorldSize;

    /// Starts the communication thread of a rank alone, with a collective that takes as long as
    /// `pause` and then sets the flag.
    fn with_collective(
        pause: impl FnOnce() + Send + 'static,
    ) -> (Arc<Communicator>, Arc<AtomicBool>) {
        let hub = Hub::new(WorldSize::new(1).unwrap(), Duration::from_secs(10), false);
        let group = AnyProcessGroup::Local(LocalGroup::new(hub, Rank::ZERO));
        let comm = Communicator::start(Arc::new(group)).unwrap();
        let has_run = Arc::new(AtomicBool::new(false));
        let flag = has_run.clone();
        drop(comm.issue(move |_| {
            pause();
            flag.store(true, Ordering::SeqCst);
            Ok(())
        }));
        (comm, has_run)
    }

    #[test]
    fn the_end_of_the_last_handle_waits_for_the_thread() {
        let (comm, has_run) = with_collective(|| std::thread::sleep(Duration::from_millis(100)));
        Communicator::end(comm);
        assert!(has_run.load(Ordering::SeqCst));
    }

    #[test]
    fn the_end_of_another_handle_does_not_wait() {
        let (open, gate) = channel();
        let (comm, has_run) = with_collective(move || {
            _ = gate.recv_timeout(Duration::from_secs(10));
        });
        Communicator::end(comm.clone());
        assert!(!has_run.load(Ordering::SeqCst));
        open.send(()).unwrap();
        Communicator::end(comm);
        assert!(has_run.load(Ordering::SeqCst));
    }
}
