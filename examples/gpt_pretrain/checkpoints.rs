//! Checkpoints: when the run saves them, how many are kept, and which one it resumes from. The
//! arguments have fairseq's names.
//!
//! Three directories below `--save-dir` each have their own limit: `updates` has the checkpoints of
//! `--save-interval-updates`, `epochs` those of the ends of epochs, and `last` the one of the end of
//! the run, or of Ctrl-C.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use burn::optim::ModuleOptimizer;
use clap::Args;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Restore};
use fsdp_runtime::prelude::*;

use crate::common::checkpoints::{
    ResumeFrom, SaveArgs, finish, interrupted, is_checkpoint, newest, save, wait,
};
use crate::common::parse::positive;
use crate::model::Gpt;

/// fairseq's name of the newest checkpoint, the default of `--restore-file`.
const LAST: &str = "checkpoint_last.pt";
/// Directories below `--save-dir`.
const FOLDERS: [&str; 3] = ["updates", "epochs", "last"];

/// Arguments of checkpoints.
#[derive(Args, Clone, Debug, Default)]
pub struct CheckpointArgs {
    /// Directory to save checkpoints in: after every epoch, at the end and on Ctrl-C. A run resumes
    /// from the newest one there [default: none, so that nothing is saved]
    #[arg(long, value_name = "DIR")]
    pub save_dir: Option<PathBuf>,

    /// Number of updates between two checkpoints, besides those of epochs
    #[arg(long, value_name = "N", value_parser = positive, requires = "save_dir")]
    pub save_interval_updates: Option<usize>,

    /// Number of newest checkpoints of --save-interval-updates to keep [default: all]
    #[arg(long, value_name = "N", value_parser = positive, requires = "save_interval_updates")]
    pub keep_interval_updates: Option<usize>,

    /// Number of newest checkpoints of epochs to keep [default: all]
    #[arg(long, value_name = "N", value_parser = positive, requires = "save_dir")]
    pub keep_last_epochs: Option<usize>,

    /// Save no checkpoint after an epoch
    #[arg(long, requires = "save_dir")]
    pub no_epoch_checkpoints: bool,

    /// Save no checkpoints
    #[arg(long)]
    pub no_save: bool,

    /// Checkpoint to resume from, or a directory of checkpoints, of which the newest complete one is
    /// loaded; --world-size and --strategy may differ from the saved run's [default:
    /// checkpoint_last.pt, which stands for the newest one in --save-dir, if there is one]
    #[arg(long, value_name = "DIR")]
    pub restore_file: Option<PathBuf>,

    /// The same as --restore-file; `auto`: the newest complete checkpoint in --save-dir, or a new run
    /// if there is none, which is the default
    #[arg(long, value_name = "DIR|auto", conflicts_with = "restore_file")]
    #[arg(requires_if("auto", "save_dir"))]
    pub resume: Option<ResumeFrom>,

    #[command(flatten)]
    pub saves: SaveArgs,
}

/// State that training changes and a checkpoint saves.
pub struct TrainingState {
    /// Sharded model.
    pub model: Fsdp<Gpt>,
    /// Optimizer.
    pub optimizer: ModuleOptimizer,
    /// Loss scale, for training in float16.
    pub scaler: Option<GradScaler>,
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Number of updates, including those before the run was resumed.
    pub updates: usize,
    /// Number of overflows. Each is in place of an update, on every rank.
    pub skipped: usize,
    /// Current epoch, counted from 0.
    pub epoch: usize,
    /// Number of samples taken from the current epoch, over all ranks. A number of updates would not
    /// carry over to another number of ranks.
    pub samples: usize,
}

/// Saves the checkpoints of a run, on one rank.
pub struct Saver {
    updates: CheckpointManager,
    epochs: Option<CheckpointManager>,
    last: CheckpointManager,
    interval: Option<usize>,
    /// Whether a checkpoint is skipped while another is being written.
    skips_if_busy: bool,
    /// Number of updates at the last checkpoint.
    saved: Option<usize>,
}

/// Directory of a checkpoint to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Update,
    Epoch,
    Last,
}

impl CheckpointArgs {
    /// Returns whether the run saves checkpoints.
    pub fn saves(&self) -> bool {
        self.save_dir.is_some() && !self.no_save
    }

    /// Returns the checkpoint to resume from, if there is one. Every rank calls it.
    ///
    /// # Errors
    ///
    /// If `--restore-file` or `--resume` has no complete checkpoint, a directory cannot be read, or a peer fails.
    pub fn find(&self, worker: &Worker) -> Result<Option<PathBuf>> {
        let below = |root: &PathBuf| FOLDERS.map(|name| root.join(name)).to_vec();
        let (flag, named) = match &self.resume {
            Some(ResumeFrom::Folder(folder)) => ("--resume", Some(folder)),
            Some(ResumeFrom::Newest) => ("--resume", None),
            None => ("--restore-file", self.restore_file.as_ref()),
        };
        let Some(path) = named.filter(|path| path.as_os_str() != LAST) else {
            let Some(root) = &self.save_dir else { return Ok(None) };
            return newest(worker, &below(root));
        };
        if is_checkpoint(path) {
            return Ok(Some(path.clone()));
        }
        let folders = [vec![path.clone()], below(path)].concat();
        match newest(worker, &folders)? {
            Some(found) => Ok(Some(found)),
            None => bail!("{flag}: {} holds no complete checkpoint", path.display()),
        }
    }

    /// Returns what saves the checkpoints of the run, in the background; `None` if it saves none.
    pub fn saver(&self, worker: &Worker) -> Option<Saver> {
        let root = self.save_dir.as_ref().filter(|_| self.saves())?;
        let manager = |name: &str, keep| self.saves.manager(&root.join(name), keep, worker);
        let [updates, epochs, last] = FOLDERS;
        Some(Saver {
            updates: manager(updates, self.keep_interval_updates),
            epochs: (!self.no_epoch_checkpoints).then(|| manager(epochs, self.keep_last_epochs)),
            last: manager(last, Some(1)),
            interval: self.save_interval_updates,
            skips_if_busy: self.saves.skip_busy_saves,
            saved: None,
        })
    }
}

impl Saver {
    /// Tells that the run has resumed, so that its start is not saved again.
    pub fn resumed(&mut self, position: Position) {
        self.saved = Some(position.updates);
    }

    /// Saves a checkpoint if one is due: at the end of an epoch, after an interval of updates, or if
    /// Ctrl-C was pressed on any rank. Returns whether it was pressed. Every rank calls it after each
    /// update and each overflow.
    ///
    /// # Errors
    ///
    /// If this checkpoint or the previous one cannot be written.
    pub fn after_update(
        &mut self,
        worker: &Worker,
        position: Position,
        epoch_ended: bool,
        state: &TrainingState,
    ) -> Result<bool> {
        let is_new = self.saved != Some(position.updates);
        let interval =
            |every: usize| position.updates > 0 && position.updates.is_multiple_of(every);
        if epoch_ended && self.epochs.is_some() {
            self.save(worker, Kind::Epoch, position, state)?;
        } else if is_new && self.interval.is_some_and(interval) {
            self.save(worker, Kind::Update, position, state)?;
        }
        if !interrupted(worker)? {
            return Ok(false);
        }
        self.finish(worker, position, state)?;
        Ok(true)
    }

    /// Saves the end of the run, unless its last update is saved already, and waits until all
    /// checkpoints are on the disk.
    ///
    /// # Errors
    ///
    /// If a checkpoint cannot be written.
    pub fn finish(
        &mut self,
        worker: &Worker,
        position: Position,
        state: &TrainingState,
    ) -> Result<()> {
        self.wait(worker)?;
        if self.saved != Some(position.updates) {
            self.save(worker, Kind::Last, position, state)?;
            finish(&mut self.last)?;
        }
        Ok(())
    }

    fn save(
        &mut self,
        worker: &Worker,
        kind: Kind,
        position: Position,
        state: &TrainingState,
    ) -> Result<()> {
        if self.skips_if_busy && kind != Kind::Last && self.is_saving()? {
            if worker.is_rank_zero() {
                let updates = position.updates;
                eprintln!("update {updates} was not saved: the previous save still runs");
            }
            return Ok(());
        }
        // Two saves at once would take turns with the disk, and hold two copies of the state.
        self.wait(worker)?;
        let Position { updates, skipped, epoch, samples } = position;
        let checkpoint = Checkpoint::new(updates as u64)
            .with_data_position(epoch as u64, samples as u64)
            .with_model("gpt", &state.model)
            .with_optimizer("adamw", &state.optimizer)
            .with_value("skipped_updates", skipped as u64);
        let checkpoint = match &state.scaler {
            Some(scaler) => checkpoint.with_grad_scaler("loss_scale", scaler),
            None => checkpoint,
        };
        let manager = match kind {
            Kind::Update => &mut self.updates,
            Kind::Epoch => self.epochs.as_mut().unwrap_or(&mut self.last),
            Kind::Last => &mut self.last,
        };
        if save(manager, worker, &checkpoint)? {
            self.saved = Some(updates);
        }
        Ok(())
    }

    fn managers(&mut self) -> impl Iterator<Item = &mut CheckpointManager> {
        [&mut self.updates, &mut self.last].into_iter().chain(&mut self.epochs)
    }

    /// Returns whether a checkpoint is still being written on a rank.
    fn is_saving(&mut self) -> Result<bool> {
        for manager in self.managers() {
            if manager.is_saving()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits until all checkpoints are on the disk.
    fn wait(&mut self, worker: &Worker) -> Result<()> {
        let mut saved = true;
        for manager in self.managers() {
            saved &= wait(manager, worker)?;
        }
        if !saved {
            self.saved = None;
        }
        Ok(())
    }
}

/// Loads a checkpoint, and returns where the saved run was. Every rank calls it.
///
/// # Errors
///
/// If the checkpoint does not fit the model, or if a peer fails.
pub fn resume(worker: &Worker, folder: &PathBuf, state: &mut TrainingState) -> Result<Position> {
    let restore = Restore::new()
        .with_model("gpt", &mut state.model)
        .with_optimizer("adamw", &mut state.optimizer);
    let restore = match &mut state.scaler {
        Some(scaler) => restore.with_grad_scaler("loss_scale", scaler),
        None => restore,
    };
    let restored = restore
        .load(worker, folder)
        .with_context(|| format!("cannot resume from {}", folder.display()))?;
    let skipped = restored.values.get("skipped_updates").and_then(serde_json::Value::as_u64);
    let progress = restored.progress;
    Ok(Position {
        updates: usize::try_from(progress.step)?,
        skipped: usize::try_from(skipped.unwrap_or(0))?,
        epoch: usize::try_from(progress.epoch)?,
        samples: usize::try_from(progress.position)?,
    })
}
