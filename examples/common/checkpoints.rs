//! Checkpoints of a run: Ctrl-C that all ranks agree on, and the newest checkpoint of a directory.

use std::convert::Infallible;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use fsdp_runtime::checkpoint::{
    Checkpoint, CheckpointManager, MANIFEST, OnSaveError, SaveOutcome, WhenBusy,
};
use fsdp_runtime::prelude::*;
use serde::Serialize;

use super::args::OutputArgs;
use super::report::print_summary;

/// Exit code of a program that Ctrl-C ended, by the convention of shells.
const INTERRUPTED: i32 = 130;

/// The checkpoint that a run resumes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResumeFrom {
    /// The newest complete checkpoint of the run itself, if there is one: `auto`.
    Newest,
    /// A checkpoint, or a directory of checkpoints.
    Folder(PathBuf),
}

impl FromStr for ResumeFrom {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(if text == "auto" { Self::Newest } else { Self::Folder(text.into()) })
    }
}

/// Result of the ranks of this process, which Ctrl-C may have ended early. `S` is the summary of the
/// run.
pub enum Outcome<S> {
    /// The run is complete, and this process runs rank 0.
    Finished(Box<S>),
    /// The run is complete, and another process runs rank 0.
    FinishedElsewhere,
    /// Ctrl-C ended the run.
    Interrupted,
}

impl<S: Display + Serialize> Outcome<S> {
    /// Prints the summary where rank 0 runs. Exits with 130 after Ctrl-C.
    ///
    /// # Errors
    ///
    /// If the summary cannot be serialized.
    pub fn report(self, output: OutputArgs) -> Result<()> {
        match self {
            Self::Finished(summary) => print_summary(&*summary, output),
            Self::FinishedElsewhere => Ok(()),
            Self::Interrupted => std::process::exit(INTERRUPTED),
        }
    }
}

/// Arguments of saves that fail and of slow disks.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct SaveArgs {
    /// What a failed save does, such as one on a full disk: `fail` ends the run, `warn` prints a
    /// warning and goes on, with the checkpoints there are. The save of the end of a run must succeed
    #[arg(long, value_name = "fail|warn", value_enum, default_value_t)]
    pub on_save_error: SaveErrors,

    /// Skip a checkpoint that is due while the previous one is still being written, in place of
    /// waiting for a slow disk
    #[arg(long)]
    pub skip_busy_saves: bool,
}

/// What a failed save does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SaveErrors {
    /// It ends the run.
    #[default]
    Fail,
    /// It is a warning.
    Warn,
}

impl SaveArgs {
    /// Returns the manager of the checkpoints in a directory, which saves in the background.
    pub fn manager(
        self,
        directory: &Path,
        keep: Option<usize>,
        worker: &Worker,
    ) -> CheckpointManager {
        let on_error = match self.on_save_error {
            SaveErrors::Fail => OnSaveError::Fail,
            SaveErrors::Warn => OnSaveError::Warn,
        };
        let when_busy = if self.skip_busy_saves { WhenBusy::Skip } else { WhenBusy::Wait };
        let manager = CheckpointManager::new(directory, worker)
            .with_background(true)
            .with_on_save_error(on_error)
            .with_when_busy(when_busy);
        match keep {
            Some(count) => manager.with_keep_last(count),
            None => manager,
        }
    }
}

/// Saves a checkpoint in the background. Returns whether the save was begun. Rank 0 prints a warning
/// about this save and the previous one, if it has failed or was skipped. Every rank calls it.
///
/// # Errors
///
/// If this checkpoint or the previous one cannot be written, unless this is a warning.
pub fn save(
    manager: &mut CheckpointManager,
    worker: &Worker,
    checkpoint: &Checkpoint<'_>,
) -> Result<bool> {
    let failed = manager.failed_saves();
    let saved = manager.save(checkpoint).context("cannot save")?;
    warn_of_failure(manager, worker, failed);
    if saved.outcome == SaveOutcome::Skipped && worker.is_rank_zero() {
        let folder = saved.folder.display();
        eprintln!("{folder} was not saved: the previous save still runs");
    }
    Ok(saved.outcome == SaveOutcome::Started)
}

/// Waits until the last checkpoint is on the disk. Returns whether it is. Rank 0 prints a warning if
/// the save has failed. Every rank calls it.
///
/// # Errors
///
/// If the checkpoint cannot be written, unless this is a warning.
pub fn wait(manager: &mut CheckpointManager, worker: &Worker) -> Result<bool> {
    let failed = manager.failed_saves();
    manager.finish().context("cannot save")?;
    warn_of_failure(manager, worker, failed);
    Ok(manager.last_failure().is_none())
}

/// Prints a warning on rank 0 if a save has failed since there were `before` such saves.
fn warn_of_failure(manager: &CheckpointManager, worker: &Worker, before: usize) {
    let reason = manager.last_failure().filter(|_| manager.failed_saves() > before);
    if let Some(reason) = reason.filter(|_| worker.is_rank_zero()) {
        eprintln!("a checkpoint was not saved: {reason}");
    }
}

/// Waits until the last checkpoint is on the disk. Every rank calls it.
///
/// # Errors
///
/// If it cannot be written, also where a failed save is a warning: nothing follows that could save
/// the end of the run.
pub fn finish(manager: &mut CheckpointManager) -> Result<()> {
    manager.finish().context("cannot save")?;
    match manager.last_failure() {
        Some(reason) => bail!("cannot save: {reason}"),
        None => Ok(()),
    }
}

static PRESSED: AtomicBool = AtomicBool::new(false);

/// Makes Ctrl-C ask the run to save a checkpoint and end. A second Ctrl-C ends the process at once.
///
/// # Errors
///
/// If the system refuses a signal handler.
pub fn handle_interrupts() -> Result<()> {
    let handle = || {
        if PRESSED.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED);
        }
        eprintln!("saving a checkpoint, then ending; Ctrl-C again ends at once");
    };
    ctrlc::set_handler(handle).context("cannot handle Ctrl-C")
}

/// Returns whether Ctrl-C was pressed on any rank. Every rank calls it, and gets the same answer.
///
/// # Errors
///
/// If a peer fails.
pub fn interrupted(worker: &Worker) -> Result<bool> {
    let mut pressed = [f64::from(u8::from(PRESSED.load(Ordering::Relaxed)))];
    worker.all_reduce_sum(&mut pressed)?;
    Ok(pressed[0] > 0.0)
}

/// Returns whether a directory is a checkpoint, and not a directory of checkpoints.
pub fn is_checkpoint(folder: &Path) -> bool {
    folder.join(MANIFEST).is_file()
}

/// Returns the complete checkpoint of the highest step in directories of checkpoints, as rank 0 sees
/// them. Every rank calls it.
///
/// # Errors
///
/// If a directory cannot be read, or if a peer fails.
pub fn newest(worker: &Worker, folders: &[PathBuf]) -> Result<Option<PathBuf>> {
    let mut newest: Option<PathBuf> = None;
    for folder in folders {
        let found = CheckpointManager::new(folder, worker).latest()?;
        // The names end in the step, with leading zeros.
        let later = |found: &PathBuf| {
            newest.as_ref().is_none_or(|newest| found.file_name() > newest.file_name())
        };
        newest = found.filter(later).or(newest);
    }
    Ok(newest)
}
