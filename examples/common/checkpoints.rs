//! Checkpoints of a run: Ctrl-C that all ranks agree on, and the newest checkpoint of a directory.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use fsdp_runtime::checkpoint::{CheckpointManager, MANIFEST};
use fsdp_runtime::prelude::*;
use serde::Serialize;

use super::args::OutputArgs;
use super::report::print_summary;

/// Exit code of a program that Ctrl-C ended, by the convention of shells.
const INTERRUPTED: i32 = 130;

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
