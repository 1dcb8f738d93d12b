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

use crate::common::checkpoints::{interrupted, is_checkpoint, newest};
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
    /// Number of updates at the last checkpoint.
    saved: Option<usize>,
}

/// Directory of a checkpoint to save.
#[derive(Clone, Copy, Debug)]
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
    /// If `--restore-file` has no complete checkpoint, a directory cannot be read, or a peer fails.
    pub fn find(&self, worker: &Worker) -> Result<Option<PathBuf>> {
        let below = |root: &PathBuf| FOLDERS.map(|name| root.join(name)).to_vec();
        let named = self.restore_file.as_ref().filter(|path| path.as_os_str() != LAST);
        let Some(path) = named else {
            let Some(root) = &self.save_dir else { return Ok(None) };
            return newest(worker, &below(root));
        };
        if is_checkpoint(path) {
            return Ok(Some(path.clone()));
        }
        let folders = [vec![path.clone()], below(path)].concat();
        match newest(worker, &folders)? {
            Some(found) => Ok(Some(found)),
            None => bail!("--restore-file: {} holds no complete checkpoint", path.display()),
        }
    }

    /// Returns what saves the checkpoints of the run, in the background; `None` if it saves none.
    pub fn saver(&self, worker: &Worker) -> Option<Saver> {
        let root = self.save_dir.as_ref().filter(|_| self.saves())?;
        let manager = |name: &str, keep: Option<usize>| {
            let manager = CheckpointManager::new(root.join(name), worker).with_background(true);
            match keep {
                Some(count) => manager.with_keep_last(count),
                None => manager,
            }
        };
        let [updates, epochs, last] = FOLDERS;
        Some(Saver {
            updates: manager(updates, self.keep_interval_updates),
            epochs: (!self.no_epoch_checkpoints).then(|| manager(epochs, self.keep_last_epochs)),
            last: manager(last, Some(1)),
            interval: self.save_interval_updates,
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
            self.save(Kind::Epoch, position, state)?;
        } else if is_new && self.interval.is_some_and(interval) {
            self.save(Kind::Update, position, state)?;
        }
        if !interrupted(worker)? {
            return Ok(false);
        }
        self.finish(position, state)?;
        Ok(true)
    }

    /// Saves the end of the run, unless its last update is saved already, and waits until all
    /// checkpoints are on the disk.
    ///
    /// # Errors
    ///
    /// If a checkpoint cannot be written.
    pub fn finish(&mut self, position: Position, state: &TrainingState) -> Result<()> {
        if self.saved != Some(position.updates) {
            self.save(Kind::Last, position, state)?;
        }
        self.wait()
    }

    fn save(&mut self, kind: Kind, position: Position, state: &TrainingState) -> Result<()> {
        // Two saves at once would take turns with the disk, and hold two copies of the state.
        self.wait()?;
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
        manager.save(&checkpoint).context("cannot save")?;
        self.saved = Some(updates);
        Ok(())
    }

    /// Waits until all checkpoints are on the disk.
    fn wait(&mut self) -> Result<()> {
        for manager in [&mut self.updates, &mut self.last].into_iter().chain(&mut self.epochs) {
            manager.finish().context("cannot save")?;
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
