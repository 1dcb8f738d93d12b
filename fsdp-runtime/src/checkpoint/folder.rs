//! The folder that holds a run's checkpoints: folder names, the list of complete checkpoints, and
//! the renames that make a checkpoint complete.
//!
//! A save writes `step-00000012.tmp-..` and renames the folder to `step-00000012` once the manifest
//! is on disk. A folder with a manifest and without `.tmp` is therefore complete; every other
//! folder is torn, the remains of a save that was interrupted. A save of a step that already has a
//! checkpoint renames the old folder to `step-00000012.old-..` first. Between the two renames the
//! `.old` folder counts as the checkpoint of the step.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::io_error::io_error;
use super::manifest::{MANIFEST, rank_file_name};
use crate::error::CheckpointError;

/// Mark in the name of a folder that is being written.
const TMP: &str = ".tmp-";
/// Mark in the name of a folder that a newer save of the same step replaces.
const OLD: &str = ".old-";

/// The checkpoints in a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listing {
    /// Step and path of each complete checkpoint, in order of steps.
    pub complete: Vec<(u64, PathBuf)>,
    /// Folders left by saves that were interrupted.
    pub torn: Vec<PathBuf>,
}

/// Returns the name of a step's folder: `step-00000012`.
pub(super) fn step_folder(step: u64) -> String {
    format!("step-{step:08}")
}

/// Returns a unique path next to `folder`, under which the folder is written until it is complete.
pub(super) fn temporary_folder(folder: &Path) -> PathBuf {
    suffixed(folder, TMP)
}

/// Returns the path of `folder` with `mark` and a unique suffix appended.
fn suffixed(folder: &Path, mark: &str) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos());
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let mut name = folder.file_name().unwrap_or_default().to_os_string();
    name.push(format!("{mark}{:x}-{since:x}-{count:x}", std::process::id()));
    folder.with_file_name(name)
}

/// Creates a folder and the folders above it. Waits until the entries of the latter are on disk, since
/// a checkpoint below them is of no use without them.
pub(super) fn create(folder: &Path) -> Result<(), CheckpointError> {
    let missing = folder.ancestors().take_while(|path| !path.as_os_str().is_empty());
    let missing: Vec<&Path> = missing.take_while(|path| !path.exists()).collect();
    fs::create_dir_all(folder).map_err(io_error("create", folder))?;
    let above = missing.iter().skip(1).filter_map(|created| created.parent());
    above.into_iter().try_for_each(sync)
}

/// Lists the checkpoints in the folder `root`. A folder that does not exist holds none.
///
/// # Errors
///
/// [`CheckpointError::Io`] where the folder cannot be read.
pub fn list(root: &Path) -> Result<Listing, CheckpointError> {
    let mut listing = Listing::default();
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(listing),
        entries => entries.map_err(io_error("read", root))?,
    };
    let mut replaced = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io_error("read", root))?;
        let (path, name) = (entry.path(), entry.file_name());
        let Some((step, mark)) = name.to_str().and_then(step_of) else { continue };
        if !path.is_dir() {
            continue;
        }
        let complete = path.join(MANIFEST).is_file();
        match mark {
            "" if complete => listing.complete.push((step, path)),
            OLD if complete => replaced.push((step, path)),
            _ => listing.torn.push(path),
        }
    }
    for (step, path) in replaced {
        if listing.complete.iter().any(|(other, _)| *other == step) {
            listing.torn.push(path);
        } else {
            listing.complete.push((step, path));
        }
    }
    listing.complete.sort();
    listing.torn.sort();
    Ok(listing)
}

/// Parses a folder's name into the step and the mark, which is empty for a complete checkpoint.
fn step_of(name: &str) -> Option<(u64, &'static str)> {
    let name = name.strip_prefix("step-")?;
    let digits = name.bytes().take_while(u8::is_ascii_digit).count();
    let (step, suffix) = name.split_at(digits);
    let step = step.parse().ok()?;
    let mark = [TMP, OLD].into_iter().find(|mark| suffix.starts_with(mark));
    match mark {
        None if suffix.is_empty() => Some((step, "")),
        None => None,
        Some(mark) => Some((step, mark)),
    }
}

/// Deletes the folders left by saves that were interrupted.
pub(super) fn remove_torn(root: &Path) -> Result<(), CheckpointError> {
    for path in list(root)?.torn {
        tracing::warn!(target: "fsdp", path = %path.display(), "removing an incomplete save");
        remove(&path)?;
    }
    Ok(())
}

/// Deletes complete checkpoints until `keep` are left: `saved`, whatever its step, and the others
/// of the highest steps.
pub(super) fn prune(root: &Path, keep: usize, saved: &Path) -> Result<(), CheckpointError> {
    let mut others = list(root)?.complete;
    others.retain(|(_, path)| path.file_name() != saved.file_name());
    for (_, path) in &others[..others.len().saturating_sub(keep.saturating_sub(1))] {
        remove(path)?;
    }
    Ok(())
}

/// Checks that a save may replace `target`: nothing exists there, or an empty folder, or a
/// checkpoint.
///
/// # Errors
///
/// [`CheckpointError::NotACheckpoint`] for a file, and for a folder that holds anything else.
pub(super) fn check_target(target: &Path) -> Result<(), CheckpointError> {
    let empty = || fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_none());
    // Other programs name files `manifest.json` too, so that a rank's file is required as well.
    let checkpoint = || target.join(MANIFEST).is_file() && target.join(rank_file_name(0)).is_file();
    if !target.exists() || empty() || checkpoint() {
        return Ok(());
    }
    Err(CheckpointError::NotACheckpoint { path: target.display().to_string() })
}

/// Deletes a checkpoint, the manifest first: an interrupted deletion leaves a folder that no load
/// accepts.
fn remove(path: &Path) -> Result<(), CheckpointError> {
    let manifest = path.join(MANIFEST);
    if manifest.exists() {
        fs::remove_file(&manifest).map_err(io_error("delete", &manifest))?;
    }
    fs::remove_dir_all(path).map_err(io_error("delete", path))
}

/// Renames the complete folder `from` to `to`, replacing a checkpoint that is there.
pub(super) fn publish(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    sync(from)?;
    let mut old = None;
    if to.exists() {
        let replaced = suffixed(to, OLD);
        fs::rename(to, &replaced).map_err(io_error("rename", to))?;
        old = Some(replaced);
    }
    fs::rename(from, to).map_err(io_error("rename", from))?;
    sync(to.parent().unwrap_or(Path::new(".")))?;
    old.map_or(Ok(()), |old| remove(&old))
}

/// Waits until a folder's entries are on disk.
fn sync(folder: &Path) -> Result<(), CheckpointError> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    if cfg!(unix) {
        let opened = File::open(folder).map_err(io_error("open", folder))?;
        opened.sync_all().map_err(io_error("write", folder))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete(path: &Path) {
        fs::create_dir_all(path).unwrap();
        fs::write(path.join(MANIFEST), "{}").unwrap();
    }

    fn names(root: &Path) -> (Vec<u64>, usize) {
        let listing = list(root).unwrap();
        (listing.complete.iter().map(|(step, _)| *step).collect(), listing.torn.len())
    }

    #[test]
    fn only_folders_with_a_manifest_are_complete() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        assert_eq!(names(&root.join("absent")), (vec![], 0));
        complete(&root.join(step_folder(12)));
        complete(&root.join(step_folder(3)));
        complete(&root.join("step-00000020.tmp-1-2-3"));
        fs::create_dir(root.join(step_folder(15))).unwrap();
        fs::create_dir(root.join("notes")).unwrap();
        fs::create_dir(root.join("step-two")).unwrap();
        fs::write(root.join("step-00000030"), "a file").unwrap();
        assert_eq!(names(root), (vec![3, 12], 2));
        remove_torn(root).unwrap();
        assert_eq!(names(root), (vec![3, 12], 0));
        assert!(root.join("notes").exists() && root.join("step-two").exists());
    }

    #[test]
    fn saving_a_step_again_leaves_one_checkpoint_at_every_moment() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let step = root.join(step_folder(7));
        complete(&step);
        // Interrupted between the two renames.
        fs::rename(&step, suffixed(&step, OLD)).unwrap();
        assert_eq!(names(root), (vec![7], 0));
        remove_torn(root).unwrap();
        assert_eq!(names(root), (vec![7], 0));
        // A new save of the step replaces the old checkpoint.
        let new = temporary_folder(&step);
        complete(&new);
        publish(&new, &step).unwrap();
        assert_eq!(names(root), (vec![7], 1));
        let new = temporary_folder(&step);
        complete(&new);
        publish(&new, &step).unwrap();
        remove_torn(root).unwrap();
        assert_eq!(names(root), (vec![7], 0));
        assert_eq!(fs::read_dir(root).unwrap().count(), 1);
    }

    #[test]
    fn pruning_keeps_the_saved_checkpoint_and_the_newest_others() {
        let folder = tempfile::tempdir().unwrap();
        for step in [5, 100, 20, 3] {
            complete(&folder.path().join(step_folder(step)));
        }
        let prune = |keep, saved| {
            prune(folder.path(), keep, &folder.path().join(step_folder(saved))).unwrap();
            names(folder.path()).0
        };
        assert_eq!(prune(3, 100), [5, 20, 100]);
        assert_eq!(prune(9, 100), [5, 20, 100]);
        // The checkpoint just saved is kept even where another run left higher steps.
        assert_eq!(prune(2, 5), [5, 100]);
        assert_eq!(prune(1, 5), [5]);
    }

    #[test]
    fn only_checkpoints_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        check_target(&path("absent")).unwrap();
        fs::create_dir(path("empty")).unwrap();
        check_target(&path("empty")).unwrap();
        complete(&path("complete"));
        fs::write(path("complete").join(rank_file_name(0)), "").unwrap();
        check_target(&path("complete")).unwrap();
        complete(&path("extension"));
        fs::write(path("file"), "text").unwrap();
        complete(&path("run").join(step_folder(3)));
        for name in ["file", "run", "extension"] {
            let error = check_target(&path(name)).unwrap_err();
            assert!(matches!(&error, CheckpointError::NotACheckpoint { .. }), "{error}");
            assert!(error.to_string().contains(name), "{error}");
        }
    }
}
