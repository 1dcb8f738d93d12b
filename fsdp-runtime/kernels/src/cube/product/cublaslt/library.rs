//! cuBLASLt's functions, loaded from the library at run time.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

/// Environment variable that turns cuBLASLt off if it is `0`.
pub const CUBLASLT: &str = "FSDP_CUBLASLT";

/// Environment variable with the path of cuBLASLt's library, for systems whose loader does not find it.
pub const CUBLASLT_LIBRARY: &str = "FSDP_CUBLASLT_LIBRARY";

/// Names under which CUDA's packages install the library, the newest first.
const NAMES: [&str; 5] = [
    "libcublasLt.so.13",
    "libcublasLt.so.12",
    "libcublasLt.so",
    "cublasLt64_13.dll",
    "cublasLt64_12.dll",
];

/// Why products on a CUDA device are not calls of cuBLASLt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CublasLtError {
    /// The environment turns the library off.
    #[error("`FSDP_CUBLASLT` is 0")]
    TurnedOff,
    /// The library cannot be loaded.
    #[error(
        "cuBLASLt was not found ({reason}); install CUDA's package `libcublas`, or pip's `nvidia-cublas` \
         with `{CUBLASLT_LIBRARY}` naming its `libcublasLt.so.13`"
    )]
    Missing {
        /// Error of the system's loader.
        reason: String,
    },
    /// The library lacks a function.
    #[error("`{file}` has no `{symbol}`; cuBLAS 12 or later is needed")]
    Symbol {
        /// Name of the library.
        file: String,
        /// Name of the function.
        symbol: &'static str,
    },
    /// A call of the library or of the driver has failed.
    #[error("{call} returned status {status}")]
    Call {
        /// Name of the function.
        call: &'static str,
        /// Status that the function returned.
        status: i32,
    },
}

/// Status of a call, `cublasStatus_t` in cublas_api.h.
pub(super) type Status = c_int;
/// A handle, descriptor, layout or preference, of which only the library knows the content.
pub(super) type Opaque = *mut c_void;

/// An algorithm that the heuristic has chosen, `cublasLtMatmulHeuristicResult_t` in cublasLt.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Heuristic {
    pub(super) algorithm: [u64; 8],
    pub(super) workspace: usize,
    pub(super) state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// Declares the table of functions, and how it is loaded.
macro_rules! functions {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// Functions of the loaded library, which is never unloaded.
        #[allow(non_snake_case, reason = "cuBLASLt's own names")]
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Library {
            /// Looks the functions up in a library.
            fn load(library: &libloading::Library, file: &str) -> Result<Self, CublasLtError> {
                Ok(Self {
                    $($name: {
                        let symbol = stringify!($name);
                        // SAFETY: the signature is that of cublasLt.h since CUDA 11.
                        *unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> $result>(
                                symbol.as_bytes(),
                            )
                        }
                        .map_err(|_| CublasLtError::Symbol { file: file.into(), symbol })?
                    },)*
                })
            }
        }
    };
}

functions! {
    cublasLtGetVersion() -> usize;
    cublasLtCreate(*mut Opaque) -> Status;
    cublasLtMatmulDescCreate(*mut Opaque, c_uint, c_uint) -> Status;
    cublasLtMatmulDescSetAttribute(Opaque, c_uint, *const c_void, usize) -> Status;
    cublasLtMatrixLayoutCreate(*mut Opaque, c_uint, u64, u64, i64) -> Status;
    cublasLtMatrixLayoutSetAttribute(Opaque, c_uint, *const c_void, usize) -> Status;
    cublasLtMatmulPreferenceCreate(*mut Opaque) -> Status;
    cublasLtMatmulPreferenceSetAttribute(Opaque, c_uint, *const c_void, usize) -> Status;
    cublasLtMatmulPreferenceDestroy(Opaque) -> Status;
    cublasLtMatmulAlgoGetHeuristic(
        Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, c_int, *mut Heuristic, *mut c_int
    ) -> Status;
    cublasLtMatmul(
        Opaque, Opaque, *const c_void, u64, Opaque, u64, Opaque, *const c_void, u64, Opaque, u64, Opaque,
        *const c_void, u64, usize, *mut c_void
    ) -> Status;
}

/// Returns the library, which is loaded once per process.
pub(super) fn library() -> Result<&'static Library, CublasLtError> {
    static LIBRARY: OnceLock<Result<Library, CublasLtError>> = OnceLock::new();
    LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Returns the version of cuBLASLt, such as 130100 for 13.1.0.
///
/// # Errors
///
/// Says why products on CUDA devices are not calls of cuBLASLt.
pub fn cublaslt_version() -> Result<usize, CublasLtError> {
    let library = library()?;
    // SAFETY: the function takes no arguments.
    Ok(unsafe { (library.cublasLtGetVersion)() })
}

fn load() -> Result<Library, CublasLtError> {
    if std::env::var(CUBLASLT).is_ok_and(|value| value == "0") {
        return Err(CublasLtError::TurnedOff);
    }
    let named = std::env::var(CUBLASLT_LIBRARY).ok().filter(|name| !name.is_empty());
    let names = named.as_deref().map_or(NAMES.to_vec(), |name| vec![name]);
    let mut reason = String::new();
    for name in names {
        // SAFETY: loading runs the library's own initialisation, as in every program that is linked to it.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => {
                let functions = Library::load(&library, name)?;
                // The functions are used until the process ends.
                std::mem::forget(library);
                return Ok(functions);
            }
            Err(_) if reason.is_empty() => reason = format!("`{name}` cannot be loaded"),
            Err(_) => {}
        }
    }
    Err(CublasLtError::Missing { reason })
}
