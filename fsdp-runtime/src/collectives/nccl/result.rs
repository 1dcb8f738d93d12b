//! NCCL's calls, with results in place of codes.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use super::sys::{
    Code, Library, cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t,
    ncclUniqueId,
};
use crate::collectives::cuda::NcclError;

/// `NCCL_CONFIG_UNDEF_INT` of nccl.h: NCCL chooses.
const UNDEFINED: c_int = c_int::MIN;
/// `ncclConfig_t::magic`.
const MAGIC: u32 = 0xcafe_beef;
/// The version whose `ncclConfig_t` cudarc has: a library reads no more of it than it knows.
const CONFIG_VERSION: u32 = 23000;

/// How far a call that succeeded has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// It is complete, or waits on the stream.
    Done,
    /// NCCL goes on with it; nothing else may be asked of the communicator.
    InProgress,
}

/// A configuration of a communicator whose calls return at once.
pub(super) fn config() -> ncclConfig_t {
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: MAGIC,
        version: CONFIG_VERSION,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}

/// Where a communicator's collectives are queued.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    pub(super) comm: ncclComm_t,
    pub(super) stream: cudaStream_t,
    pub(super) dtype: ncclDataType_t,
}

impl Library {
    /// Reads a `ncclResult_t`.
    fn check(&self, comm: ncclComm_t, call: &'static str, code: Code) -> Result<Status, NcclError> {
        match code {
            // ncclSuccess and ncclInProgress.
            0 => return Ok(Status::Done),
            7 => return Ok(Status::InProgress),
            _ => {}
        }
        // SAFETY: takes any number, and returns a text that is never freed, or null.
        let name = unsafe { text((self.ncclGetErrorString)(code)) };
        // SAFETY: takes null for no communicator; the text is the library's, and copied at once.
        let detail = unsafe { text((self.ncclGetLastError)(comm)) };
        let reason = match (name.as_str(), detail.as_str()) {
            ("", "") => format!("error {code}"),
            (name, "") => name.to_string(),
            (name, detail) => format!("{name}: {}", detail.trim()),
        };
        Err(NcclError::Call { call, reason })
    }

    pub(super) fn unique_id(&self) -> Result<ncclUniqueId, NcclError> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: writes to a live value of its type.
        let code = unsafe { (self.ncclGetUniqueId)(&raw mut id) };
        self.check(ptr::null_mut(), "ncclGetUniqueId", code).map(|_| id)
    }

    /// # Safety
    ///
    /// The device's context is current. `comm` stays until the call is no longer in progress.
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

    /// # Safety
    ///
    /// As [`init_rank`](Self::init_rank); `parent` is a communicator that is not in progress.
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

    /// # Safety
    ///
    /// `comm` is a communicator.
    pub(super) unsafe fn async_error(&self, comm: ncclComm_t) -> Result<Status, NcclError> {
        let mut state = 0;
        // SAFETY: as the caller promises; writes to a live value of its size.
        let code = unsafe { (self.ncclCommGetAsyncError)(comm, &raw mut state) };
        self.check(comm, "ncclCommGetAsyncError", code)?;
        self.check(comm, "a collective of NCCL", state)
    }

    /// # Safety
    ///
    /// `comm` is a communicator, to which nothing else is queued from now on.
    pub(super) unsafe fn finalize(&self, comm: ncclComm_t) -> Result<Status, NcclError> {
        // SAFETY: as the caller promises.
        let code = unsafe { (self.ncclCommFinalize)(comm) };
        self.check(comm, "ncclCommFinalize", code)
    }

    /// # Safety
    ///
    /// `comm` is a communicator that has been finalized, and is not used from now on.
    pub(super) unsafe fn destroy(&self, comm: ncclComm_t) -> Result<Status, NcclError> {
        // SAFETY: as the caller promises.
        let code = unsafe { (self.ncclCommDestroy)(comm) };
        self.check(ptr::null_mut(), "ncclCommDestroy", code)
    }

    /// # Safety
    ///
    /// `comm` is a communicator that is not used from now on.
    pub(super) unsafe fn abort(&self, comm: ncclComm_t) -> Result<Status, NcclError> {
        // SAFETY: as the caller promises.
        let code = unsafe { (self.ncclCommAbort)(comm) };
        self.check(ptr::null_mut(), "ncclCommAbort", code)
    }

    pub(super) fn group_start(&self) -> Result<Status, NcclError> {
        // SAFETY: takes nothing; counts on this thread.
        let code = unsafe { (self.ncclGroupStart)() };
        self.check(ptr::null_mut(), "ncclGroupStart", code)
    }

    pub(super) fn group_end(&self, comm: ncclComm_t) -> Result<Status, NcclError> {
        // SAFETY: takes nothing; what it starts was promised where it was queued.
        let code = unsafe { (self.ncclGroupEnd)() };
        self.check(comm, "ncclGroupEnd", code)
    }

    /// # Safety
    ///
    /// `from` has `count` elements, and `to` `count` for every rank, on the communicator's device,
    /// until the stream is done; nothing else touches them.
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

    /// # Safety
    ///
    /// As [`all_gather`](Self::all_gather), with `count` elements in place.
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

    /// # Safety
    ///
    /// As [`all_gather`](Self::all_gather), with `count` elements in place.
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

    /// # Safety
    ///
    /// As [`all_gather`](Self::all_gather), with `count` elements.
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

    /// # Safety
    ///
    /// As [`all_gather`](Self::all_gather), with `count` elements.
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

/// # Safety
///
/// `text` is null, or ends in a zero.
unsafe fn text(text: *const std::ffi::c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
