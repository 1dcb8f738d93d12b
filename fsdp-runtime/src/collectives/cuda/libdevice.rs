//! The path at which CubeCL looks for `libdevice.10.bc`, NVIDIA's library of math functions for
//! GPUs.

use std::path::{Path, PathBuf};

use super::CudaError;

/// Environment variable with the folder of the CUDA toolkit. If it is set, CubeCL looks nowhere
/// else.
pub const CUDA_PATH: &str = "CUDA_PATH";

/// Folders in which CubeCL looks for the CUDA toolkit. It uses the first one that has
/// `nvvm/libdevice`.
const TOOLKITS: [&str; 4] = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr"];

/// Returns the path of `libdevice.10.bc`, which CubeCL links to kernels that call `exp`, `log`,
/// `tanh`, `pow` and the like.
///
/// # Errors
///
/// Returns [`CudaError::NoLibdevice`] if the file is not where CubeCL looks for it.
pub fn libdevice() -> Result<PathBuf, CudaError> {
    // CubeCL ignores a value that is not UTF-8.
    find(std::env::var(CUDA_PATH).ok(), &TOOLKITS.map(Path::new))
}

/// Returns whether CubeCL needs `libdevice.10.bc`: not if its feature `cuda-cpp` is on, with which
/// it compiles kernels with NVRTC.
pub fn needs_libdevice() -> bool {
    #[cfg(feature = "nccl")]
    return cubecl::cuda::compiler::CudaBackend::default()
        == cubecl::cuda::compiler::CudaBackend::Llvm;
    #[cfg(not(feature = "nccl"))]
    true
}

/// Returns the file as CubeCL finds it: in the toolkit `cuda_path` if there is one, else in the
/// first of `toolkits` that has a folder for it.
fn find(cuda_path: Option<String>, toolkits: &[&Path]) -> Result<PathBuf, CudaError> {
    let folder = |toolkit: &Path| toolkit.join("nvvm").join("libdevice");
    let (folder, reason) = match cuda_path {
        Some(toolkit) => {
            let folder = folder(Path::new(&toolkit));
            (Some(folder), format!("`{CUDA_PATH}` is {toolkit}"))
        }
        None => {
            let mut folders = toolkits.iter().map(|toolkit| folder(toolkit));
            let toolkits: Vec<_> = toolkits.iter().map(|path| path.display().to_string()).collect();
            let reason =
                format!("`{CUDA_PATH}` is not set; CubeCL looks in {}", toolkits.join(", "));
            (folders.find(|folder| folder.is_dir()), reason)
        }
    };
    let file = folder.map(|folder| folder.join("libdevice.10.bc"));
    file.filter(|file| file.is_file()).ok_or(CudaError::NoLibdevice { reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates `nvvm/libdevice` in a toolkit, with the file if `with_file`.
    fn toolkit(folder: &Path, with_file: bool) -> PathBuf {
        let inner = folder.join("nvvm/libdevice");
        std::fs::create_dir_all(&inner).unwrap();
        let file = inner.join("libdevice.10.bc");
        if with_file {
            std::fs::write(&file, "bitcode").unwrap();
        }
        file
    }

    #[test]
    fn the_first_toolkit_with_the_folder_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|name| folder.path().join(name));
        let toolkits = [a.as_path(), &b, &c];
        assert!(matches!(find(None, &toolkits), Err(CudaError::NoLibdevice { .. })));
        let file = toolkit(&c, true);
        assert_eq!(find(None, &toolkits), Ok(file));
        // CubeCL stops at the first folder, even if it is empty.
        let file = toolkit(&b, false);
        assert!(find(None, &toolkits).is_err());
        std::fs::write(&file, "bitcode").unwrap();
        assert_eq!(find(None, &toolkits), Ok(file));
    }

    #[test]
    fn the_environment_variable_excludes_other_toolkits() {
        let folder = tempfile::tempdir().unwrap();
        let [named, other] = ["named", "other"].map(|name| folder.path().join(name));
        let named_by = || Some(named.display().to_string());
        toolkit(&other, true);
        let error = find(named_by(), &[&other]).unwrap_err().to_string();
        assert!(error.contains(&named_by().unwrap()), "{error}");
        let file = toolkit(&named, true);
        assert_eq!(find(named_by(), &[&other]), Ok(file));
    }

    #[test]
    fn the_error_is_one_line_that_says_what_to_install() {
        for cuda_path in [None, Some("/no/such/toolkit".into())] {
            let text = find(cuda_path, &[Path::new("/no/toolkit")]).unwrap_err().to_string();
            assert!(!text.contains('\n') && text.contains("nvidia-cuda-nvcc-cu12"), "{text}");
            assert!(text.starts_with("`libdevice.10.bc` was not found") && text.contains("/no/"));
        }
    }
}
