//! The checkpoints of a run below one root folder.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::background::BackgroundSave;
use super::contents::Checkpoint;
use super::policy::{OnSaveError, SaveOutcome, WhenBusy, tolerate};
use super::steps::{CheckpointRoot, save, save_span};
use crate::checkpoint::disk::Disk;
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
    /// How the save has gone, the same on every rank.
    pub outcome: SaveOutcome,
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
    on_error: OnSaveError,
    when_busy: WhenBusy,
    /// The save in the background, of which there is at most one.
    pending: Option<BackgroundSave>,
    /// Number of saves that have failed under [`OnSaveError::Warn`].
    failed_saves: usize,
    /// Error of the last save, if it has failed.
    last_failure: Option<String>,
}

impl CheckpointManager {
    /// Returns a manager of the checkpoints below `root`, a folder that the first save creates. It
    /// keeps all checkpoints and saves in the foreground.
    pub fn new(root: impl Into<PathBuf>, worker: &Worker) -> Self {
        let root = CheckpointRoot { path: root.into(), disk: Disk::default(), keep_last: None };
        Self {
            root,
            ranks: Ranks::from(worker),
            background: false,
            on_error: OnSaveError::default(),
            when_busy: WhenBusy::default(),
            pending: None,
            failed_saves: 0,
            last_failure: None,
        }
    }

    /// Keeps `count` checkpoints, at least one: the one just saved, and the others of the highest
    /// steps. The rest are deleted once a new checkpoint is complete.
    pub fn with_keep_last(mut self, count: usize) -> Self {
        self.root.keep_last = Some(count.max(1));
        self
    }

    /// Sets what happens when a save fails for a reason outside of the program. The default is
    /// [`OnSaveError::Fail`]. Equal on all ranks.
    pub fn with_on_save_error(mut self, on_error: OnSaveError) -> Self {
        self.on_error = on_error;
        self
    }

    /// Sets what happens when a background save is due while the previous one still runs. The default
    /// is [`WhenBusy::Wait`]. Equal on all ranks.
    pub fn with_when_busy(mut self, when_busy: WhenBusy) -> Self {
        self.when_busy = when_busy;
        self
    }

    /// Sets whether a save copies the state to host memory and writes the files while training
    /// continues. Off by default. At most one save is in flight, with one copy of this rank's state.
    pub fn with_background(mut self, background: bool) -> Self {
        self.background = background;
        self
    }

    /// Returns the root folder.
    pub fn root(&self) -> &Path {
        &self.root.path
    }

    /// Returns the number of saves that have failed and were logged as warnings, under
    /// [`OnSaveError::Warn`].
    pub fn failed_saves(&self) -> usize {
        self.failed_saves
    }

    /// Returns the error of the last save, if it has failed under [`OnSaveError::Warn`]. That of a
    /// background save is known after [`finish`](Self::finish) or the next [`save`](Self::save).
    pub fn last_failure(&self) -> Option<&str> {
        self.last_failure.as_deref()
    }

    /// Saves to the folder of the checkpoint's step. A background save waits for the previous save,
    /// unless [`WhenBusy::Skip`] is set, copies the state and returns; [`finish`](Self::finish)
    /// returns the outcome. Every rank calls it.
    ///
    /// # Errors
    ///
    /// Those of [`Checkpoint::save`], and the errors of the previous background save. Under
    /// [`OnSaveError::Warn`], those that are no [`CheckpointError::Io`](crate::errors::CheckpointError::Io)
    /// and no [`CheckpointError::Timeout`](crate::errors::CheckpointError::Timeout).
    pub fn save(&mut self, checkpoint: &Checkpoint<'_>) -> Result<Saved, Error> {
        let begun = Instant::now();
        let _span = save_span();
        let target = self.root.path.join(folder::step_folder(checkpoint.progress.step));
        if self.when_busy == WhenBusy::Skip && self.is_saving()? {
            let outcome = SaveOutcome::Skipped;
            tracing::warn!(target: "fsdp", path = %target.display(), "no checkpoint: the last save still runs");
            return Ok(Saved { folder: target, stall: begun.elapsed(), outcome });
        }
        self.finish()?;
        let saved = if self.background {
            let started = BackgroundSave::start(checkpoint, &self.ranks, &target, &self.root);
            started.map(|pending| {
                self.pending = Some(pending);
                SaveOutcome::Started
            })
        } else {
            save(checkpoint, &self.ranks, &target, Some(&self.root)).map(|()| SaveOutcome::Complete)
        };
        let outcome = match saved {
            Ok(outcome) => outcome,
            Err(error) => SaveOutcome::Failed(self.tolerate(error)?),
        };
        if outcome == SaveOutcome::Complete {
            self.last_failure = None;
        }
        Ok(Saved { folder: target, stall: begun.elapsed(), outcome })
    }

    /// Returns whether a background save still runs on a rank. Every rank calls it.
    ///
    /// # Errors
    ///
    /// If a peer fails.
    pub fn is_saving(&self) -> Result<bool, Error> {
        let Some(pending) = &self.pending else { return Ok(false) };
        let finished = self.ranks.exchange("whether a save still runs", pending.is_finished())?;
        Ok(finished.iter().any(|finished| !**finished))
    }

    /// Logs the error of a failed save as a warning and returns its text, if training may continue.
    fn tolerate(&mut self, error: Error) -> Result<String, Error> {
        if self.on_error == OnSaveError::Fail {
            return Err(error);
        }
        let reason = tolerate(&self.ranks, error)?;
        tracing::warn!(target: "fsdp", %reason, "a checkpoint was not saved");
        self.failed_saves += 1;
        self.last_failure = Some(reason.clone());
        Ok(reason)
    }

    /// Waits for the background save, if one is running. Every rank calls it.
    ///
    /// # Errors
    ///
    /// Those of [`save`](Self::save).
    pub fn finish(&mut self) -> Result<(), Error> {
        let Some(pending) = self.pending.take() else { return Ok(()) };
        match pending.finish(&self.ranks) {
            Ok(()) => self.last_failure = None,
            Err(error) => {
                self.tolerate(error)?;
            }
        }
        Ok(())
    }

    /// Returns the newest complete checkpoint that rank 0 finds. Incomplete ones are skipped and
    /// logged as warnings. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`](crate::errors::CheckpointError::Io) where the root folder cannot be read.
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
