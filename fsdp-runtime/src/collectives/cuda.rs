//! NVIDIA's libraries, which are loaded when a program asks for them: the CUDA driver with its GPUs,
//! and NCCL's version.
//!
//! Nothing here needs CUDA to be installed, so that a program can say what is missing before it
//! makes a device: Burn panics where there is none. The engine that uses NCCL is
//! `collectives/nccl/`.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use libloading::{Library, Symbol};

/// The first version of NCCL that the engine `nccl` works with: it brought `ncclCommSplit`.
pub const OLDEST_NCCL: NcclVersion = NcclVersion { major: 2, minor: 18, patch: 0 };

/// The variable that names the file of NCCL, where the system's loader does not find it.
pub const NCCL_VARIABLE: &str = "FSDP_NCCL_LIBRARY";

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Bytes of its memory.
    pub memory: usize,
}

/// NVIDIA's driver and what it drives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The CUDA version it supports, such as `12.4`.
    pub version: String,
    /// The GPUs that this process may use: those of `CUDA_VISIBLE_DEVICES`, where it is set.
    pub gpus: Vec<Gpu>,
}

/// Why no CUDA device can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library is not there.
    #[error(
        "no CUDA device was found: NVIDIA's driver is not installed ({reason}); install it, or train \
         on another device, such as flex"
    )]
    NoDriver {
        /// The loader's reason.
        reason: String,
    },
    /// The driver is there, and no GPU.
    #[error(
        "no CUDA device was found: the driver sees no GPU; look at what `nvidia-smi` and \
         `CUDA_VISIBLE_DEVICES` say, or train on another device, such as flex"
    )]
    NoDevice,
    /// The driver refused a call.
    #[error(
        "CUDA cannot be used: {call} returned error {code}; look at what `nvidia-smi` says, or train \
         on another device, such as flex"
    )]
    Driver {
        /// The call.
        call: &'static str,
        /// Its result, a `CUresult`.
        code: i32,
    },
    /// An index beyond the GPUs.
    #[error(
        "there is no CUDA device {index}: this machine has {count}, counted from 0{visible}",
        visible = visible()
    )]
    NoSuchDevice {
        /// The index asked for.
        index: usize,
        /// How many there are.
        count: usize,
    },
}

/// What restricts the devices that are counted.
fn visible() -> String {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(visible) => format!(" (CUDA_VISIBLE_DEVICES={visible})"),
        Err(_) => String::new(),
    }
}

/// Why NCCL cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library is not there.
    #[error(
        "NCCL was not found ({reason}); install NVIDIA's package `libnccl2`, or pip's \
         `nvidia-nccl-cu12` with `{NCCL_VARIABLE}` naming its `libnccl.so.2`"
    )]
    Missing {
        /// The loader's reason.
        reason: String,
    },
    /// A function is not in the library.
    #[error("`{file}` has no `{symbol}`; NCCL {OLDEST_NCCL} or later is needed")]
    Symbol {
        /// The library.
        file: String,
        /// The function.
        symbol: &'static str,
    },
    /// A library from before what is needed.
    #[error("`{file}` is NCCL {found}; {OLDEST_NCCL} or later is needed")]
    TooOld {
        /// The library.
        file: String,
        /// Its version.
        found: NcclVersion,
    },
    /// A call that NCCL refused.
    #[error("{call}: {reason}")]
    Call {
        /// The call.
        call: &'static str,
        /// What NCCL says.
        reason: String,
    },
}

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NcclVersion {
    /// The first number.
    pub major: i32,
    /// The second.
    pub minor: i32,
    /// The third.
    pub patch: i32,
}

impl NcclVersion {
    /// From what `ncclGetVersion` gives: versions before 2.9 had a digit less for the second number.
    pub(crate) fn of(number: c_int) -> Self {
        let scale = if number < 10_000 { 1_000 } else { 10_000 };
        Self { major: number / scale, minor: number % scale / 100, patch: number % 100 }
    }
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The driver and its GPUs, of which there may be none.
///
/// # Errors
///
/// [`CudaError`] says what is missing.
pub fn driver() -> Result<Driver, CudaError> {
    let names = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"];
    let (library, _) = open(&names).map_err(|reason| CudaError::NoDriver { reason })?;
    let check = |call: &'static str, code: c_int| match code {
        0 => Ok(()),
        // CUDA_ERROR_NO_DEVICE.
        100 => Err(CudaError::NoDevice),
        code => Err(CudaError::Driver { call, code }),
    };
    // SAFETY: the signatures are those of NVIDIA's driver API (cuda.h), stable since CUDA 4; every
    // pointer is to a live value of the type written there, names with their length.
    unsafe {
        let init: Symbol<'_, unsafe extern "C" fn(u32) -> c_int> = of_driver(&library, "cuInit")?;
        let version: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int> =
            of_driver(&library, "cuDriverGetVersion")?;
        let count: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int> =
            of_driver(&library, "cuDeviceGetCount")?;
        let get: Symbol<'_, unsafe extern "C" fn(*mut c_int, c_int) -> c_int> =
            of_driver(&library, "cuDeviceGet")?;
        let name: Symbol<'_, unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int> =
            of_driver(&library, "cuDeviceGetName")?;
        let memory: Symbol<'_, unsafe extern "C" fn(*mut usize, c_int) -> c_int> =
            of_driver(&library, "cuDeviceTotalMem_v2")?;

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

/// The place of a CUDA device among the driver's GPUs; `None` for any other device.
#[cfg(feature = "nccl")]
pub fn index_of(device: &burn::tensor::Device) -> Option<usize> {
    use burn::backend::DispatchDevice;
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(burn_cubecl::CubeDevice::Cuda(device)) => Some(device.index),
        _ => None,
    }
}

/// The number of GPUs; at least one.
///
/// # Errors
///
/// [`CudaError`] says what is missing, and what to try.
pub fn device_count() -> Result<usize, CudaError> {
    match driver()?.gpus.len() {
        0 => Err(CudaError::NoDevice),
        count => Ok(count),
    }
}

/// Makes sure that there is a GPU of this index, before Burn is asked for it.
///
/// # Errors
///
/// [`CudaError`] says what is missing, and what to try.
pub fn require_device(index: usize) -> Result<(), CudaError> {
    let count = device_count()?;
    if index < count { Ok(()) } else { Err(CudaError::NoSuchDevice { index, count }) }
}

/// The version of the NCCL that is found, whether the engine can use it or not.
///
/// # Errors
///
/// [`NcclError`] says what is missing.
pub fn nccl_version() -> Result<NcclVersion, NcclError> {
    let (library, file) = open_nccl()?;
    version_of(&library, &file)
}

/// NCCL, and the name it was found under.
pub(crate) fn open_nccl() -> Result<(Library, String), NcclError> {
    let named = std::env::var(NCCL_VARIABLE).ok().filter(|name| !name.is_empty());
    let names = named.as_deref().map_or(vec!["libnccl.so.2", "libnccl.so"], |name| vec![name]);
    open(&names).map_err(|reason| NcclError::Missing { reason })
}

/// What `ncclGetVersion` says.
pub(crate) fn version_of(library: &Library, file: &str) -> Result<NcclVersion, NcclError> {
    let symbol = "ncclGetVersion";
    let missing = || NcclError::Symbol { file: file.into(), symbol };
    let mut version = 0;
    // SAFETY: `ncclResult_t ncclGetVersion(int *version)` in nccl.h, since NCCL 2.0.
    let code = unsafe {
        let get: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int> =
            library.get(symbol.as_bytes()).map_err(|_| missing())?;
        get(&raw mut version)
    };
    match code {
        0 => Ok(NcclVersion::of(version)),
        code => Err(NcclError::Call { call: symbol, reason: format!("error {code}") }),
    }
}

/// The first library of these names that is there, and its name.
fn open(names: &[&str]) -> Result<(Library, String), String> {
    let mut reason = String::new();
    for name in names {
        // SAFETY: what runs on loading is the library's own start-up code, as in every program that
        // is linked to it.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok((library, (*name).to_string())),
            Err(_) if reason.is_empty() => reason = format!("`{name}` cannot be loaded"),
            Err(_) => {}
        }
    }
    Err(reason)
}

/// A function of the driver.
///
/// # Safety
///
/// `T` must be the symbol's type.
unsafe fn of_driver<'a, T>(library: &'a Library, name: &str) -> Result<Symbol<'a, T>, CudaError> {
    // SAFETY: the caller answers for the type.
    unsafe { library.get(name.as_bytes()) }
        .map_err(|_| CudaError::NoDriver { reason: format!("`{name}` is missing from it") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_nccl_are_read_in_both_forms() {
        assert_eq!(NcclVersion::of(2708).to_string(), "2.7.8");
        assert_eq!(NcclVersion::of(21805).to_string(), "2.18.5");
        assert_eq!(NcclVersion::of(22203).to_string(), "2.22.3");
        assert!(NcclVersion::of(2708) < OLDEST_NCCL && OLDEST_NCCL < NcclVersion::of(21801));
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = open(&["libfsdp-has-no-such.so.1", "libfsdp-has-no-such.so"]).unwrap_err();
        assert_eq!(error, "`libfsdp-has-no-such.so.1` cannot be loaded");
    }

    #[test]
    fn every_answer_says_what_to_try() {
        // Whatever this machine has, the three agree.
        match (driver(), device_count(), require_device(usize::MAX)) {
            (Ok(driver), Ok(count), Err(CudaError::NoSuchDevice { count: beyond, .. })) => {
                assert_eq!((driver.gpus.len(), beyond), (count, count));
                assert_eq!(require_device(count - 1), Ok(()));
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
