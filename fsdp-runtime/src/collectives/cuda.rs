//! Checks of NVIDIA's libraries: the CUDA driver and its GPUs, libdevice, and the version of NCCL.
//!
//! The libraries are loaded at run time, so that a program which was built with CUDA starts without
//! them. Burn panics when it creates a device that does not exist; a program that checks first can
//! report what is missing. The engine that uses NCCL is in `collectives/nccl/`.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use libloading::{Library, Symbol};

mod libdevice;

pub use self::libdevice::{CUDA_PATH, libdevice, needs_libdevice};
#[cfg(feature = "cuda")]
pub use fsdp_kernels::cube::{CUBLASLT, CUBLASLT_LIBRARY, CublasLtError, cublaslt_version};

/// Oldest version of NCCL that the engine `nccl` supports: the first with `ncclCommSplit`.
pub const OLDEST_NCCL: NcclVersion = NcclVersion { major: 2, minor: 18, patch: 0 };

/// Environment variable with the path of NCCL's library, for systems whose loader does not find it.
pub const NCCL_VARIABLE: &str = "FSDP_NCCL_LIBRARY";

/// Environment variable that puts the collectives of NCCL on a stream of their own if it is `0`. The
/// host then waits before and after each. By default they run on CubeCL's stream, and nobody waits.
pub const NCCL_STREAM_VARIABLE: &str = "FSDP_NCCL_STREAM";

/// A GPU that the CUDA driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gpu {
    /// Product name, such as `NVIDIA A100-SXM4-80GB`.
    pub name: String,
    /// Size of the GPU's memory in bytes.
    pub memory: usize,
}

/// The CUDA driver and its GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Driver {
    /// Newest CUDA version that the driver supports, such as `12.4`.
    pub version: String,
    /// GPUs that this process may use: all, or those that `CUDA_VISIBLE_DEVICES` selects.
    pub gpus: Vec<Gpu>,
}

/// Error of a program that cannot use a CUDA device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library cannot be loaded.
    #[error(
        "no CUDA device was found: NVIDIA's driver is not installed ({reason}); install it, or train \
         on another device, such as flex"
    )]
    NoDriver {
        /// Error of the system's loader.
        reason: String,
    },
    /// The driver is installed, but reports no GPU.
    #[error(
        "no CUDA device was found: the driver sees no GPU; look at what `nvidia-smi` and \
         `CUDA_VISIBLE_DEVICES` say, or train on another device, such as flex"
    )]
    NoDevice,
    /// A call of the driver has failed.
    #[error(
        "CUDA cannot be used: {call} returned error {code}; look at what `nvidia-smi` says, or train \
         on another device, such as flex"
    )]
    Driver {
        /// Name of the driver's function.
        call: &'static str,
        /// Result code of the call, a `CUresult`.
        code: i32,
    },
    /// The machine has no GPU with the requested index.
    #[error(
        "there is no CUDA device {index}: this machine has {count}, counted from 0{visible}",
        visible = visible()
    )]
    NoSuchDevice {
        /// Index of the requested GPU.
        index: usize,
        /// Number of GPUs of the machine.
        count: usize,
    },
    /// CubeCL does not find NVIDIA's library of math functions, and so cannot compile kernels that
    /// call them.
    #[error(
        "`libdevice.10.bc` was not found ({reason}); install the CUDA toolkit (Debian: \
         `nvidia-cuda-toolkit`, pip: `nvidia-cuda-nvcc-cu12`) and set `{CUDA_PATH}` to the folder \
         that contains `nvvm/libdevice`"
    )]
    NoLibdevice {
        /// Folders in which CubeCL looks for the file.
        reason: String,
    },
}

/// Returns the setting that restricts which GPUs are counted, for an error message.
fn visible() -> String {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(visible) => format!(" (CUDA_VISIBLE_DEVICES={visible})"),
        Err(_) => String::new(),
    }
}

/// Error of a program that cannot use NCCL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// NCCL's library cannot be loaded.
    #[error(
        "NCCL was not found ({reason}); install NVIDIA's package `libnccl2`, or pip's \
         `nvidia-nccl-cu12` with `{NCCL_VARIABLE}` naming its `libnccl.so.2`"
    )]
    Missing {
        /// Error of the system's loader.
        reason: String,
    },
    /// NCCL's library lacks a function.
    #[error("`{file}` has no `{symbol}`; NCCL {OLDEST_NCCL} or later is needed")]
    Symbol {
        /// File name of the library.
        file: String,
        /// Name of the function.
        symbol: &'static str,
    },
    /// NCCL is older than [`OLDEST_NCCL`].
    #[error("`{file}` is NCCL {found}; {OLDEST_NCCL} or later is needed")]
    TooOld {
        /// File name of the library.
        file: String,
        /// Version of the library.
        found: NcclVersion,
    },
    /// A call of NCCL has failed.
    #[error("{call}: {reason}")]
    Call {
        /// Name of NCCL's function.
        call: &'static str,
        /// Error that NCCL reports.
        reason: String,
    },
}

/// A version of NCCL, such as 2.18.5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NcclVersion {
    /// Major version, the first number.
    pub major: i32,
    /// Minor version, the second number.
    pub minor: i32,
    /// Patch level, the third number.
    pub patch: i32,
}

impl NcclVersion {
    /// Converts the number that `ncclGetVersion` returns. Before version 2.9, NCCL encoded the
    /// major version in thousands; since then, in ten thousands.
    fn from_number(number: c_int) -> Self {
        let scale = if number < 10_000 { 1_000 } else { 10_000 };
        Self { major: number / scale, minor: number % scale / 100, patch: number % 100 }
    }
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Returns the CUDA driver's version and its GPUs, of which there may be none.
///
/// # Errors
///
/// Returns [`CudaError::NoDriver`] if no driver is installed, [`CudaError::NoDevice`] if the driver
/// does not start because it finds no GPU, and [`CudaError::Driver`] if another call of the driver
/// fails.
pub fn driver() -> Result<Driver, CudaError> {
    let names = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"];
    let (library, _) = open(&names).map_err(|reason| CudaError::NoDriver { reason })?;
    let check = |call: &'static str, code: c_int| match code {
        0 => Ok(()),
        // CUDA_ERROR_NO_DEVICE
        100 => Err(CudaError::NoDevice),
        code => Err(CudaError::Driver { call, code }),
    };
    // SAFETY: the signatures are those of NVIDIA's driver API (cuda.h), stable since CUDA 4. Every
    // pointer is to a live value of the type declared there, and buffers are passed with their
    // length.
    unsafe {
        let init: Symbol<'_, unsafe extern "C" fn(u32) -> c_int> =
            driver_function(&library, "cuInit")?;
        let version: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int> =
            driver_function(&library, "cuDriverGetVersion")?;
        let count: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int> =
            driver_function(&library, "cuDeviceGetCount")?;
        let get: Symbol<'_, unsafe extern "C" fn(*mut c_int, c_int) -> c_int> =
            driver_function(&library, "cuDeviceGet")?;
        let name: Symbol<'_, unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int> =
            driver_function(&library, "cuDeviceGetName")?;
        let memory: Symbol<'_, unsafe extern "C" fn(*mut usize, c_int) -> c_int> =
            driver_function(&library, "cuDeviceTotalMem_v2")?;

        check("cuInit", init(0))?;
        let (mut number, mut devices) = (0, 0);
        check("cuDriverGetVersion", version(&mut number))?;
        check("cuDeviceGetCount", count(&mut devices))?;
        let mut gpus = Vec::new();
        for index in 0..devices {
            let (mut device, mut bytes, mut text) = (0, 0, [0; 128]);
            check("cuDeviceGet", get(&mut device, index))?;
            check("cuDeviceGetName", name(text.as_mut_ptr(), text.len() as c_int, device))?;
            check("cuDeviceTotalMem", memory(&mut bytes, device))?;
            let end = text.len() - 1;
            text[end] = 0;
            let name = CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned();
            gpus.push(Gpu { name, memory: bytes });
        }
        let version = format!("{}.{}", number / 1000, number % 1000 / 10);
        Ok(Driver { version, gpus })
    }
}

/// Returns the index of a CUDA device among the driver's GPUs; `None` for any other device.
#[cfg(feature = "nccl")]
pub fn index_of(device: &burn::tensor::Device) -> Option<usize> {
    use burn::backend::DispatchDevice;
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(burn_cubecl::CubeDevice::Cuda(device)) => Some(device.index),
        _ => None,
    }
}

/// Returns the number of GPUs, which is at least one.
///
/// # Errors
///
/// Fails as [`driver`] does, and with [`CudaError::NoDevice`] if there is no GPU.
pub fn device_count() -> Result<usize, CudaError> {
    match driver()?.gpus.len() {
        0 => Err(CudaError::NoDevice),
        count => Ok(count),
    }
}

/// Checks that the machine has a GPU with this index, and that CubeCL can compile kernels for it.
/// So Burn does not panic when it creates the device, nor when it launches a kernel that calls a
/// math function.
///
/// # Errors
///
/// Fails as [`device_count`] does, with [`CudaError::NoSuchDevice`] if the index is too large, and
/// as [`libdevice`](fn@libdevice) does if CubeCL needs that file.
pub fn require_device(index: usize) -> Result<(), CudaError> {
    let count = device_count()?;
    if index >= count {
        return Err(CudaError::NoSuchDevice { index, count });
    }
    if needs_libdevice() { libdevice().map(drop) } else { Ok(()) }
}

/// Returns the version of the installed NCCL, which may be older than [`OLDEST_NCCL`].
///
/// # Errors
///
/// Returns [`NcclError`] if NCCL cannot be loaded or does not report its version.
pub fn nccl_version() -> Result<NcclVersion, NcclError> {
    let (library, file) = open_nccl()?;
    version_of(&library, &file)
}

/// Loads NCCL, and returns the library with the name that it was found under.
pub(super) fn open_nccl() -> Result<(Library, String), NcclError> {
    let named = std::env::var(NCCL_VARIABLE).ok().filter(|name| !name.is_empty());
    let names = named.as_deref().map_or(vec!["libnccl.so.2", "libnccl.so"], |name| vec![name]);
    open(&names).map_err(|reason| NcclError::Missing { reason })
}

/// Returns the version of a loaded NCCL.
pub(super) fn version_of(library: &Library, file: &str) -> Result<NcclVersion, NcclError> {
    let symbol = "ncclGetVersion";
    let missing = || NcclError::Symbol { file: file.into(), symbol };
    let mut version = 0;
    // SAFETY: nccl.h declares `ncclResult_t ncclGetVersion(int *version)` since NCCL 2.0, and
    // `version` is a live value.
    let code = unsafe {
        let get: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int> =
            library.get(symbol.as_bytes()).map_err(|_| missing())?;
        get(&raw mut version)
    };
    match code {
        0 => Ok(NcclVersion::from_number(version)),
        code => Err(NcclError::Call { call: symbol, reason: format!("error {code}") }),
    }
}

/// Loads the first of several libraries that can be loaded, and returns it with its name. The error
/// names the first library.
fn open(names: &[&str]) -> Result<(Library, String), String> {
    let mut reason = String::new();
    for name in names {
        // SAFETY: loading runs the library's own initialisation, as in every program that is linked
        // to it.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok((library, (*name).to_string())),
            Err(_) if reason.is_empty() => reason = format!("`{name}` cannot be loaded"),
            Err(_) => {}
        }
    }
    Err(reason)
}

/// Looks up a function of the CUDA driver.
///
/// # Safety
///
/// `T` must be the function's type.
unsafe fn driver_function<'a, T>(
    library: &'a Library,
    name: &str,
) -> Result<Symbol<'a, T>, CudaError> {
    // SAFETY: the caller promises the type.
    unsafe { library.get(name.as_bytes()) }
        .map_err(|_| CudaError::NoDriver { reason: format!("`{name}` is missing from it") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_encodings_of_nccl_versions_are_read() {
        assert_eq!(NcclVersion::from_number(2708).to_string(), "2.7.8");
        assert_eq!(NcclVersion::from_number(21805).to_string(), "2.18.5");
        assert_eq!(NcclVersion::from_number(22203).to_string(), "2.22.3");
        assert!(
            NcclVersion::from_number(2708) < OLDEST_NCCL
                && OLDEST_NCCL < NcclVersion::from_number(21801)
        );
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = open(&["libfsdp-has-no-such.so.1", "libfsdp-has-no-such.so"]).unwrap_err();
        assert_eq!(error, "`libfsdp-has-no-such.so.1` cannot be loaded");
    }

    #[test]
    fn every_error_says_what_to_try() {
        // The three functions agree, whether or not this machine has a GPU.
        match (driver(), device_count(), require_device(usize::MAX)) {
            (Ok(driver), Ok(count), Err(CudaError::NoSuchDevice { count: beyond, .. })) => {
                assert_eq!((driver.gpus.len(), beyond), (count, count));
                let expected = if needs_libdevice() { libdevice().map(drop) } else { Ok(()) };
                assert_eq!(require_device(count - 1), expected);
            }
            (driver, Err(counted), Err(required)) => {
                assert_eq!(counted, required);
                assert!(driver.is_err() || counted == CudaError::NoDevice);
                let text = counted.to_string();
                assert!(
                    text.starts_with("no CUDA device was found: ") || text.starts_with("CUDA ")
                );
                assert!(text.contains("train on another device") && !text.contains('\n'), "{text}");
            }
            answers => panic!("{answers:?}"),
        }
    }
}
