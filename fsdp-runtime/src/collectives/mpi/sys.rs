//! The part of MPI that the engine calls: each call checked, each `unsafe` in one place.
//!
//! Initialisation asks for `MPI_THREAD_MULTIPLE`, because the communication thread runs collectives
//! while the rank's own thread may tell the others that it failed. Communicators live as long as
//! the process: a launch makes a handful.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use mpi::environment::Threading;
use mpi::ffi;

/// A call that MPI refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MpiError {
    /// An error code.
    #[error("{call}: {reason}")]
    Call { call: &'static str, reason: String },
    /// A library that serialises its callers.
    #[error("it was built without MPI_THREAD_MULTIPLE (it provides {provided:?})")]
    Threads { provided: Threading },
}

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

fn int(value: usize) -> c_int {
    c_int::try_from(value).expect("ranks, tags and pieces of a message fit a C int")
}

fn from_int(value: c_int) -> usize {
    usize::try_from(value).expect("MPI counts from 0")
}

/// Initialises MPI, once a process.
pub(super) fn initialise() -> Result<(), MpiError> {
    static THREADS: OnceLock<Threading> = OnceLock::new();
    let provided = *THREADS.get_or_init(|| {
        match mpi::initialize_with_threading(Threading::Multiple) {
            Some((universe, provided)) => {
                // How the process ends decides whether MPI is finalised: see `process.rs`.
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

/// Ends MPI in good order; every process of the world must come.
pub(crate) fn finalise() {
    // SAFETY: called when the process exits, after every launch has ended.
    unsafe { ffi::MPI_Finalize() };
}

/// Ends every process of the world.
pub(crate) fn abort() {
    // SAFETY: MPI is initialised; the call does not return.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
}

/// The name of the machine this process runs on.
pub(super) fn processor_name() -> String {
    let mut text = [0u8; 1024];
    let mut len = 0;
    // SAFETY: MPI_MAX_PROCESSOR_NAME is at most 256 in every implementation.
    unsafe { ffi::MPI_Get_processor_name(text.as_mut_ptr().cast::<c_char>(), &raw mut len) };
    String::from_utf8_lossy(&text[..from_int(len).min(text.len())]).into_owned()
}

/// A communicator whose errors are returned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Comm(ffi::MPI_Comm);

// SAFETY: a handle, which any thread may use under MPI_THREAD_MULTIPLE.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl Comm {
    /// A communicator of all processes, apart from every other one. All of them call it.
    pub(super) fn world() -> Result<Self, MpiError> {
        // SAFETY: MPI is initialised, which `initialise` has made sure of.
        let world = Self(unsafe { ffi::RSMPI_COMM_WORLD });
        world.split(0, world.rank())
    }

    /// A communicator of those that give the same color, in the order of `key`.
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

    /// Starts to send `len` bytes.
    ///
    /// # Safety
    ///
    /// They must stay readable and unchanged until [`Request::test`] says that they were sent.
    pub(super) unsafe fn send(
        self,
        bytes: *const u8,
        len: usize,
        to: usize,
        tag: usize,
    ) -> Result<Request, MpiError> {
        let mut request = Request::null();
        // SAFETY: the caller keeps the bytes; the rest is valid.
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

    /// Starts to receive `len` bytes.
    ///
    /// # Safety
    ///
    /// Their place must stay writable, and be read by nobody, until [`Request::test`] says that they
    /// have arrived.
    pub(super) unsafe fn receive(
        self,
        bytes: *mut u8,
        len: usize,
        from: usize,
        tag: usize,
    ) -> Result<Request, MpiError> {
        let mut request = Request::null();
        // SAFETY: the caller keeps the place; the rest is valid.
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

    /// A message that has arrived from anybody, and whom it is from.
    pub(super) fn take(self) -> Result<Option<(usize, Vec<u8>)>, MpiError> {
        // SAFETY: a status is plain integers.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        let (mut found, mut len) = (0, 0);
        // SAFETY: every pointer is to a local that outlives the call.
        let mut message = unsafe { ffi::RSMPI_MESSAGE_NULL };
        // SAFETY: as above.
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
        // SAFETY: the message was found above, and has `len` bytes.
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

/// A send or a receive under way. One that is dropped goes on: what it touches must stay.
#[derive(Debug)]
#[must_use = "the bytes are in use until the request is complete"]
pub(super) struct Request(ffi::MPI_Request);

// SAFETY: a handle, which any thread may use under MPI_THREAD_MULTIPLE.
unsafe impl Send for Request {}

impl Request {
    fn null() -> Self {
        // SAFETY: a constant of the library.
        Self(unsafe { ffi::RSMPI_REQUEST_NULL })
    }

    /// Whether it is complete; if so, it is so from then on.
    pub(super) fn test(&mut self) -> Result<bool, MpiError> {
        let mut done = 0;
        // SAFETY: the request is one under way, or null, which counts as complete.
        check("MPI_Test", unsafe {
            ffi::MPI_Test(&raw mut self.0, &raw mut done, ffi::RSMPI_STATUS_IGNORE)
        })?;
        Ok(done != 0)
    }
}
