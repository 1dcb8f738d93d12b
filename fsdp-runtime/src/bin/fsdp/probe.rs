//! Libraries that are loaded when a program needs them: is it there, and which version.

use std::ffi::{CStr, c_char, c_int};

use libloading::{Library, Symbol};

/// NVIDIA's driver.
pub struct Cuda {
    /// The CUDA version it supports, such as `12.4`.
    pub version: String,
    /// Each GPU's name and bytes of memory.
    pub devices: Vec<(String, usize)>,
}

/// The CUDA driver and its GPUs, or why they cannot be used.
pub fn cuda() -> Result<Cuda, String> {
    let library = open(&["libcuda.so.1", "libcuda.so"])?;
    let check = |name: &str, code: c_int| match code {
        0 => Ok(()),
        100 => Err("no CUDA device was found".to_string()),
        code => Err(format!("{name} returned error {code}")),
    };
    // SAFETY: the signatures are those of NVIDIA's driver API (cuda.h), stable since CUDA 4; every
    // pointer is to a live value of the type written there, names with their length.
    unsafe {
        let init: Symbol<'_, unsafe extern "C" fn(u32) -> c_int> = symbol(&library, "cuInit")?;
        let version: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int> =
            symbol(&library, "cuDriverGetVersion")?;
        let count: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int> =
            symbol(&library, "cuDeviceGetCount")?;
        let get: Symbol<'_, unsafe extern "C" fn(*mut c_int, c_int) -> c_int> =
            symbol(&library, "cuDeviceGet")?;
        let name: Symbol<'_, unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int> =
            symbol(&library, "cuDeviceGetName")?;
        let memory: Symbol<'_, unsafe extern "C" fn(*mut usize, c_int) -> c_int> =
            symbol(&library, "cuDeviceTotalMem_v2")?;

        check("cuInit", init(0))?;
        let (mut number, mut devices) = (0, 0);
        check("cuDriverGetVersion", version(&mut number))?;
        check("cuDeviceGetCount", count(&mut devices))?;
        let mut found = Vec::new();
        for index in 0..devices {
            let (mut device, mut bytes, mut text) = (0, 0, [0; 128]);
            check("cuDeviceGet", get(&mut device, index))?;
            check("cuDeviceGetName", name(text.as_mut_ptr(), text.len() as c_int, device))?;
            check("cuDeviceTotalMem", memory(&mut bytes, device))?;
            let end = text.len() - 1;
            text[end] = 0;
            found.push((CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned(), bytes));
        }
        let version = format!("{}.{}", number / 1000, number % 1000 / 10);
        Ok(Cuda { version, devices: found })
    }
}

/// NCCL's version, or why it cannot be used.
pub fn nccl() -> Result<String, String> {
    let library = open(&["libnccl.so.2", "libnccl.so"])?;
    let mut version = 0;
    // SAFETY: `ncclResult_t ncclGetVersion(int *version)` in nccl.h, since NCCL 2.0.
    let code = unsafe {
        let get: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int> =
            symbol(&library, "ncclGetVersion")?;
        get(&mut version)
    };
    match code {
        0 => Ok(nccl_version(version)),
        code => Err(format!("ncclGetVersion returned error {code}")),
    }
}

/// Versions before 2.9 had a digit less for the second number.
fn nccl_version(number: c_int) -> String {
    let scale = if number < 10_000 { 1_000 } else { 10_000 };
    format!("{}.{}.{}", number / scale, number % scale / 100, number % 100)
}

fn open(names: &[&str]) -> Result<Library, String> {
    let mut reason = String::new();
    for name in names {
        // SAFETY: what runs on loading is the library's own start-up code, as in every program that
        // is linked to it.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok(library),
            Err(_) if reason.is_empty() => reason = format!("`{name}` was not found"),
            Err(_) => {}
        }
    }
    Err(reason)
}

/// # Safety
///
/// `T` must be the symbol's type.
unsafe fn symbol<'a, T>(library: &'a Library, name: &str) -> Result<Symbol<'a, T>, String> {
    // SAFETY: the caller answers for the type.
    unsafe { library.get(name.as_bytes()) }.map_err(|_| format!("`{name}` is missing from it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_nccl_are_read_in_both_forms() {
        assert_eq!(nccl_version(2708), "2.7.8");
        assert_eq!(nccl_version(21805), "2.18.5");
        assert_eq!(nccl_version(22203), "2.22.3");
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = open(&["libfsdp-has-no-such.so.1", "libfsdp-has-no-such.so"]).unwrap_err();
        assert_eq!(error, "`libfsdp-has-no-such.so.1` was not found");
    }
}
