//! An NCCL communicator, which is formed, used and ended without blocking inside a call.
//!
//! It is formed with `blocking = 0`: every call returns at once, and [`Watch`] polls for the end of
//! what NCCL has in progress, for failures of other ranks and for the time-out. After a failure, of
//! this rank or a peer, the communicator is aborted, which ends its kernels, and is not used again.
//!
//! [`NcclCommunicator::start`] returns once NCCL has put a collective on the stream, and
//! [`NcclCommunicator::wait_for`] once the GPU has completed it.

use std::ffi::{c_int, c_void};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::result::{Queue, Status};
use super::stream::{Gpu, Mark, Stream};
use super::sys::{Library, ncclComm_t, ncclDataType_t, ncclUniqueId};
use super::watch::{Interruption, Watch};
use crate::collectives::cuda::NcclError;
use crate::error::IgnorePoison;

/// Time to wait for NCCL to abort a communicator, or to finalize one.
const END: Duration = Duration::from_secs(5);

/// NCCL's handle of a communicator; null after its end.
#[derive(Debug)]
struct Handle(ncclComm_t);

// SAFETY: any thread may use an NCCL communicator, one thread at a time, which the lock around the
// handle ensures.
unsafe impl Send for Handle {}

/// This rank's part of an NCCL communicator.
#[derive(Debug)]
pub(super) struct NcclCommunicator {
    library: Arc<Library>,
    gpu: Arc<Gpu>,
    handle: Mutex<Handle>,
}

impl NcclCommunicator {
    /// Forms a communicator of `size` ranks with the same `id`, of which this one is `rank`. All of
    /// them call it.
    pub(super) fn new(
        library: Arc<Library>,
        gpu: Arc<Gpu>,
        id: ncclUniqueId,
        size: usize,
        rank: usize,
        watch: &mut Watch<'_>,
    ) -> Result<Self, Interruption> {
        gpu.bind()?;
        let mut formed = Self { library, gpu, handle: Mutex::new(Handle(std::ptr::null_mut())) };
        let handle = formed.handle.get_mut().ignore_poison();
        // SAFETY: the context is current, and NCCL writes the handle before the call returns.
        unsafe { formed.library.init_rank(&mut handle.0, int(size), id, int(rank)) }?;
        formed.wait_until_ready(watch)
    }

    /// Forms a communicator of the members that give the same `color`, in the order of `key`. All
    /// members call it.
    pub(super) fn split(
        &self,
        color: usize,
        key: usize,
        watch: &mut Watch<'_>,
    ) -> Result<Self, Interruption> {
        self.gpu.bind()?;
        let parent = self.lock();
        // The handle is boxed because NCCL writes it later if the call is still in progress.
        let mut part = Box::new(std::ptr::null_mut());
        // SAFETY: the context is current, the parent has no call in progress, and `part` outlives
        // this call, or is leaked below.
        let outcome =
            unsafe { self.library.split(parent.0, int(color), int(key), &mut part) }.map(|_| ());
        // NCCL has written the handle once the parent's call is complete.
        let outcome =
            outcome.map_err(Interruption::from).and_then(|()| self.wait_for_call(parent.0, watch));
        if let Err(interruption) = outcome {
            std::mem::forget(part);
            drop(parent);
            self.abort();
            return Err(interruption);
        }
        let (library, gpu) = (self.library.clone(), self.gpu.clone());
        Self { library, gpu, handle: Mutex::new(Handle(*part)) }.wait_until_ready(watch)
    }

    /// Returns the stream of collectives that wait on the host.
    pub(super) fn own_stream(&self) -> Stream {
        self.gpu.own_stream()
    }

    fn lock(&self) -> MutexGuard<'_, Handle> {
        self.handle.lock().ignore_poison()
    }

    /// Waits until NCCL has formed a new communicator; aborts it on an error.
    fn wait_until_ready(self, watch: &mut Watch<'_>) -> Result<Self, Interruption> {
        let comm = self.lock().0;
        match self.wait_for_call(comm, watch) {
            Ok(()) => Ok(self),
            Err(interruption) => {
                self.abort();
                Err(interruption)
            }
        }
    }

    /// Waits until NCCL has no call in progress.
    fn wait_for_call(&self, comm: ncclComm_t, watch: &mut Watch<'_>) -> Result<(), Interruption> {
        // SAFETY: `comm` is a communicator that this type has formed.
        while unsafe { self.library.async_error(comm) }? == Status::InProgress {
            watch.pause()?;
        }
        Ok(())
    }

    /// Puts the collectives that `queue` queues on a stream, as one NCCL group. Returns marks of their
    /// begin and end. After an error the caller ends the run, and then [aborts](Self::abort) the communicator.
    ///
    /// # Safety
    ///
    /// The stream belongs to the communicator's GPU. The memory of the collectives must stay valid
    /// until the mark of their end is reached, and forever if this function fails or
    /// [`wait_for`](Self::wait_for) does.
    pub(super) unsafe fn start(
        &self,
        dtype: ncclDataType_t,
        stream: Stream,
        watch: &mut Watch<'_>,
        queue: impl FnOnce(&Collectives<'_>) -> Result<(), NcclError>,
    ) -> Result<Marks, Interruption> {
        self.gpu.bind()?;
        let handle = self.lock();
        if handle.0.is_null() {
            return Err(aborted().into());
        }
        // SAFETY: as the caller promises.
        unsafe { self.start_on(handle.0, dtype, stream, watch, queue) }
    }

    /// # Safety
    ///
    /// As [`start`](Self::start).
    unsafe fn start_on(
        &self,
        comm: ncclComm_t,
        dtype: ncclDataType_t,
        stream: Stream,
        watch: &mut Watch<'_>,
        queue: impl FnOnce(&Collectives<'_>) -> Result<(), NcclError>,
    ) -> Result<Marks, Interruption> {
        // SAFETY: the caller promises that the stream belongs to the GPU.
        let begin = unsafe { self.gpu.mark(stream) }?;
        let on_stream = Queue { comm, stream: stream.handle(), dtype };
        self.library.group_start()?;
        let queued = queue(&Collectives { library: &self.library, queue: on_stream });
        let started = self.library.group_end(comm);
        queued?;
        started?;
        // While the call is in progress, NCCL has not yet put the collectives on the stream.
        self.wait_for_call(comm, watch)?;
        // SAFETY: as above.
        let end = unsafe { self.gpu.mark(stream) }?;
        Ok(Marks { begin, end })
    }

    /// Waits until the GPU has completed collectives. The time-out counts from when the GPU has reached
    /// their begin. After an error the caller ends the run, and then [aborts](Self::abort) the communicator.
    pub(super) fn wait_for(
        &self,
        marks: &Marks,
        watch: &mut Watch<'_>,
    ) -> Result<(), Interruption> {
        self.gpu.bind()?;
        let mut has_begun = false;
        loop {
            self.check()?;
            if marks.end.is_reached()? {
                return Ok(());
            }
            has_begun = has_begun || marks.begin.is_reached()?;
            if !has_begun {
                watch.restart();
            }
            watch.pause()?;
        }
    }

    /// Returns the error of an earlier collective, or that of a communicator that has been aborted.
    fn check(&self) -> Result<(), NcclError> {
        // A thread that holds the lock looks for errors itself.
        let Ok(handle) = self.handle.try_lock() else { return Ok(()) };
        if handle.0.is_null() {
            return Err(aborted());
        }
        // SAFETY: the handle is that of a communicator, and the lock is held.
        unsafe { self.library.async_error(handle.0) }.map(drop)
    }

    /// Aborts the communicator and its kernels.
    ///
    /// NCCL may take arbitrarily long if a peer is gone, so the abort runs on a thread of its own
    /// and is waited for at most [`END`].
    pub(super) fn abort(&self) {
        let comm = std::mem::replace(&mut self.lock().0, std::ptr::null_mut());
        if comm.is_null() {
            return;
        }
        let (comm, library, gpu) = (Handle(comm), self.library.clone(), self.gpu.clone());
        let (sender, ended) = channel();
        let abort = move || {
            let Handle(comm) = { comm };
            if gpu.bind().is_ok() {
                // SAFETY: the handle was taken from its lock, so nobody else uses it any more.
                let _ = unsafe { library.abort(comm) };
            }
            let _ = sender.send(());
        };
        if std::thread::Builder::new().name("fsdp-nccl-abort".into()).spawn(abort).is_ok() {
            let _ = ended.recv_timeout(END);
        }
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        let comm = self.lock().0;
        if comm.is_null() {
            return;
        }
        let mut watch = Watch::alone(END);
        let mut end = || -> Result<(), Interruption> {
            self.gpu.bind()?;
            // SAFETY: nobody else has this value, so nothing more is queued.
            unsafe { self.library.finalize(comm) }?;
            self.wait_for_call(comm, &mut watch)
        };
        if end().is_err() {
            return self.abort();
        }
        self.lock().0 = std::ptr::null_mut();
        // SAFETY: the communicator is finalized, and its handle was taken from the lock.
        let _ = unsafe { self.library.destroy(comm) };
    }
}

/// Marks on a stream before and after collectives.
#[derive(Debug)]
pub(super) struct Marks {
    begin: Mark,
    end: Mark,
}

/// Returns the error of a communicator that is used after its end.
fn aborted() -> NcclError {
    NcclError::Call { call: "a collective", reason: "the communicator has been aborted".into() }
}

/// Queues the collectives of one [`NcclCommunicator::start`].
///
/// Ranks are positions in the communicator. Elements have the type of the collective. Addresses `at`
/// are those of the first element, on the communicator's device. Only the collectives and later work
/// on their stream may use the memory until they end.
pub(super) struct Collectives<'a> {
    library: &'a Library,
    queue: Queue,
}

impl Collectives<'_> {
    /// All-gathers `count` elements of each rank, in place: rank r's elements start at `at` plus
    /// `r * count` elements.
    ///
    /// # Safety
    ///
    /// There are `count` elements for every rank at `at`, of `size` bytes each; `rank` is the
    /// calling one.
    pub(super) unsafe fn all_gather(
        &self,
        at: u64,
        rank: usize,
        count: usize,
        size: usize,
    ) -> Result<(), NcclError> {
        let own = pointer(at + (rank * count * size) as u64);
        // SAFETY: the caller promises the memory. NCCL supports an all-gather in place: each rank
        // sends from where its own elements are received.
        unsafe { self.library.all_gather(self.queue, own, pointer(at), count) }.map(|_| ())
    }

    /// Reduce-scatters `count` elements for each rank, in place: rank r's sums start at `at` plus
    /// `r * count` elements.
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
        // SAFETY: the caller promises the memory. NCCL supports a reduce-scatter in place.
        unsafe { self.library.reduce_scatter(self.queue, pointer(at), own, count) }.map(|_| ())
    }

    /// All-reduces `count` elements, in place.
    ///
    /// # Safety
    ///
    /// There are `count` elements at `at`.
    pub(super) unsafe fn all_reduce(&self, at: u64, count: usize) -> Result<(), NcclError> {
        // SAFETY: as the caller promises.
        unsafe { self.library.all_reduce(self.queue, pointer(at), count) }.map(|_| ())
    }

    /// Broadcasts `count` elements of `root` to all ranks.
    ///
    /// # Safety
    ///
    /// There are `count` elements at `at`.
    pub(super) unsafe fn broadcast(
        &self,
        at: u64,
        count: usize,
        root: usize,
    ) -> Result<(), NcclError> {
        // SAFETY: as the caller promises.
        unsafe { self.library.broadcast(self.queue, pointer(at), count, int(root)) }.map(|_| ())
    }

    /// Sends `count` elements to the rank `to`.
    ///
    /// # Safety
    ///
    /// There are `count` elements at `at`.
    pub(super) unsafe fn send(&self, at: u64, count: usize, to: usize) -> Result<(), NcclError> {
        // SAFETY: as the caller promises.
        unsafe { self.library.send(self.queue, pointer(at), count, int(to)) }.map(|_| ())
    }

    /// Receives `count` elements from the rank `from`.
    ///
    /// # Safety
    ///
    /// There is room for `count` elements at `at`.
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

/// Converts a device address to the pointer type that NCCL takes.
fn pointer(at: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(at).expect("an address fits a pointer"))
}

/// Converts an argument of a call.
fn int(value: usize) -> c_int {
    c_int::try_from(value).expect("ranks and colors fit a C int")
}
