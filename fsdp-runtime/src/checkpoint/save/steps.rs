//! The steps in which all ranks write a checkpoint folder together.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use super::contents::Checkpoint;
use super::elements::write_elements;
use super::manifest_part::{merge_parts, write_part};
use super::outline::outline;
use super::per_rank::DifferingTensors;
use super::sink::FileSink;
use crate::checkpoint::disk::Disk;
use crate::checkpoint::folder;
use crate::checkpoint::io_error::io_error;
use crate::checkpoint::manifest::{MANIFEST, Manifest};
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::sharded_model::ShardedModel;
use crate::checkpoint::state::State;
use crate::error::{CheckpointError, Error, ShardError};
use crate::launch::Worker;
use crate::module::FsdpModule;

/// A root folder of checkpoints, and how many of them to keep.
#[derive(Clone, Debug)]
pub(super) struct CheckpointRoot {
    pub(super) path: PathBuf,
    /// File system of the last save.
    pub(super) disk: Disk,
    /// Number of complete checkpoints that remain after a save; `None` keeps all.
    pub(super) keep_last: Option<usize>,
}

impl Checkpoint<'_> {
    /// Writes the checkpoint to `folder`, which appears once it is complete. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] on the rank that found the error, and
    /// [`CollectiveError::PeerFailed`](crate::errors::CollectiveError::PeerFailed) on the others.
    pub fn save(&self, worker: &Worker, folder: impl AsRef<Path>) -> Result<(), Error> {
        let _span = save_span();
        save(self, &Ranks::from(worker), folder.as_ref(), None)
    }
}

impl<M: FsdpModule> State<'_, M> {
    /// Saves the model alone as a checkpoint folder, in which the model's name is `model`. Every
    /// rank calls it. To save optimizers and more, use [`Checkpoint`].
    ///
    /// # Errors
    ///
    /// Those of [`Checkpoint::save`].
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<(), Error> {
        let _span = save_span();
        let checkpoint = Checkpoint::new(0).with_model("model", self.model);
        save(&checkpoint, &Ranks::from(self.model), folder.as_ref(), None)
    }
}

/// Returns the span of a save in a trace.
pub(super) fn save_span() -> tracing::span::EnteredSpan {
    let op = "save";
    tracing::trace_span!(target: "fsdp::trace", "fsdp::save", %op).entered()
}

/// Saves to `target` and returns once the checkpoint is complete. `root` is set for a managed
/// checkpoint.
pub(super) fn save(
    checkpoint: &Checkpoint<'_>,
    ranks: &Ranks,
    target: &Path,
    root: Option<&CheckpointRoot>,
) -> Result<(), Error> {
    let (tmp, differing) = begin(checkpoint, ranks, target, root)?;
    let write = |mut sink: FileSink| {
        write_elements(checkpoint, &differing, &mut sink)?;
        write_part(&tmp, ranks.index(), &sink.finish()?)
    };
    let written = FileSink::create(&tmp, ranks.index(), outline(checkpoint, ranks)).and_then(write);
    let written = ranks.agree("the files of a checkpoint", written);
    let committed = match &written {
        Ok(()) if ranks.leads() => commit(&tmp, target, ranks.mesh.world.size(), root),
        _ => Ok(()),
    };
    if ranks.leads() && (written.is_err() || committed.is_err()) {
        // Where this fails, the rest of the folder is recognised as torn.
        let _ = fs::remove_dir_all(&tmp);
    }
    written?;
    ranks.agree("the manifest of a checkpoint", committed)
}

/// Checks that all ranks save the same things, compares the ranks' ignored parameters, and creates
/// the temporary folder, whose path it returns. Every rank calls it.
pub(super) fn begin(
    checkpoint: &Checkpoint<'_>,
    ranks: &Ranks,
    target: &Path,
    root: Option<&CheckpointRoot>,
) -> Result<(PathBuf, DifferingTensors), Error> {
    for model in checkpoint.models.values() {
        check_codes(*model)?;
    }
    let all = ranks.exchange("the contents of a checkpoint", checkpoint.summary())?;
    for (rank, found) in ranks.mesh.world.ranks().zip(&all) {
        if *found != all[0] {
            let (expected, found) = (all[0].to_string(), found.to_string());
            return Err(CheckpointError::RanksDiffer { rank, expected, found }.into());
        }
    }
    let differing = DifferingTensors::find(checkpoint, ranks)?;
    let created = if ranks.leads() { create_temporary(target, root) } else { Ok(PathBuf::new()) };
    let created = ranks.agree("a checkpoint's folder", created)?;
    let tmp = ranks.exchange("a checkpoint's folder", created)?[0].to_path_buf();
    Ok((tmp, differing))
}

/// Checks that no split matrix is stored in codes, which have no parts that another mesh could take.
fn check_codes(model: &dyn ShardedModel) -> Result<(), ShardError> {
    let params = model.schedule().units().iter().flat_map(|unit| &unit.params);
    let mut coded = params.filter(|spec| spec.storage.is_coded() && spec.split.is_some());
    match coded.next() {
        Some(_) => {
            let instead = "save the adapters with `save_adapters`, or store the base in bf16";
            model.schedule().check_whole("a checkpoint of a base in codes", instead)
        }
        None => Ok(()),
    }
}

fn create_temporary(
    target: &Path,
    root: Option<&CheckpointRoot>,
) -> Result<PathBuf, CheckpointError> {
    if let Some(root) = root {
        root.disk.check(&root.path)?;
        folder::remove_torn(&root.path)?;
    }
    folder::check_target(target)?;
    let tmp = folder::temporary_folder(target);
    folder::create(&tmp)?;
    Ok(tmp)
}

/// Writes the manifest from the parts of all `world` ranks, renames `tmp` to `target`, and deletes
/// old checkpoints of `root`. Rank 0 alone calls it.
pub(super) fn commit(
    tmp: &Path,
    target: &Path,
    world: usize,
    root: Option<&CheckpointRoot>,
) -> Result<(), CheckpointError> {
    let manifest: Manifest = merge_parts(tmp, world)?;
    let path = tmp.join(MANIFEST);
    let mut file = fs::File::create_new(&path).map_err(io_error("create", &path))?;
    file.write_all(manifest.to_text().as_bytes()).map_err(io_error("write", &path))?;
    file.sync_all().map_err(io_error("write", &path))?;
    folder::publish(tmp, target)?;
    match root {
        Some(CheckpointRoot { path, keep_last: Some(keep), .. }) => {
            folder::prune(path, *keep, target)
        }
        _ => Ok(()),
    }
}
