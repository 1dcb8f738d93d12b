//! Checkpoints: when the run saves them, which one it resumes from, and what Ctrl-C does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::ModuleOptimizer;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Restore};
use fsdp_runtime::prelude::*;

use super::checkpoints::{
    ResumeFrom, SaveArgs, finish, interrupted, is_checkpoint, newest, save, wait,
};

/// Interval of checkpoints, and the checkpoint to resume from.
#[derive(Clone, Debug, Default)]
pub struct CheckpointPlan {
    /// Directory to save checkpoints in; `None` to save none.
    pub directory: Option<PathBuf>,
    /// Number of steps between two checkpoints. The end of a run is saved in any case.
    pub every: Option<usize>,
    /// Number of newest checkpoints to keep; `None` to keep all.
    pub keep_last: Option<usize>,
    /// Checkpoint to resume from, or a directory of checkpoints.
    pub resume: Option<ResumeFrom>,
    /// Saves that fail, and slow disks.
    pub saves: SaveArgs,
}

impl CheckpointPlan {
    /// Returns a plan that saves in `directory`. Without it, a run that resumes saves in the
    /// directory that holds the checkpoint it resumes from.
    pub fn new(directory: Option<PathBuf>, resume: Option<ResumeFrom>) -> Self {
        let beside = |folder: &PathBuf| match (is_checkpoint(folder), folder.canonicalize()) {
            (true, Ok(checkpoint)) => checkpoint.parent().map_or(checkpoint.clone(), PathBuf::from),
            _ => folder.clone(),
        };
        let directory = directory.or_else(|| match &resume {
            Some(ResumeFrom::Folder(folder)) => Some(beside(folder)),
            _ => None,
        });
        Self { directory, resume, ..Self::default() }
    }

    /// Returns the checkpoint to resume from; `None` for a run that begins. Every rank calls it.
    ///
    /// # Errors
    ///
    /// If the directory that `--resume` names has no complete checkpoint, or if a peer fails.
    pub fn find(&self, worker: &Worker) -> Result<Option<PathBuf>> {
        match (&self.resume, &self.directory) {
            (Some(ResumeFrom::Folder(folder)), _) if is_checkpoint(folder) => {
                Ok(Some(folder.clone()))
            }
            (Some(ResumeFrom::Folder(folder)), _) => {
                match newest(worker, std::slice::from_ref(folder))? {
                    Some(found) => Ok(Some(found)),
                    None => bail!("--resume: {} holds no complete checkpoint", folder.display()),
                }
            }
            (Some(ResumeFrom::Newest), Some(directory)) => {
                newest(worker, std::slice::from_ref(directory))
            }
            _ => Ok(None),
        }
    }
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Number of steps taken, including those before the run was resumed.
    pub step: usize,
    /// Current epoch, counted from 0.
    pub epoch: usize,
    /// Number of examples taken from the current epoch, over all ranks. A step count would not
    /// carry over to another number of ranks.
    pub examples: usize,
}

/// State that training changes and a checkpoint saves.
pub struct TrainingState<M> {
    /// Name of the model in a checkpoint.
    pub name: &'static str,
    /// Sharded model.
    pub model: Fsdp<M>,
    /// Optimizer.
    pub optimizer: ModuleOptimizer,
    /// Learning rate schedule.
    pub schedule: ModuleLrScheduler,
    /// Loss scale, for training in float16.
    pub scaler: Option<GradScaler>,
    /// Other numbers that the run goes on from, by name.
    pub values: BTreeMap<&'static str, f64>,
}

/// Saves the checkpoints of a run, on one rank.
pub struct Saver {
    manager: Option<CheckpointManager>,
    every: Option<usize>,
    /// Step of the last checkpoint.
    saved: Option<usize>,
}

impl Saver {
    /// Returns a saver that writes checkpoints in the background.
    pub fn new(plan: &CheckpointPlan, worker: &Worker) -> Self {
        let manager = |directory| plan.saves.manager(directory, plan.keep_last, worker);
        let manager = plan.directory.as_deref().map(manager);
        Self { manager, every: plan.every, saved: None }
    }

    /// Saves a checkpoint if one is due, or if Ctrl-C was pressed on any rank. Returns whether it
    /// was pressed. Every rank calls it after each step.
    ///
    /// # Errors
    ///
    /// If this checkpoint or the previous one cannot be written.
    pub fn after_step(
        &mut self,
        worker: &Worker,
        position: Position,
        state: &TrainingState<impl FsdpModule>,
    ) -> Result<bool> {
        if self.manager.is_none() {
            return Ok(false);
        }
        let interrupted = interrupted(worker)?;
        let due = self.every.is_some_and(|every| position.step.is_multiple_of(every));
        if due || interrupted {
            self.save(worker, position, state)?;
        }
        Ok(interrupted)
    }

    /// Saves the end of the run, unless its last step is saved already, and waits until all
    /// checkpoints are on the disk.
    ///
    /// # Errors
    ///
    /// If a checkpoint cannot be written.
    pub fn finish(
        &mut self,
        worker: &Worker,
        position: Position,
        state: &TrainingState<impl FsdpModule>,
    ) -> Result<()> {
        if let Some(manager) = &mut self.manager {
            // The save of the last step may have failed.
            if !wait(manager, worker)? {
                self.saved = None;
            }
        }
        if self.saved != Some(position.step) {
            self.save(worker, position, state)?;
        }
        self.manager.as_mut().map_or(Ok(()), finish)
    }

    fn save(
        &mut self,
        worker: &Worker,
        position: Position,
        state: &TrainingState<impl FsdpModule>,
    ) -> Result<()> {
        let Some(manager) = &mut self.manager else { return Ok(()) };
        let Position { step, epoch, examples } = position;
        let checkpoint = Checkpoint::new(step as u64)
            .with_data_position(epoch as u64, examples as u64)
            .with_model(state.name, &state.model)
            .with_optimizer("adamw", &state.optimizer)
            .with_scheduler("learning_rate", &state.schedule);
        let checkpoint = match &state.scaler {
            Some(scaler) => checkpoint.with_grad_scaler("loss_scale", scaler),
            None => checkpoint,
        };
        // As bits, which JSON keeps.
        let values = state.values.iter();
        let checkpoint = values.fold(checkpoint, |checkpoint, (name, value)| {
            checkpoint.with_value(*name, value.to_bits())
        });
        if save(manager, worker, &checkpoint)? {
            self.saved = Some(step);
        }
        Ok(())
    }
}

/// Loads a checkpoint, and returns where the saved run was.
///
/// # Errors
///
/// If the checkpoint does not fit the model, or if a peer fails.
pub fn resume(
    worker: &Worker,
    folder: &Path,
    state: &mut TrainingState<impl FsdpModule>,
) -> Result<Position> {
    let restore = Restore::new()
        .with_model(state.name, &mut state.model)
        .with_optimizer("adamw", &mut state.optimizer)
        .with_scheduler("learning_rate", &mut state.schedule);
    let restore = match &mut state.scaler {
        Some(scaler) => restore.with_grad_scaler("loss_scale", scaler),
        None => restore,
    };
    let restored = restore
        .load(worker, folder)
        .with_context(|| format!("cannot resume from {}", folder.display()))?;
    for (name, value) in &mut state.values {
        let bits = restored.values.get(*name).and_then(serde_json::Value::as_u64);
        *value = bits.map_or(*value, f64::from_bits);
    }
    let progress = restored.progress;
    Ok(Position {
        step: usize::try_from(progress.step)?,
        epoch: usize::try_from(progress.epoch)?,
        examples: usize::try_from(progress.position)?,
    })
}
