//! NCCL's functions as methods that return `Result`s instead of result codes.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use super::sys::{
    Code, Library, cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t,
    ncclUniqueId,
};
use crate::collectives::cuda::NcclError;

/// Value of a configuration field that NCCL chooses itself, `NCCL_CONFIG_UNDEF_INT` in nccl.h.
const UNDEFINED: c_int = c_int::MIN;
/// Value that the field `ncclConfig_t::magic` must have.
const MAGIC: u32 = 0xcafe_beef;
/// NCCL version that cudarc's `ncclConfig_t` belongs to. An older library reads only the fields
/// that it knows.
const CONFIG_VERSION: u32 = 23000;

/// Whether a call that did not fail is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// The call is complete; its work may still be queued on the stream.
    Done,
    /// NCCL still works on the call; the communicator must not be used for another one.
    InProgress,
}

/// Returns the configuration of a communicator whose calls return at once.
fn config() -> ncclConfig_t {
    // SAFETY: the struct has integers and pointers only. NCCL chooses names that are null. It does not read fields of a
    // later version than `CONFIG_VERSION`, which a later cudarc may have.
    let mut config: ncclConfig_t = unsafe { std::mem::zeroed() };
    config.size = size_of::<ncclConfig_t>();
    config.magic = MAGIC;
    config.version = CONFIG_VERSION;
    config.blocking = 0;
    config.cgaClusterSize = UNDEFINED;
    config.minCTAs = UNDEFINED;
    config.maxCTAs = UNDEFINED;
    config.splitShare = UNDEFINED;
    config.trafficClass = UNDEFINED;
    config.collnetEnable = UNDEFINED;
    config.CTAPolicy = UNDEFINED;
    config.shrinkShare = UNDEFINED;
    config.nvlsCTAs = UNDEFINED;
    config.nChannelsPerNetPeer = UNDEFINED;
    config.nvlinkCentricSched = UNDEFINED;
    config.graphUsageMode = UNDEFINED;
    config.numRmaCtx = UNDEFINED;
    config.maxP2pPeers = UNDEFINED;
    config
}

/// The communicator, stream and element type with which collectives are queued.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    pub(super) comm: ncclComm_t,
    pub(super) stream: cudaStream_t,
    pub(super) dtype: ncclDataType_t,
}

impl Library {
    /// Converts the result code of a call.
    fn check(&self, comm: ncclComm_t, call: &'static str, code: Code) -> Result<Status, NcclError> {
        match code {
            // ncclSuccess
            0 => return Ok(Status::Done),
            // ncclInProgress
            7 => return Ok(Status::InProgress),
            _ => {}
        }
        // SAFETY: the function takes any number, and returns null or a string that is never freed.
        let name = unsafe { text((self.ncclGetErrorString)(code)) };
        // SAFETY: the function takes a communicator or null. The library owns the string, which is
        // copied before another call can change it.
        let detail = unsafe { text((self.ncclGetLastError)(comm)) };
        let reason = match (name.as_str(), detail.as_str()) {
            ("", "") => format!("error {code}"),
            (name, "") => name.to_string(),
            (name, detail) => format!("{name}: {}", detail.trim()),
        };
        Err(NcclError::Call { call, reason })
    }

    /// Creates the identifier with which ranks form a communicator.
    pub(super) fn unique_id(&self) -> Result<ncclUniqueId, NcclError> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: the call writes to a live value of its type.
        let code = unsafe { (self.ncclGetUniqueId)(&raw mut id) };
        self.check(ptr::null_mut(), "ncclGetUniqueId", code).map(|_| id)
    }

    /// Forms a communicator of `size` ranks, of which this one is `rank`.
    ///
    /// # Safety
    ///
    /// The device's context is current. `comm` stays valid until the call is complete.
    pub(super) unsafe fn init_rank(
        &self,
        comm: &mut ncclComm_t,
        size: c_int,
        id: ncclUniqueId,
        rank: c_int,
    ) -> Result<Status, NcclError> {
        let mut config = config();
        // SAFETY: as the caller promises; the configuration is copied before the call returns.
        let code = unsafe { (self.ncclCommInitRankConfig)(comm, size, id, rank, &raw mut config) };
        self.check(ptr::null_mut(), "ncclCommInitRankConfig", code)
    }

    /// Forms a communicator of the members of `parent` with the same color, in the order of `key`.
    ///
    /// # Safety
    ///
    /// As [`init_rank`](Self::init_rank); `parent` is a communicator without a call in progress.
    pub(super) unsafe fn split(
        &self,
        parent: ncclComm_t,
        color: c_int,
        key: c_int,
        comm: &mut ncclComm_t,
    ) -> Result<Status, NcclError> {
        let mut config = config();
        // SAFETY: as the caller promises; the configuration is copied before the call returns.
        let code = unsafe { (self.ncclCommSplit)(parent, color, key, comm, &raw mut config) };
        self.check(parent, "ncclCommSplit", code)
    }

    /// Returns whether a call is in progress, or the error of an earlier call or collective.
    ///
    /// # Safety
    ///
    /// `comm` is a communicator.
    pub(super) unsafe fn async_error(&self, comm: ncclComm_t) -> Result<Status, NcclError> {
        let mut state = 0;
        // SAFETY: as the caller promises; the call writes to a live value of its size.
        let code = unsafe { (self.ncclCommGetAsyncError)(comm, &raw mut state) };
        self.check(comm, "ncclCommGetAsyncError", code)?;
        self.check(comm, "a collective of NCCL", state)
    }

    /// Completes the outstanding work of a communicator, before it is destroyed.
    ///
    /// # Safety
    ///
    /// `comm` is a communicator, and nothing is queued on it after this call.
    pub(super) unsafe fn finalize(&self, comm: ncclComm_t) -> Result<Status, NcclError> {
        // SAFETY: as the caller promises.
        let code = unsafe { (self.ncclCommFinalize)(comm) };
        self.check(comm, "ncclCommFinalize", code)
    }

    /// Frees a finalized communicator.
    ///
    /// # Safety
    ///
    /// `comm` has been finalized, and is not used after this call.
    pub(super) unsafe fn destroy(&self, comm: ncclComm_t) -> Result<Status, NcclError> {
        // SAFETY: as the caller promises.
        let code = unsafe { (self.ncclCommDestroy)(comm) };
        self.check(ptr::null_mut(), "ncclCommDestroy", code)
    }

    /// Ends the kernels of a communicator, and frees it.
    ///
    /// # Safety
    ///
    /// `comm` is a communicator, and is not used after this call.
    pub(super) unsafe fn abort(&self, comm: ncclComm_t) -> Result<Status, NcclError> {
        // SAFETY: as the caller promises.
        let code = unsafe { (self.ncclCommAbort)(comm) };
        self.check(ptr::null_mut(), "ncclCommAbort", code)
    }

    /// Begins a group of collectives, which [`group_end`](Self::group_end) starts together.
    pub(super) fn group_start(&self) -> Result<Status, NcclError> {
        // SAFETY: the function has no arguments; NCCL keeps the group in thread-local state.
        let code = unsafe { (self.ncclGroupStart)() };
        self.check(ptr::null_mut(), "ncclGroupStart", code)
    }

    /// Starts the collectives that were queued since [`group_start`](Self::group_start).
    pub(super) fn group_end(&self, comm: ncclComm_t) -> Result<Status, NcclError> {
        // SAFETY: the function has no arguments; the memory of the collectives was promised when
        // they were queued.
        let code = unsafe { (self.ncclGroupEnd)() };
        self.check(comm, "ncclGroupEnd", code)
    }

    /// Queues an all-gather of `count` elements of each rank.
    ///
    /// # Safety
    ///
    /// `from` points to `count` elements, and `to` to `count` elements for every rank, both on the
    /// communicator's device. The memory stays valid, and nothing else uses it, until the stream is
    /// done.
    pub(super) unsafe fn all_gather(
        &self,
        queue: Queue,
        from: *const c_void,
        to: *mut c_void,
        count: usize,
    ) -> Result<Status, NcclError> {
        let Queue { comm, stream, dtype } = queue;
        // SAFETY: as the caller promises.
        let code = unsafe { (self.ncclAllGather)(from, to, count, dtype, comm, stream) };
        self.check(comm, "ncclAllGather", code)
    }

    /// Queues a reduce-scatter that leaves `count` sums on each rank.
    ///
    /// # Safety
    ///
    /// As [`all_gather`](Self::all_gather), with `from` and `to` exchanged.
    pub(super) unsafe fn reduce_scatter(
        &self,
        queue: Queue,
        from: *const c_void,
        to: *mut c_void,
        count: usize,
    ) -> Result<Status, NcclError> {
        let Queue { comm, stream, dtype } = queue;
        let sum = ncclRedOp_t::ncclSum;
        // SAFETY: as the caller promises.
        let code = unsafe { (self.ncclReduceScatter)(from, to, count, dtype, sum, comm, stream) };
        self.check(comm, "ncclReduceScatter", code)
    }

    /// Queues an all-reduce.
    ///
    /// # Safety
    ///
    /// `at` points to `count` elements; otherwise as [`all_gather`](Self::all_gather).
    pub(super) unsafe fn all_reduce(
        &self,
        queue: Queue,
        at: *mut c_void,
        count: usize,
    ) -> Result<Status, NcclError> {
        let Queue { comm, stream, dtype } = queue;
        let sum = ncclRedOp_t::ncclSum;
        // SAFETY: as the caller promises.
        let code = unsafe { (self.ncclAllReduce)(at, at, count, dtype, sum, comm, stream) };
        self.check(comm, "ncclAllReduce", code)
    }

    /// Queues a broadcast of the elements of the rank `root`.
    ///
    /// # Safety
    ///
    /// `at` points to `count` elements; otherwise as [`all_gather`](Self::all_gather).
    pub(super) unsafe fn broadcast(
        &self,
        queue: Queue,
        at: *mut c_void,
        count: usize,
        root: c_int,
    ) -> Result<Status, NcclError> {
        let Queue { comm, stream, dtype } = queue;
        // SAFETY: as the caller promises.
        let code = unsafe { (self.ncclBroadcast)(at, at, count, dtype, root, comm, stream) };
        self.check(comm, "ncclBroadcast", code)
    }

    /// Queues a send of elements to the rank `peer`.
    ///
    /// # Safety
    ///
    /// The pointer is to `count` elements; otherwise as [`all_gather`](Self::all_gather).
    pub(super) unsafe fn send(
        &self,
        queue: Queue,
        from: *const c_void,
        count: usize,
        peer: c_int,
    ) -> Result<Status, NcclError> {
        let Queue { comm, stream, dtype } = queue;
        // SAFETY: as the caller promises.
        let code = unsafe { (self.ncclSend)(from, count, dtype, peer, comm, stream) };
        self.check(comm, "ncclSend", code)
    }

    /// Queues a receive of elements from the rank `peer`.
    ///
    /// # Safety
    ///
    /// The pointer is to `count` elements; otherwise as [`all_gather`](Self::all_gather).
    pub(super) unsafe fn receive(
        &self,
        queue: Queue,
        to: *mut c_void,
        count: usize,
        peer: c_int,
    ) -> Result<Status, NcclError> {
        let Queue { comm, stream, dtype } = queue;
        // SAFETY: as the caller promises.
        let code = unsafe { (self.ncclRecv)(to, count, dtype, peer, comm, stream) };
        self.check(comm, "ncclRecv", code)
    }
}

/// Copies a C string; null gives an empty string.
///
/// # Safety
///
/// `text` is null, or points to a string that ends in a zero byte.
unsafe fn text(text: *const std::ffi::c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
