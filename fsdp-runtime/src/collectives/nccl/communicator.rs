//! An NCCL communicator, which is formed, used and ended without blocking inside a call.
//!
//! It is formed with `blocking = 0`: every call returns at once, and [`Watch`] polls for the end of
//! what NCCL has in progress, for failures of other ranks and for the time-out. After a failure, of
//! this rank or a peer, the communicator is aborted, which ends its kernels, and is not used again.

use std::ffi::{c_int, c_void};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::ready_word::Ready;
use super::result::{Queue, Status};
use super::stream::CollectiveStream;
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
    stream: Arc<CollectiveStream>,
    handle: Mutex<Handle>,
}

impl NcclCommunicator {
    /// Forms a communicator of `size` ranks with the same `id`, of which this one is `rank`. All of
    /// them call it.
    pub(super) fn new(
        library: Arc<Library>,
        stream: Arc<CollectiveStream>,
        id: ncclUniqueId,
        size: usize,
        rank: usize,
        watch: &mut Watch<'_>,
    ) -> Result<Self, Interruption> {
        stream.bind()?;
        let mut formed = Self { library, stream, handle: Mutex::new(Handle(std::ptr::null_mut())) };
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
        self.stream.bind()?;
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
        let (library, stream) = (self.library.clone(), self.stream.clone());
        Self { library, stream, handle: Mutex::new(Handle(*part)) }.wait_until_ready(watch)
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

    /// Runs the collectives that `queue` queues, as one NCCL group, and waits for their end. They
    /// begin once `ready` holds, if it is given. On an error the communicator is aborted.
    ///
    /// # Safety
    ///
    /// The memory of the collectives must stay valid until this function returns `Ok`, and forever
    /// if it does not.
    pub(super) unsafe fn run(
        &self,
        dtype: ncclDataType_t,
        ready: Option<Ready>,
        watch: &mut Watch<'_>,
        queue: impl FnOnce(&Collectives<'_>) -> Result<(), NcclError>,
    ) -> Result<(), Interruption> {
        self.stream.bind()?;
        let handle = self.lock();
        if handle.0.is_null() {
            let (call, reason) = ("a collective", "the communicator has been aborted".into());
            return Err(NcclError::Call { call, reason }.into());
        }
        let waits = ready.map_or(Ok(()), |ready| self.stream.wait_for(ready));
        let outcome = waits
            .map_err(Interruption::from)
            .and_then(|()| self.run_on(handle.0, dtype, watch, queue));
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
    ) -> Result<(), Interruption> {
        let on_stream = Queue { comm, stream: self.stream.handle(), dtype };
        self.library.group_start()?;
        let queued = queue(&Collectives { library: &self.library, queue: on_stream });
        let started = self.library.group_end(comm);
        queued?;
        started?;
        // While the call is in progress, NCCL has not yet put the collectives on the stream.
        self.wait_for_call(comm, watch)?;
        loop {
            // SAFETY: `comm` is a communicator that this type has formed.
            unsafe { self.library.async_error(comm) }?;
            if self.stream.is_done()? {
                return Ok(());
            }
            watch.pause()?;
        }
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
        let (comm, library, stream) = (Handle(comm), self.library.clone(), self.stream.clone());
        let (sender, ended) = channel();
        let abort = move || {
            let Handle(comm) = { comm };
            if stream.bind().is_ok() {
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
            self.stream.bind()?;
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

/// Queues the collectives of one [`NcclCommunicator::run`].
///
/// Ranks are positions in the communicator. Elements have the type of the run. Addresses `at` are
/// those of the first element, on the communicator's device. Only the run may use the memory until
/// it ends.
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
