//! When the run saves, from where it resumes, and what Ctrl-C does.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::ModuleOptimizer;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Restore};
use fsdp_runtime::prelude::*;

use crate::model::BertForSequenceClassification;

/// What the flags say of checkpoints.
#[derive(Clone, Debug, Default)]
pub struct SavePlan {
    /// Where to save.
    pub directory: Option<PathBuf>,
    /// Steps between two saves; the end of a run is always saved.
    pub every: Option<usize>,
    /// How many checkpoints to keep.
    pub keep_last: Option<usize>,
    /// Where to resume from: a folder of checkpoints, or one of them.
    pub resume: Option<PathBuf>,
}

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Steps taken, over all processes.
    pub step: usize,
    /// The epoch under way.
    pub epoch: usize,
    /// Examples taken of it, over all ranks: the same whatever the number of ranks.
    pub examples: usize,
}

/// What is saved and resumed.
pub struct Training<'a> {
    /// The model.
    pub model: &'a mut Fsdp<BertForSequenceClassification>,
    /// Its optimizer.
    pub optimizer: &'a mut ModuleOptimizer,
    /// Its learning rate.
    pub schedule: &'a mut ModuleLrScheduler,
}

/// The checkpoints of a run, on one rank.
pub struct Saver {
    manager: Option<CheckpointManager>,
    every: Option<usize>,
    saved: Option<usize>,
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on, Ctrl-C asks the run to save and end; a second one ends it at once.
///
/// # Errors
///
/// If the system does not let the program handle it.
pub fn handle_interrupts() -> Result<()> {
    let handle = || {
        if INTERRUPTED.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("saving, then ending; Ctrl-C again ends at once");
    };
    ctrlc::set_handler(handle).context("cannot handle Ctrl-C")
}

impl Saver {
    /// A saver as the flags say. Saves run beside the training.
    pub fn new(plan: &SavePlan, worker: &Worker) -> Self {
        let manager = plan.directory.as_ref().map(|directory| {
            let manager = CheckpointManager::new(directory, worker).background(true);
            match plan.keep_last {
                Some(count) => manager.keep_last(count),
                None => manager,
            }
        });
        Self { manager, every: plan.every, saved: None }
    }

    /// Saves if it is time to, or if Ctrl-C was pressed on any rank; says whether it was.
    ///
    /// # Errors
    ///
    /// If the checkpoint, or the one before it, cannot be written.
    pub fn after_step(
        &mut self,
        worker: &Worker,
        position: Position,
        training: &Training<'_>,
    ) -> Result<bool> {
        if self.manager.is_none() {
            return Ok(false);
        }
        let mut interrupted = [f64::from(u8::from(INTERRUPTED.load(Ordering::Relaxed)))];
        worker.all_reduce_sum(&mut interrupted)?;
        let interrupted = interrupted[0] > 0.0;
        let due = self.every.is_some_and(|every| position.step.is_multiple_of(every));
        if due || interrupted {
            self.save(position, training)?;
        }
        Ok(interrupted)
    }

    /// Saves the end of the run, and waits until it is on the disk.
    ///
    /// # Errors
    ///
    /// As [`after_step`](Self::after_step).
    pub fn finish(&mut self, position: Position, training: &Training<'_>) -> Result<()> {
        if self.saved != Some(position.step) {
            self.save(position, training)?;
        }
        match &mut self.manager {
            Some(manager) => manager.finish().context("cannot save"),
            None => Ok(()),
        }
    }

    fn save(&mut self, position: Position, training: &Training<'_>) -> Result<()> {
        let Some(manager) = &mut self.manager else { return Ok(()) };
        let Position { step, epoch, examples } = position;
        let checkpoint = Checkpoint::new(step as u64)
            .data(epoch as u64, examples as u64)
            .model("bert", training.model)
            .optimizer("adamw", training.optimizer)
            .scheduler("learning_rate", training.schedule);
        manager.save(&checkpoint).context("cannot save")?;
        self.saved = Some(step);
        Ok(())
    }
}

/// Goes on where the newest complete checkpoint in a folder was saved.
///
/// # Errors
///
/// If there is none, or it does not fit the model.
pub fn resume(worker: &Worker, folder: &Path, training: Training<'_>) -> Result<Position> {
    let folder = match folder.join(fsdp_runtime::checkpoint::MANIFEST).is_file() {
        true => folder.to_path_buf(),
        false => match CheckpointManager::new(folder, worker).latest()? {
            Some(folder) => folder,
            None => bail!("--resume: {} holds no complete checkpoint", folder.display()),
        },
    };
    let restored = Restore::new()
        .model("bert", training.model)
        .optimizer("adamw", training.optimizer)
        .scheduler("learning_rate", training.schedule)
        .load(worker, &folder)
        .with_context(|| format!("cannot resume from {}", folder.display()))?;
    let progress = restored.progress;
    Ok(Position {
        step: usize::try_from(progress.step)?,
        epoch: usize::try_from(progress.epoch)?,
        examples: usize::try_from(progress.position)?,
    })
}
