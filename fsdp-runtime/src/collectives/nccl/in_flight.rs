//! Collectives on CubeCL's stream that have not ended, and the thread that watches them.
//!
//! The communication thread puts a collective on its stream and goes on. Kernels that use the result
//! come after it on the stream, or wait for a fence. The host does not wait for its end, but the
//! communication thread stays at most [`MOST`] collectives ahead of the device. What a collective reads,
//! such as gradients, is in memory until it has ended.
//!
//! The thread here looks for errors of NCCL, failures of other ranks and the time-out. On any of them it
//! ends the run and aborts the communicator, so that the device does not wait for ever.
//!
//! The failure is known to the group before the device ends an aborted collective. So a thread that
//! has waited for the device and then finds no failure has read complete results.

use std::any::Any;
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use super::communicator::{Marks, NcclCommunicator};
use super::watch::Watch;
use crate::collectives::op::Op;
use crate::collectives::store::HostGroup;
use crate::error::{CollectiveError, IgnorePoison};

/// Most collectives of a rank that have not ended: one that runs, and one that follows without a pause.
pub(in crate::collectives) const MOST: usize = 2;

/// A collective on the stream of the communication thread.
pub(super) struct Collective {
    pub(super) communicator: Arc<NcclCommunicator>,
    pub(super) host: Arc<HostGroup>,
    pub(super) op: Op,
    pub(super) marks: Marks,
    /// Keeps the memory where it is. After a failure it is never freed, as NCCL may still use it.
    pub(super) held: ManuallyDrop<Box<dyn Any + Send>>,
}

impl Collective {
    /// Waits for the end. A failure ends the run of all ranks.
    fn watch(self) {
        if self.host.failure().is_some() {
            return self.communicator.abort();
        }
        let mut watch = Watch::in_background(&self.host);
        match self.communicator.wait_for(&self.marks, &mut watch) {
            Ok(()) => drop(ManuallyDrop::into_inner(self.held)),
            Err(interruption) => {
                interruption.end_run(&self.host, &self.op);
                self.communicator.abort();
            }
        }
    }
}

#[derive(Default)]
struct State {
    /// Collectives in the order of the stream.
    waiting: VecDeque<Collective>,
    /// Whether the thread watches one more.
    is_watching: bool,
    is_closed: bool,
}

impl State {
    /// Returns the number of collectives that have not ended.
    fn len(&self) -> usize {
        self.waiting.len() + usize::from(self.is_watching)
    }
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).ignore_poison()
    }

    /// Watches collectives until the queue is closed and empty.
    fn watch(&self) {
        let mut state = self.lock();
        loop {
            if let Some(collective) = state.waiting.pop_front() {
                state.is_watching = true;
                drop(state);
                // After a panic others must not wait for this thread.
                let host = collective.host.clone();
                if catch_unwind(AssertUnwindSafe(|| collective.watch())).is_err() {
                    host.fail(CollectiveError::Transport {
                        rank: host.rank(),
                        op: "watch",
                        unit: "a collective".into(),
                        reason: "the thread that watches NCCL has panicked".into(),
                    });
                }
                state = self.lock();
                state.is_watching = false;
                self.changed.notify_all();
            } else if state.is_closed {
                return;
            } else {
                state = self.wait(state);
            }
        }
    }
}

/// The collectives of one rank that have not ended. The thread ends with this value, after the last of
/// them.
pub(super) struct InFlight {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for InFlight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InFlight").finish_non_exhaustive()
    }
}

impl InFlight {
    /// Starts the thread.
    pub(super) fn start() -> std::io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let own = queue.clone();
        let name = "fsdp-nccl-watch".to_string();
        let thread = std::thread::Builder::new().name(name).spawn(move || own.watch())?;
        Ok(Self { queue, thread: Some(thread) })
    }

    /// Adds a collective that was put on the stream after those before it. Waits until at most [`MOST`]
    /// have not ended.
    pub(super) fn add(&self, collective: Collective) {
        self.queue.lock().waiting.push_back(collective);
        self.queue.changed.notify_all();
        self.wait_for_all_but(MOST);
    }

    /// Returns the number of collectives that have not ended.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.queue.lock().len()
    }

    /// Waits until all collectives have ended.
    pub(super) fn wait_for_all(&self) {
        self.wait_for_all_but(0);
    }

    fn wait_for_all_but(&self, most: usize) {
        let mut state = self.queue.lock();
        while state.len() > most {
            state = self.queue.wait(state);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.queue.lock().is_closed = true;
        self.queue.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread leaves nothing to wait for.
            let _ = thread.join();
        }
    }
}
