//! The folder that holds a run's checkpoints: names, which are complete, and the steps by which one
//! becomes complete.
//!
//! `step-00000012` is written as `step-00000012.tmp-..`, and renamed once its manifest is on the
//! disk. So a folder with a manifest and without `.tmp` is complete, and any other is the rest of a
//! save that was interrupted. Where a step is saved again, the old folder is set aside as
//! `step-00000012.old-..` for the moment between two renames, and counts until the new one is there.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::io;
use super::manifest::{MANIFEST, rank_file};
use crate::error::CheckpointError;

const TMP: &str = ".tmp-";
const OLD: &str = ".old-";

/// The checkpoints in a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The complete ones with their steps, oldest first.
    pub complete: Vec<(u64, PathBuf)>,
    /// What is left of saves that did not complete.
    pub torn: Vec<PathBuf>,
}

/// The name of a step's folder.
pub(crate) fn step_folder(step: u64) -> String {
    format!("step-{step:08}")
}

/// A folder beside `folder` to write it in, unlike any other's.
pub(crate) fn beside(folder: &Path) -> PathBuf {
    suffixed(folder, TMP)
}

fn suffixed(folder: &Path, mark: &str) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos());
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let mut name = folder.file_name().unwrap_or_default().to_os_string();
    name.push(format!("{mark}{:x}-{since:x}-{count:x}", std::process::id()));
    folder.with_file_name(name)
}

/// What a folder of checkpoints holds. One that does not exist holds none.
///
/// # Errors
///
/// [`CheckpointError::Io`] when it cannot be read.
pub fn list(root: &Path) -> Result<Listing, CheckpointError> {
    let mut listing = Listing::default();
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(listing),
        entries => entries.map_err(io("read", root))?,
    };
    let mut aside = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io("read", root))?;
        let (path, name) = (entry.path(), entry.file_name());
        let Some((step, mark)) = name.to_str().and_then(step_of) else { continue };
        if !path.is_dir() {
            continue;
        }
        let complete = path.join(MANIFEST).is_file();
        match mark {
            "" if complete => listing.complete.push((step, path)),
            OLD if complete => aside.push((step, path)),
            _ => listing.torn.push(path),
        }
    }
    for (step, path) in aside {
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

/// The step that a folder's name tells, and its mark.
fn step_of(name: &str) -> Option<(u64, &'static str)> {
    let rest = name.strip_prefix("step-")?;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (step, rest) = rest.split_at(digits);
    let step = step.parse().ok()?;
    let mark = [TMP, OLD].into_iter().find(|mark| rest.starts_with(mark));
    match mark {
        None if rest.is_empty() => Some((step, "")),
        None => None,
        Some(mark) => Some((step, mark)),
    }
}

/// Removes what is left of saves that did not complete.
pub(crate) fn clean(root: &Path) -> Result<(), CheckpointError> {
    for path in list(root)?.torn {
        tracing::warn!(target: "fsdp", path = %path.display(), "removing a save that did not complete");
        remove(&path)?;
    }
    Ok(())
}

/// Deletes all but `keep` complete checkpoints: `saved`, whatever its step, and the newest others.
pub(crate) fn prune(root: &Path, keep: usize, saved: &Path) -> Result<(), CheckpointError> {
    let mut others = list(root)?.complete;
    others.retain(|(_, path)| path.file_name() != saved.file_name());
    for (_, path) in &others[..others.len().saturating_sub(keep.saturating_sub(1))] {
        remove(path)?;
    }
    Ok(())
}

/// Checks that a save may put a folder in the place of `target`: one that is there is a checkpoint.
///
/// # Errors
///
/// [`CheckpointError::NotACheckpoint`] for a file, and for a folder that holds anything else.
pub(crate) fn check_target(target: &Path) -> Result<(), CheckpointError> {
    let empty = || fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_none());
    // Others have files of that name, too.
    let checkpoint = || target.join(MANIFEST).is_file() && target.join(rank_file(0)).is_file();
    if !target.exists() || empty() || checkpoint() {
        return Ok(());
    }
    Err(CheckpointError::NotACheckpoint { path: target.display().to_string() })
}

/// Deletes a checkpoint. One that is cut short leaves no manifest, and so nothing to be loaded.
fn remove(path: &Path) -> Result<(), CheckpointError> {
    let manifest = path.join(MANIFEST);
    if manifest.exists() {
        fs::remove_file(&manifest).map_err(io("delete", &manifest))?;
    }
    fs::remove_dir_all(path).map_err(io("delete", path))
}

/// Makes a finished folder the checkpoint: `from` becomes `to`, all at once.
pub(crate) fn publish(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    sync(from)?;
    let mut old = None;
    if to.exists() {
        let aside = suffixed(to, OLD);
        fs::rename(to, &aside).map_err(io("rename", to))?;
        old = Some(aside);
    }
    fs::rename(from, to).map_err(io("rename", from))?;
    sync(to.parent().unwrap_or(Path::new(".")))?;
    old.map_or(Ok(()), |old| remove(&old))
}

/// Waits until a folder's entries are on the disk.
fn sync(folder: &Path) -> Result<(), CheckpointError> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    if cfg!(unix) {
        let opened = File::open(folder).map_err(io("open", folder))?;
        opened.sync_all().map_err(io("write", folder))?;
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
        clean(root).unwrap();
        assert_eq!(names(root), (vec![3, 12], 0));
        assert!(root.join("notes").exists() && root.join("step-two").exists());
    }

    #[test]
    fn a_step_that_is_saved_again_counts_at_every_moment() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let step = root.join(step_folder(7));
        complete(&step);
        // Killed between the two renames.
        fs::rename(&step, suffixed(&step, OLD)).unwrap();
        assert_eq!(names(root), (vec![7], 0));
        clean(root).unwrap();
        assert_eq!(names(root), (vec![7], 0));
        // Saved once more: the old one goes.
        let new = beside(&step);
        complete(&new);
        publish(&new, &step).unwrap();
        assert_eq!(names(root), (vec![7], 1));
        let new = beside(&step);
        complete(&new);
        publish(&new, &step).unwrap();
        clean(root).unwrap();
        assert_eq!(names(root), (vec![7], 0));
        assert_eq!(fs::read_dir(root).unwrap().count(), 1);
    }

    #[test]
    fn the_newest_are_kept() {
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
        // What another run left is newer by its number alone.
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
        fs::write(path("complete").join(rank_file(0)), "").unwrap();
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
