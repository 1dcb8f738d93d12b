//! Checkpoints of a training run of Burn's `Learner`.

use std::path::PathBuf;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::train::TrainStep;

use super::position::Position;
use crate::checkpoint::{Checkpoint, CheckpointManager, Restore};
use crate::error::{Error, LearnerError};
use crate::fully_shard::Fsdp;
use crate::launch::Worker;
use crate::module::FsdpModule;
use crate::optim::WholeParam;

/// Names of the model and of the optimizer in checkpoints.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";

/// How the optimizer steps a sharded model.
pub(super) enum Stepper {
    /// On shards.
    Shards(ModuleOptimizer),
    /// On full matrices.
    WholeParams(WholeParam),
}

impl Stepper {
    /// Updates the model. Every rank calls it.
    pub(super) fn step<M: FsdpModule + TrainStep + 'static>(
        &mut self,
        lr: ModuleLearningRate,
        model: Fsdp<M>,
        gradients: GradientsParams,
    ) -> Result<Fsdp<M>, Error> {
        match self {
            Self::Shards(optimizer) => Ok(model.optimize(optimizer, lr, gradients)),
            Self::WholeParams(optimizer) => optimizer.step(lr, model, gradients),
        }
    }
}

/// Where a run is to resume from.
#[derive(Clone, Debug, Default)]
pub(super) enum Resume {
    /// From nothing: a new run.
    #[default]
    Never,
    /// From the newest checkpoint of the run, if there is one.
    Latest,
    /// From the checkpoint in a folder.
    Folder(PathBuf),
}

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// Number of optimizer steps.
    pub(super) steps: u64,
    /// Number of completed epochs.
    pub(super) epoch: u64,
    /// Number of items of all ranks that the next epoch has used.
    pub(super) items: u64,
}

impl Progress {
    /// Returns where a rank's loader starts. If the run had another number of ranks, up to `world - 1`
    /// items may be used again.
    pub(super) fn position(self, world: usize) -> Position {
        let own = self.items / world as u64;
        if own * world as u64 != self.items {
            tracing::warn!(
                target: "fsdp",
                "the checkpoint's position, {} items, is not a multiple of {world} ranks: up to {} \
                 items are used twice",
                self.items,
                world - 1
            );
        }
        Position { epoch: self.epoch, items: own as usize }
    }
}

/// Saves a checkpoint. Every rank calls it.
pub(super) fn save<M: FsdpModule>(
    manager: &mut CheckpointManager,
    progress: Progress,
    model: &Fsdp<M>,
    stepper: &Stepper,
) -> Result<(), Error> {
    let checkpoint = Checkpoint::new(progress.steps)
        .with_data_position(progress.epoch, progress.items)
        .with_model(MODEL, model);
    let checkpoint = match stepper {
        Stepper::Shards(optimizer) => checkpoint.with_optimizer(OPTIMIZER, optimizer),
        Stepper::WholeParams(optimizer) => checkpoint.with_whole_optimizer(OPTIMIZER, optimizer),
    };
    manager.save(&checkpoint).map(drop)
}

/// Loads the checkpoint to resume from, if there is one. Every rank calls it.
pub(super) fn restore<M: FsdpModule>(
    resume: &Resume,
    manager: Option<&CheckpointManager>,
    worker: &Worker,
    model: &mut Fsdp<M>,
    stepper: &mut Stepper,
) -> Result<Progress, Error> {
    let folder = match (resume, manager) {
        (Resume::Never, _) => None,
        (Resume::Folder(folder), _) => Some(folder.clone()),
        (Resume::Latest, Some(manager)) => manager.latest()?,
        (Resume::Latest, None) => return Err(LearnerError::NoCheckpoints.into()),
    };
    let Some(folder) = folder else { return Ok(Progress::default()) };
    let restore = Restore::new().with_model(MODEL, model);
    let restore = match stepper {
        Stepper::Shards(optimizer) => restore.with_optimizer(OPTIMIZER, optimizer),
        Stepper::WholeParams(optimizer) => restore.with_whole_optimizer(OPTIMIZER, optimizer),
    };
    let saved = restore.load(worker, folder)?.progress;
    Ok(Progress { steps: saved.step, epoch: saved.epoch, items: saved.position })
}
