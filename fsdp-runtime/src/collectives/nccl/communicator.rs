//! A communicator of NCCL: made, used and ended without ever waiting inside a call.
//!
//! It is made with `blocking = 0`: every call returns, and what goes on is asked for again and again
//! ([`Watch`]), together with the other ranks' failures and the time-out. A communicator that has
//! failed, or whose peers have, is aborted, which ends its kernels; it is not used again.

use std::ffi::{c_int, c_void};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::lane::Lane;
use super::result::{Queue, Status};
use super::sys::{Library, ncclComm_t, ncclDataType_t, ncclUniqueId};
use crate::collectives::cuda::{CudaError, NcclError};
use crate::collectives::store::Host;
use crate::error::CollectiveError;

/// How long an abort, or the end of a communicator that is in order, may take.
const END: Duration = Duration::from_secs(5);
/// Between two questions to the other ranks.
const NEWS: Duration = Duration::from_millis(50);
/// How long it may take to make a communicator.
const SETUP: Duration = Duration::from_secs(60);
/// Polls that yield; a sleep takes some 60 µs at least.
const YIELDS: u32 = 200;

/// Why a collective did not complete.
#[derive(Debug)]
pub(super) enum Trouble {
    /// NCCL refused a call, or a collective has failed.
    Nccl(NcclError),
    /// So has the driver.
    Cuda(CudaError),
    /// The world has ended meanwhile.
    Ended(CollectiveError),
    /// Nothing has happened within the time-out.
    TimedOut,
}

impl From<NcclError> for Trouble {
    fn from(error: NcclError) -> Self {
        Self::Nccl(error)
    }
}

impl From<CudaError> for Trouble {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

/// A wait: at first one that spins, then one that sleeps, and asks the other ranks for news.
pub(super) struct Watch<'a> {
    /// `None` at the end, when nobody else is asked.
    host: Option<&'a Host>,
    timeout: Duration,
    started: Instant,
    news: Instant,
    polls: u32,
}

impl<'a> Watch<'a> {
    pub(super) fn new(host: &'a Host) -> Self {
        Self::with(Some(host), host.timeout())
    }

    /// For what takes NCCL seconds, even where every rank is there.
    pub(super) fn of_setup(host: &'a Host) -> Self {
        Self::with(Some(host), host.timeout().max(SETUP))
    }

    fn with(host: Option<&'a Host>, timeout: Duration) -> Self {
        let now = Instant::now();
        Self { host, timeout, started: now, news: now, polls: 0 }
    }

    /// Waits for the next poll.
    fn more(&mut self) -> Result<(), Trouble> {
        self.polls += 1;
        if self.polls < YIELDS {
            std::thread::yield_now();
            return Ok(());
        }
        if self.news.elapsed() > NEWS {
            if let Some(failure) = self.host.and_then(Host::here) {
                return Err(Trouble::Ended(failure));
            }
            self.news = Instant::now();
        }
        if self.started.elapsed() > self.timeout {
            return Err(Trouble::TimedOut);
        }
        std::thread::sleep(Duration::from_micros(if self.polls < 2000 { 20 } else { 200 }));
        Ok(())
    }
}

/// NCCL's handle; null after the end.
#[derive(Debug)]
struct Handle(ncclComm_t);

// SAFETY: NCCL's communicators may be used from any thread, from one at a time, which the lock around
// the handle sees to.
unsafe impl Send for Handle {}

/// This rank's end of a communicator.
#[derive(Debug)]
pub(super) struct Communicator {
    library: Arc<Library>,
    lane: Arc<Lane>,
    handle: Mutex<Handle>,
}

impl Communicator {
    /// Joins the others that have the same `id`. All `size` of them call it.
    pub(super) fn new(
        library: Arc<Library>,
        lane: Arc<Lane>,
        id: ncclUniqueId,
        size: usize,
        rank: usize,
        watch: &mut Watch<'_>,
    ) -> Result<Self, Trouble> {
        lane.bind()?;
        let mut made = Self { library, lane, handle: Mutex::new(Handle(std::ptr::null_mut())) };
        let handle = made.handle.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        // SAFETY: the context is current, and NCCL writes the handle before the call returns.
        unsafe { made.library.init_rank(&mut handle.0, int(size), id, int(rank)) }?;
        made.settled(watch)
    }

    /// Splits: those that give the same `color` get a communicator, in the order of `key`. All
    /// members call it.
    pub(super) fn split(
        &self,
        color: usize,
        key: usize,
        watch: &mut Watch<'_>,
    ) -> Result<Self, Trouble> {
        self.lane.bind()?;
        let parent = self.lock();
        // In a box of its own: with a call in progress NCCL writes it later.
        let mut part = Box::new(std::ptr::null_mut());
        // SAFETY: the context is current, the parent is not in progress, and `part` outlives the
        // call, or is never freed.
        let outcome =
            unsafe { self.library.split(parent.0, int(color), int(key), &mut part) }.map(|_| ());
        // The handle is there once the parent has settled.
        let outcome = outcome.map_err(Trouble::from).and_then(|()| self.settle(parent.0, watch));
        if let Err(trouble) = outcome {
            std::mem::forget(part);
            drop(parent);
            self.abort();
            return Err(trouble);
        }
        let (library, lane) = (self.library.clone(), self.lane.clone());
        Self { library, lane, handle: Mutex::new(Handle(*part)) }.settled(watch)
    }

    fn lock(&self) -> MutexGuard<'_, Handle> {
        self.handle.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Waits until a new communicator can be used.
    fn settled(self, watch: &mut Watch<'_>) -> Result<Self, Trouble> {
        let comm = self.lock().0;
        match self.settle(comm, watch) {
            Ok(()) => Ok(self),
            Err(trouble) => {
                self.abort();
                Err(trouble)
            }
        }
    }

    /// Waits until no call is in progress.
    fn settle(&self, comm: ncclComm_t, watch: &mut Watch<'_>) -> Result<(), Trouble> {
        // SAFETY: a communicator of this type's making.
        while unsafe { self.library.async_error(comm) }? == Status::InProgress {
            watch.more()?;
        }
        Ok(())
    }

    /// Runs the collectives that `queue` queues, together, and waits for their end.
    ///
    /// # Safety
    ///
    /// What is queued stays until the call returns well, and for ever otherwise.
    pub(super) unsafe fn run(
        &self,
        dtype: ncclDataType_t,
        watch: &mut Watch<'_>,
        queue: impl FnOnce(&Collectives<'_>) -> Result<(), NcclError>,
    ) -> Result<(), Trouble> {
        self.lane.bind()?;
        let handle = self.lock();
        if handle.0.is_null() {
            let (call, reason) = ("a collective", "the communicator has been aborted".into());
            return Err(NcclError::Call { call, reason }.into());
        }
        let outcome = self.run_on(handle.0, dtype, watch, queue);
        drop(handle);
        if outcome.is_err() {
            self.abort();
        }
        outcome
    }

    fn run_on(
        &self,
        comm: ncclComm_t,
        dtype: ncclDataType_t,
        watch: &mut Watch<'_>,
        queue: impl FnOnce(&Collectives<'_>) -> Result<(), NcclError>,
    ) -> Result<(), Trouble> {
        let on = Queue { comm, stream: self.lane.stream(), dtype };
        self.library.group_start()?;
        let queued = queue(&Collectives { library: &self.library, queue: on });
        let started = self.library.group_end(comm);
        queued?;
        started?;
        // What is in progress is not on the stream yet.
        self.settle(comm, watch)?;
        loop {
            // SAFETY: a communicator of this type's making.
            unsafe { self.library.async_error(comm) }?;
            if self.lane.done()? {
                return Ok(());
            }
            watch.more()?;
        }
    }

    /// Ends all that is under way. NCCL may take its time, or all time, where a peer is gone: it is
    /// waited for no longer than a few seconds.
    pub(super) fn abort(&self) {
        let comm = std::mem::replace(&mut self.lock().0, std::ptr::null_mut());
        if comm.is_null() {
            return;
        }
        let (comm, library, lane) = (Handle(comm), self.library.clone(), self.lane.clone());
        let (sender, ended) = channel();
        let abort = move || {
            let Handle(comm) = { comm };
            if lane.bind().is_ok() {
                // SAFETY: the handle was taken out, so nobody uses it from now on.
                let _ = unsafe { library.abort(comm) };
            }
            let _ = sender.send(());
        };
        if std::thread::Builder::new().name("fsdp-nccl-abort".into()).spawn(abort).is_ok() {
            let _ = ended.recv_timeout(END);
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let comm = self.lock().0;
        if comm.is_null() {
            return;
        }
        let mut watch = Watch::with(None, END);
        let mut end = || -> Result<(), Trouble> {
            self.lane.bind()?;
            // SAFETY: nothing is queued any more, as nobody else has this value.
            unsafe { self.library.finalize(comm) }?;
            self.settle(comm, &mut watch)
        };
        if end().is_err() {
            return self.abort();
        }
        self.lock().0 = std::ptr::null_mut();
        // SAFETY: finalized above, and taken out.
        let _ = unsafe { self.library.destroy(comm) };
    }
}

/// What a run's collectives are queued with. Ranks are positions in the communicator, elements are of
/// the run's type, and `at` is the address of the first one, on the communicator's device.
///
/// The elements are the run's to touch until it ends: see [`Communicator::run`].
pub(super) struct Collectives<'a> {
    library: &'a Library,
    queue: Queue,
}

impl Collectives<'_> {
    /// Gathers `count` elements of each rank, which lie at its place already.
    ///
    /// # Safety
    ///
    /// `at` has `count` elements for every rank; `size` is that of an element.
    pub(super) unsafe fn all_gather(
        &self,
        at: u64,
        rank: usize,
        count: usize,
        size: usize,
    ) -> Result<(), NcclError> {
        let own = pointer(at + (rank * count * size) as u64);
        // SAFETY: in place, as NCCL has it: what is sent lies where it is received.
        unsafe { self.library.all_gather(self.queue, own, pointer(at), count) }.map(|_| ())
    }

    /// Sums `count` elements for each rank, which finds them at its place.
    ///
    /// # Safety
    ///
    /// As [`all_gather`](Self::all_gather).
    pub(super) unsafe fn reduce_scatter(
        &self,
        at: u64,
        rank: usize,
        count: usize,
        size: usize,
    ) -> Result<(), NcclError> {
        let own = pointer(at + (rank * count * size) as u64);
        // SAFETY: in place, as above.
        unsafe { self.library.reduce_scatter(self.queue, pointer(at), own, count) }.map(|_| ())
    }

    /// Sums `count` elements for all.
    ///
    /// # Safety
    ///
    /// `at` has `count` elements.
    pub(super) unsafe fn all_reduce(&self, at: u64, count: usize) -> Result<(), NcclError> {
        // SAFETY: as the caller promises.
        unsafe { self.library.all_reduce(self.queue, pointer(at), count) }.map(|_| ())
    }

    /// Gives `root`'s `count` elements to all.
    ///
    /// # Safety
    ///
    /// `at` has `count` elements.
    pub(super) unsafe fn broadcast(
        &self,
        at: u64,
        count: usize,
        root: usize,
    ) -> Result<(), NcclError> {
        // SAFETY: as the caller promises.
        unsafe { self.library.broadcast(self.queue, pointer(at), count, int(root)) }.map(|_| ())
    }

    /// Sends `count` elements.
    ///
    /// # Safety
    ///
    /// `at` has `count` elements.
    pub(super) unsafe fn send(&self, at: u64, count: usize, to: usize) -> Result<(), NcclError> {
        // SAFETY: as the caller promises.
        unsafe { self.library.send(self.queue, pointer(at), count, int(to)) }.map(|_| ())
    }

    /// Receives `count` elements.
    ///
    /// # Safety
    ///
    /// `at` has room for `count` elements.
    pub(super) unsafe fn receive(
        &self,
        at: u64,
        count: usize,
        from: usize,
    ) -> Result<(), NcclError> {
        // SAFETY: as the caller promises.
        unsafe { self.library.receive(self.queue, pointer(at), count, int(from)) }.map(|_| ())
    }
}

/// An address on a device, as NCCL takes it.
fn pointer(at: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(at).expect("an address fits a pointer"))
}

fn int(value: usize) -> c_int {
    c_int::try_from(value).expect("ranks and colors fit a C int")
}
