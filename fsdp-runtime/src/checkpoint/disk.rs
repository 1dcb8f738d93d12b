//! The file system of a run's checkpoints, so that saves notice when its disk is no longer mounted.

use std::fs::Metadata;
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::io_error::io_error;
use crate::error::{CheckpointError, IgnorePoison};

/// The file system on which a folder was at the last save. Clones share the value.
///
/// When a disk is no longer mounted, the folder of its mount point is a folder of another disk. A
/// save there would succeed, and its checkpoint would be on a disk that nobody looks at.
#[derive(Clone, Debug, Default)]
pub(super) struct Disk(Arc<Mutex<Option<u64>>>);

impl Disk {
    /// Checks that `root`, or the folder above it that exists, is on the file system of the last
    /// check.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] of the kind `NotFound`.
    pub(super) fn check(&self, root: &Path) -> Result<(), CheckpointError> {
        let here = |path: &Path| {
            if path.as_os_str().is_empty() { Path::new(".") } else { path }.metadata()
        };
        let Some(found) = root.ancestors().find_map(|path| here(path).ok()).and_then(number) else {
            return Ok(());
        };
        let mut last = self.0.lock().ignore_poison();
        if last.is_some_and(|last| last != found) {
            let reason = "it is on another file system than at the last save; mount its disk again";
            let error = std::io::Error::new(std::io::ErrorKind::NotFound, reason);
            return Err(io_error("write", root)(error));
        }
        *last = Some(found);
        Ok(())
    }
}

/// Returns the number of a file system.
#[cfg(unix)]
fn number(metadata: Metadata) -> Option<u64> {
    Some(std::os::unix::fs::MetadataExt::dev(&metadata))
}

/// Returns `None`: the system has no such number.
#[cfg(not(unix))]
fn number(_: Metadata) -> Option<u64> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn another_file_system_is_noticed() {
        let disk = Disk::default();
        let folder = tempfile::tempdir().unwrap();
        disk.check(&folder.path().join("run/a")).unwrap();
        std::fs::create_dir_all(folder.path().join("run/a")).unwrap();
        disk.clone().check(&folder.path().join("run/a")).unwrap();
        let error = disk.check(Path::new("/proc/self")).unwrap_err();
        assert!(error.to_string().contains("another file system"), "{error}");
        disk.check(folder.path()).unwrap();
    }
}
