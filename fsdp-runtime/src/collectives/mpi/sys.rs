//! Safe wrappers of the MPI functions that the engine calls. Each checks the result of its call.
//!
//! Initialisation asks for `MPI_THREAD_MULTIPLE`: while the communication thread runs collectives,
//! the rank's own thread may report a failure to the other ranks. Communicators are never freed: a
//! launch makes a handful, and they live as long as the process.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;
use std::time::Duration;

use mpi::environment::Threading;
use mpi::ffi;

/// Error of a program that cannot use MPI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MpiError {
    /// A call that returned an error code.
    #[error("{call}: {reason}")]
    Call { call: &'static str, reason: String },
    /// An MPI library that does not allow calls from several threads at once.
    #[error("it was built without MPI_THREAD_MULTIPLE (it provides {provided:?})")]
    Threads { provided: Threading },
    /// A start of MPI that takes longer than ranks wait for each other.
    #[error(
        "it has not started within {timeout:?}: a process or machine of the run does not answer"
    )]
    NotStarted { timeout: Duration },
}

/// Converts the result code of a call.
fn check(call: &'static str, code: c_int) -> Result<(), MpiError> {
    // MPI_SUCCESS, which the standard fixes.
    if code == 0 {
        return Ok(());
    }
    let mut text = [0u8; 1024];
    let mut len = 0;
    // SAFETY: MPI_MAX_ERROR_STRING is at most 512 in every implementation.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &raw mut len) };
    let text = &text[..usize::try_from(len).unwrap_or(0).min(text.len())];
    Err(MpiError::Call { call, reason: String::from_utf8_lossy(text).into_owned() })
}

/// Converts an argument of a call.
fn int(value: usize) -> c_int {
    c_int::try_from(value).expect("ranks, tags and sizes of messages fit a C int")
}

/// Converts a result of a call.
fn from_int(value: c_int) -> usize {
    usize::try_from(value).expect("MPI returns no negative rank or size")
}

/// Initialises MPI, once per process.
pub(super) fn initialise() -> Result<(), MpiError> {
    static THREADS: OnceLock<Threading> = OnceLock::new();
    let provided = *THREADS.get_or_init(|| {
        match mpi::initialize_with_threading(Threading::Multiple) {
            Some((universe, provided)) => {
                // Dropping it would finalise MPI. Whether that happens depends on how the process
                // ends: see `launch/process.rs`.
                std::mem::forget(universe);
                provided
            }
            None => mpi::environment::threading_support(),
        }
    });
    if provided < Threading::Multiple {
        return Err(MpiError::Threads { provided });
    }
    Ok(())
}

/// Finalises MPI, at the end of a successful run. Every process of the world must call it.
pub(crate) fn finalise() {
    // SAFETY: called when the process exits, after every launch has ended.
    unsafe { ffi::MPI_Finalize() };
}

/// Kills every process of the world. This process exits with `code`.
pub(crate) fn abort(code: c_int) {
    // SAFETY: MPI is initialised; the call does not return.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, code) };
}

/// Returns the name of the machine that this process runs on.
pub(super) fn processor_name() -> String {
    let mut text = [0u8; 1024];
    let mut len = 0;
    // SAFETY: MPI_MAX_PROCESSOR_NAME is at most 256 in every implementation.
    unsafe { ffi::MPI_Get_processor_name(text.as_mut_ptr().cast::<c_char>(), &raw mut len) };
    String::from_utf8_lossy(&text[..from_int(len).min(text.len())]).into_owned()
}

/// An MPI communicator, whose calls return errors instead of ending the process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Comm(ffi::MPI_Comm);

// SAFETY: the value is a handle, which any thread may use under MPI_THREAD_MULTIPLE.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl Comm {
    /// Creates a communicator of all processes, whose messages mix with no other communicator's.
    /// All processes call it.
    pub(super) fn world() -> Result<Self, MpiError> {
        // SAFETY: a constant of the library; MPI has been initialised by `initialise`.
        let world = Self(unsafe { ffi::RSMPI_COMM_WORLD });
        world.split(0, world.rank())
    }

    /// Creates a communicator of the processes that give the same color, in the order of `key`. All
    /// members call it.
    pub(super) fn split(self, color: usize, key: usize) -> Result<Self, MpiError> {
        let mut part = self.0;
        // SAFETY: the communicator is valid, and `part` outlives the call.
        check("MPI_Comm_split", unsafe {
            ffi::MPI_Comm_split(self.0, int(color), int(key), &raw mut part)
        })?;
        // SAFETY: as above.
        check("MPI_Comm_set_errhandler", unsafe {
            ffi::MPI_Comm_set_errhandler(part, ffi::RSMPI_ERRORS_RETURN)
        })?;
        Ok(Self(part))
    }

    pub(super) fn rank(self) -> usize {
        let mut rank = 0;
        // SAFETY: the communicator is valid, and `rank` outlives the call.
        unsafe { ffi::MPI_Comm_rank(self.0, &raw mut rank) };
        from_int(rank)
    }

    pub(super) fn size(self) -> usize {
        let mut size = 0;
        // SAFETY: the communicator is valid, and `size` outlives the call.
        unsafe { ffi::MPI_Comm_size(self.0, &raw mut size) };
        from_int(size)
    }

    /// Starts to send `len` bytes to the process at position `to`.
    ///
    /// # Safety
    ///
    /// The bytes must stay readable and unchanged until [`Request::test`] returns true.
    pub(super) unsafe fn send(
        self,
        bytes: *const u8,
        len: usize,
        to: usize,
        tag: usize,
    ) -> Result<Request, MpiError> {
        let mut request = Request::null();
        // SAFETY: the caller keeps the bytes; the other arguments are valid.
        check("MPI_Isend", unsafe {
            ffi::MPI_Isend(
                bytes.cast::<c_void>(),
                int(len),
                ffi::RSMPI_UINT8_T,
                int(to),
                int(tag),
                self.0,
                &raw mut request.0,
            )
        })?;
        Ok(request)
    }

    /// Starts to receive `len` bytes from the process at position `from`.
    ///
    /// # Safety
    ///
    /// The memory must stay writable, and nobody may read it, until [`Request::test`] returns true.
    pub(super) unsafe fn receive(
        self,
        bytes: *mut u8,
        len: usize,
        from: usize,
        tag: usize,
    ) -> Result<Request, MpiError> {
        let mut request = Request::null();
        // SAFETY: the caller keeps the memory; the other arguments are valid.
        check("MPI_Irecv", unsafe {
            ffi::MPI_Irecv(
                bytes.cast::<c_void>(),
                int(len),
                ffi::RSMPI_UINT8_T,
                int(from),
                int(tag),
                self.0,
                &raw mut request.0,
            )
        })?;
        Ok(request)
    }

    /// Receives a message that has arrived, with the position of its sender; `None` if there is
    /// none.
    pub(super) fn receive_any(self) -> Result<Option<(usize, Vec<u8>)>, MpiError> {
        // SAFETY: a status consists of integers, for which zeros are valid.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        let (mut found, mut len) = (0, 0);
        // SAFETY: a constant of the library.
        let mut message = unsafe { ffi::RSMPI_MESSAGE_NULL };
        // SAFETY: every pointer is to a local variable that outlives the call.
        check("MPI_Improbe", unsafe {
            ffi::MPI_Improbe(
                ffi::RSMPI_ANY_SOURCE,
                ffi::RSMPI_ANY_TAG,
                self.0,
                &raw mut found,
                &raw mut message,
                &raw mut status,
            )
        })?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: as above.
        check("MPI_Get_count", unsafe {
            ffi::MPI_Get_count(&raw const status, ffi::RSMPI_UINT8_T, &raw mut len)
        })?;
        let mut bytes = vec![0u8; from_int(len)];
        // SAFETY: `message` was found above, and has `len` bytes.
        check("MPI_Mrecv", unsafe {
            ffi::MPI_Mrecv(
                bytes.as_mut_ptr().cast::<c_void>(),
                len,
                ffi::RSMPI_UINT8_T,
                &raw mut message,
                ffi::RSMPI_STATUS_IGNORE,
            )
        })?;
        Ok(Some((from_int(status.MPI_SOURCE), bytes)))
    }
}

/// A send or receive that has been started. Dropping it does not cancel it, so its memory must stay
/// valid even then.
#[derive(Debug)]
#[must_use = "the bytes are in use until the request is complete"]
pub(super) struct Request(ffi::MPI_Request);

// SAFETY: the value is a handle, which any thread may use under MPI_THREAD_MULTIPLE.
unsafe impl Send for Request {}

impl Request {
    fn null() -> Self {
        // SAFETY: a constant of the library.
        Self(unsafe { ffi::RSMPI_REQUEST_NULL })
    }

    /// Returns whether the send or receive is complete. Once it is, every later call returns true.
    pub(super) fn test(&mut self) -> Result<bool, MpiError> {
        let mut done = 0;
        // SAFETY: the request has been started, or is null, which counts as complete.
        check("MPI_Test", unsafe {
            ffi::MPI_Test(&raw mut self.0, &raw mut done, ffi::RSMPI_STATUS_IGNORE)
        })?;
        Ok(done != 0)
    }
}
