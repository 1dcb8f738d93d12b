//! Files in which the ranks leave their parts of the manifest for rank 0.

use std::path::Path;

use crate::checkpoint::io_error::io_error;
use crate::checkpoint::manifest::Manifest;
use crate::error::CheckpointError;

/// Returns the name of the file with a rank's part of the manifest.
fn part_file(rank: usize) -> String {
    format!("rank-{rank:05}.part.json")
}

/// Writes this rank's part of the manifest to `folder`. The file appears complete, by a rename.
pub(super) fn write_part(
    folder: &Path,
    rank: usize,
    manifest: &Manifest,
) -> Result<(), CheckpointError> {
    let path = folder.join(part_file(rank));
    let incomplete = path.with_extension("new");
    std::fs::write(&incomplete, manifest.to_body()).map_err(io_error("write", &incomplete))?;
    std::fs::rename(&incomplete, &path).map_err(io_error("write", &path))
}

/// Reads the parts of all `world` ranks, merges them, checks the manifest and deletes the parts.
pub(super) fn merge_parts(folder: &Path, world: usize) -> Result<Manifest, CheckpointError> {
    let mut merged: Option<Manifest> = None;
    for rank in 0..world {
        let path = folder.join(part_file(rank));
        let text = std::fs::read(&path).map_err(io_error("read", &path))?;
        let part: Manifest = serde_json::from_slice(&text).map_err(|error| {
            let (file, reason) = (path.display().to_string(), error.to_string());
            CheckpointError::NotAManifest { file, reason }
        })?;
        match &mut merged {
            None => merged = Some(part),
            Some(merged) => merged.merge(part, rank),
        }
    }
    let merged = merged.ok_or_else(|| CheckpointError::NoCheckpoint {
        folder: folder.display().to_string(),
        torn: Vec::new(),
    })?;
    merged.check(&folder.display().to_string())?;
    for rank in 0..world {
        let part = folder.join(part_file(rank));
        std::fs::remove_file(&part).map_err(io_error("delete", &part))?;
    }
    Ok(merged)
}

/// Returns the first of `world` ranks that has not written its part yet.
pub(super) fn missing_part(folder: &Path, world: usize) -> Option<usize> {
    (0..world).find(|&rank| !folder.join(part_file(rank)).exists())
}
