//! The checkpoints of a run below one root folder.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::background::BackgroundSave;
use super::contents::Checkpoint;
use super::steps::{CheckpointRoot, save};
use crate::checkpoint::folder;
use crate::checkpoint::ranks::Ranks;
use crate::error::Error;
use crate::launch::Worker;

/// Result of [`CheckpointManager::save`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Saved {
    /// Folder of the saved checkpoint. A background save creates it only once the checkpoint is
    /// complete.
    pub folder: PathBuf,
    /// Time for which training was blocked: the whole save, or, for a background save, the wait for
    /// the previous save and the copy to host memory.
    pub stall: Duration,
}

/// Saves a run's checkpoints as folders `step-00000012` below one root folder, and finds the
/// newest.
///
/// Only one run at a time may save below a root: each save deletes the incomplete folders there.
#[derive(Debug)]
#[must_use]
pub struct CheckpointManager {
    root: CheckpointRoot,
    ranks: Ranks,
    background: bool,
    pending: Option<BackgroundSave>,
}

impl CheckpointManager {
    /// Returns a manager of the checkpoints below `root`, a folder that the first save creates. It
    /// keeps all checkpoints and saves in the foreground.
    pub fn new(root: impl Into<PathBuf>, worker: &Worker) -> Self {
        let root = CheckpointRoot { path: root.into(), keep_last: None };
        Self { root, ranks: Ranks::from(worker), background: false, pending: None }
    }

    /// Keeps `count` checkpoints, at least one: the one just saved, and the others of the highest
    /// steps. The rest are deleted once a new checkpoint is complete.
    pub fn with_keep_last(mut self, count: usize) -> Self {
        self.root.keep_last = Some(count.max(1));
        self
    }

    /// Sets whether a save copies the state to host memory and writes the files while training
    /// continues. Off by default.
    pub fn with_background(mut self, background: bool) -> Self {
        self.background = background;
        self
    }

    /// Returns the root folder.
    pub fn root(&self) -> &Path {
        &self.root.path
    }

    /// Saves to the folder of the checkpoint's step. A background save waits for the previous save,
    /// copies the state and returns; [`finish`](Self::finish) returns the outcome. Every rank calls
    /// it.
    ///
    /// # Errors
    ///
    /// Those of [`Checkpoint::save`], and the errors of the previous background save.
    pub fn save(&mut self, checkpoint: &Checkpoint<'_>) -> Result<Saved, Error> {
        let begun = Instant::now();
        let op = "save";
        let _span = tracing::trace_span!(target: "fsdp::trace", "fsdp::save", %op).entered();
        self.finish()?;
        let target = self.root.path.join(folder::step_folder(checkpoint.progress.step));
        if self.background {
            let pending = BackgroundSave::start(checkpoint, &self.ranks, &target, &self.root)?;
            self.pending = Some(pending);
        } else {
            save(checkpoint, &self.ranks, &target, Some(&self.root))?;
        }
        Ok(Saved { folder: target, stall: begun.elapsed() })
    }

    /// Waits for the background save, if one is running. Every rank calls it.
    ///
    /// # Errors
    ///
    /// Those of [`Checkpoint::save`].
    pub fn finish(&mut self) -> Result<(), Error> {
        self.pending.take().map_or(Ok(()), |pending| pending.finish(&self.ranks))
    }

    /// Returns the newest complete checkpoint that rank 0 finds. Incomplete ones are skipped and
    /// logged as warnings. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`](crate::CheckpointError::Io) where the root folder cannot be read.
    pub fn latest(&self) -> Result<Option<PathBuf>, Error> {
        let leads = self.ranks.leads();
        let listing = if leads { folder::list(self.root()) } else { Ok(Default::default()) };
        let listing = self.ranks.agree("the checkpoints", listing)?;
        for torn in &listing.torn {
            tracing::warn!(target: "fsdp", path = %torn.display(), "skipping an incomplete save");
        }
        let latest = listing.complete.last().map(|(_, path)| path.clone());
        Ok((*self.ranks.exchange("the newest checkpoint", latest)?[0]).clone())
    }
}

impl Drop for CheckpointManager {
    /// Waits for a background save for a few seconds, without any collective.
    fn drop(&mut self) {
        if let Some(pending) = self.pending.take() {
            pending.abandon();
        }
    }
}
