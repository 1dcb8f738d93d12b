//! Checkpoints of a training run of Burn's `Learner`.

use std::path::PathBuf;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::train::TrainStep;

use super::position::{DataOrder, Position};
use crate::checkpoint::{Checkpoint, CheckpointManager, Progress, Restore};
use crate::error::{Error, LearnerError};
use crate::fully_shard::Fsdp;
use crate::launch::Worker;
use crate::module::FsdpModule;
use crate::optim::WholeParam;

/// Names of the model and of the optimizer in checkpoints.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";
/// Name of the [`DataOrder`] that the position in the data refers to.
const DATA_ORDER: &str = "data_order";

/// Optimizer of a sharded model, with the parameters that it steps.
pub(super) enum Stepper {
    /// Steps shards.
    Shards(ModuleOptimizer),
    /// Steps full matrices, each on one rank.
    WholeParams(WholeParam),
}

impl Stepper {
    /// Updates the model with one optimizer step. Every rank calls it.
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

/// Checkpoint that a run resumes from.
#[derive(Clone, Debug, Default)]
pub(super) enum Resume {
    /// No checkpoint: a new run.
    #[default]
    Never,
    /// The newest checkpoint of the run, if there is one.
    Latest,
    /// The checkpoint in a folder.
    Folder(PathBuf),
}

/// Returns where a rank's loader starts. If the run had another number of ranks, up to `world - 1`
/// items may be used again.
///
/// The position of a run's [`Progress`] is the number of items of all ranks that the epoch has
/// used.
pub(super) fn start(progress: Progress, world: usize) -> Position {
    let (items, world) = (progress.position, world as u64);
    if !items.is_multiple_of(world) {
        tracing::warn!(
            target: "fsdp",
            "the checkpoint's position, {items} items, is not a multiple of {world} ranks: up to {} \
             items are used twice",
            world - 1
        );
    }
    Position { epoch: progress.epoch, items: (items / world) as usize, trains: true }
}

/// Saves a checkpoint. Every rank calls it.
pub(super) fn save<M: FsdpModule>(
    manager: &mut CheckpointManager,
    Resumed { progress, order }: Resumed,
    model: &Fsdp<M>,
    stepper: &Stepper,
) -> Result<(), Error> {
    let checkpoint = Checkpoint::new(progress.step)
        .with_data_position(progress.epoch, progress.position)
        .with_model(MODEL, model);
    let checkpoint = match stepper {
        Stepper::Shards(optimizer) => checkpoint.with_optimizer(OPTIMIZER, optimizer),
        Stepper::WholeParams(optimizer) => checkpoint.with_whole_optimizer(OPTIMIZER, optimizer),
    };
    let order = order.and_then(|order| serde_json::to_value(order).ok());
    let checkpoint = match order {
        Some(order) => checkpoint.with_value(DATA_ORDER, order),
        None => checkpoint,
    };
    manager.save(&checkpoint).map(drop)
}

/// State of a run beside its model and optimizer, as a checkpoint has it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Resumed {
    pub(super) progress: Progress,
    /// `None` if the training loader is no [`RankLoader`](super::RankLoader).
    pub(super) order: Option<DataOrder>,
}

/// Loads the checkpoint to resume from, if there is one. Every rank calls it.
pub(super) fn restore<M: FsdpModule>(
    resume: &Resume,
    manager: Option<&CheckpointManager>,
    worker: &Worker,
    model: &mut Fsdp<M>,
    stepper: &mut Stepper,
) -> Result<Resumed, Error> {
    let folder = match (resume, manager) {
        (Resume::Never, _) => None,
        (Resume::Folder(folder), _) => Some(folder.clone()),
        (Resume::Latest, Some(manager)) => manager.latest()?,
        (Resume::Latest, None) => return Err(LearnerError::NoCheckpoints.into()),
    };
    let Some(folder) = folder else { return Ok(Resumed::default()) };
    let restore = Restore::new().with_model(MODEL, model);
    let restore = match stepper {
        Stepper::Shards(optimizer) => restore.with_optimizer(OPTIMIZER, optimizer),
        Stepper::WholeParams(optimizer) => restore.with_whole_optimizer(OPTIMIZER, optimizer),
    };
    let restored = restore.load(worker, folder)?;
    let order = restored.values.get(DATA_ORDER);
    let order = order.and_then(|order| serde_json::from_value(order.clone()).ok());
    Ok(Resumed { progress: restored.progress, order })
}
