//! NCCL's functions, loaded from the library at run time, with cudarc's types for their arguments.
//!
//! cudarc can load NCCL as well, but only under the name `libnccl.so`, which only development
//! packages install, and it panics if there is none. Result codes are plain numbers here, because a
//! later NCCL may return a code that cudarc's enum does not have.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Arc, OnceLock};

pub(super) use cudarc::nccl::sys::{
    cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId,
};

use crate::collectives::cuda::{NcclError, OLDEST_NCCL, open_nccl, version_of};

/// Result code of a call, `ncclResult_t` in nccl.h.
pub(super) type Code = c_uint;

/// Declares the table of functions, and how it is loaded.
macro_rules! functions {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// Functions of a loaded NCCL library, which is never unloaded.
        #[allow(non_snake_case, reason = "NCCL's own names")]
        pub(crate) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Library {
            /// Looks the functions up in a library.
            fn load(library: &libloading::Library, file: &str) -> Result<Self, NcclError> {
                Ok(Self {
                    $($name: {
                        let symbol = stringify!($name);
                        // SAFETY: the signature is that of nccl.h, which has not changed since the
                        // function was introduced; `OLDEST_NCCL` has all functions.
                        *unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> $result>(
                                symbol.as_bytes(),
                            )
                        }
                        .map_err(|_| NcclError::Symbol { file: file.into(), symbol })?
                    },)*
                })
            }
        }
    };
}

functions! {
    ncclGetErrorString(Code) -> *const c_char;
    ncclGetLastError(ncclComm_t) -> *const c_char;
    ncclGetUniqueId(*mut ncclUniqueId) -> Code;
    ncclCommInitRankConfig(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> Code;
    ncclCommSplit(ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut ncclConfig_t) -> Code;
    ncclCommFinalize(ncclComm_t) -> Code;
    ncclCommDestroy(ncclComm_t) -> Code;
    ncclCommAbort(ncclComm_t) -> Code;
    ncclCommGetAsyncError(ncclComm_t, *mut Code) -> Code;
    ncclGroupStart() -> Code;
    ncclGroupEnd() -> Code;
    ncclAllGather(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t)
        -> Code;
    ncclReduceScatter(
        *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t
    ) -> Code;
    ncclAllReduce(
        *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t
    ) -> Code;
    ncclBroadcast(
        *const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t
    ) -> Code;
    ncclSend(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> Code;
    ncclRecv(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> Code;
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Library")
    }
}

/// Returns the NCCL library, which is loaded once per process.
pub(in crate::collectives) fn library() -> Result<Arc<Library>, NcclError> {
    static LIBRARY: OnceLock<Result<Arc<Library>, NcclError>> = OnceLock::new();
    LIBRARY.get_or_init(|| load().map(Arc::new)).clone()
}

fn load() -> Result<Library, NcclError> {
    let (library, file) = open_nccl()?;
    let found = version_of(&library, &file)?;
    if found < OLDEST_NCCL {
        return Err(NcclError::TooOld { file, found });
    }
    let functions = Library::load(&library, &file)?;
    // NCCL's threads and functions are used until the process ends, so it must not be unloaded.
    std::mem::forget(library);
    Ok(functions)
}
