//! Training that stops, saves a checkpoint, and resumes from it in a new launch.

use std::path::{Path, PathBuf};

use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, Restore};
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use super::{Net, batch, loss, of_rank_0};

/// Rows of a global batch. Every world size of the tests divides it.
pub const ROWS: usize = 12;
/// Blocks of the model.
pub const BLOCKS: usize = 2;

/// A part of a training run, in a launch of its own.
#[derive(Clone, Debug)]
pub struct Part {
    /// Number of ranks.
    pub world: usize,
    /// Probability.
    pub dropout: f64,
    pub options: FsdpOptions,
    pub optimizer: fn() -> ModuleOptimizer,
    /// The checkpoint to resume from.
    pub from: Option<PathBuf>,
    /// The step before which this part ends.
    pub until: usize,
    /// Where to save a checkpoint at the end.
    pub save: Option<PathBuf>,
}

impl Part {
    pub fn new(world: usize) -> Self {
        let options = FsdpOptions::new().with_seed(7);
        Self { world, dropout: 0.0, options, optimizer, from: None, until: 10, save: None }
    }

    pub fn until(self, until: usize) -> Self {
        Self { until, ..self }
    }

    pub fn dropout(self, dropout: f64) -> Self {
        Self { dropout, ..self }
    }

    pub fn options(self, options: FsdpOptions) -> Self {
        Self { options, ..self }
    }

    pub fn optimizer(self, optimizer: fn() -> ModuleOptimizer) -> Self {
        Self { optimizer, ..self }
    }

    pub fn with_strategy(self, strategy: ShardingStrategy) -> Self {
        let options = self.options.clone().with_strategy(strategy);
        Self { options, ..self }
    }

    pub fn from(self, folder: &Path) -> Self {
        Self { from: Some(folder.into()), ..self }
    }

    pub fn save(self, folder: &Path) -> Self {
        Self { save: Some(folder.into()), ..self }
    }

    /// Runs all ranks. Returns the mean loss over ranks of each step, and the full parameters at
    /// the end.
    #[track_caller]
    pub fn launch(&self) -> (Vec<f64>, FullState) {
        let part = self.clone();
        of_rank_0(self.world, move |worker| part.rank(worker))
    }

    fn rank(&self, worker: &Worker) -> Result<(Vec<f64>, FullState), Error> {
        // A resumed part starts from other weights, all of which the checkpoint must replace.
        let seed = if self.from.is_some() { 99 } else { 7 };
        let mut net = sharded(worker, self.dropout, self.options.clone().with_seed(seed))?;
        let mut optimizer = (self.optimizer)();
        let mut schedule = schedule();
        let mut step = 0;
        if let Some(folder) = &self.from {
            let restored = Restore::new()
                .with_model("net", &mut net)
                .with_optimizer("adamw", &mut optimizer)
                .with_scheduler("rate", &mut schedule)
                .load(worker, folder)?;
            step = restored.progress.step as usize;
        }
        let mut losses = Vec::new();
        while step < self.until {
            losses.push(train_step(worker, &mut net, &mut optimizer, &mut schedule, step)?);
            step += 1;
        }
        if let Some(folder) = &self.save {
            Checkpoint::new(step as u64)
                .with_model("net", &net)
                .with_optimizer("adamw", &optimizer)
                .with_scheduler("rate", &schedule)
                .save(worker, folder)?;
        }
        Ok((losses, net.state().full(Recipient::All)?))
    }
}

/// Trains `first`, saves, and resumes as `second`. Returns the losses of both and the last
/// parameters.
#[track_caller]
pub fn resumed(first: Part, second: Part) -> (Vec<f64>, FullState) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("checkpoint");
    let (mut losses, _) = first.save(&folder).launch();
    let (rest, state) = second.from(&folder).launch();
    losses.extend(rest);
    (losses, state)
}

pub fn sharded(worker: &Worker, dropout: f64, options: FsdpOptions) -> Result<Fsdp<Net>, Error> {
    fully_shard(Net::new(BLOCKS, dropout, worker.device()), worker, options)
}

pub fn optimizer() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.01).init()
}

pub fn schedule() -> ModuleLrScheduler {
    LinearLrSchedulerConfig::new(1e-3, 1e-4, 30).init().expect("a sound schedule")
}

/// Takes one step on the rank's rows of the global batch. Returns the mean loss over ranks.
pub fn train_step(
    worker: &Worker,
    net: &mut Fsdp<Net>,
    optimizer: &mut ModuleOptimizer,
    schedule: &mut ModuleLrScheduler,
    step: usize,
) -> Result<f64, Error> {
    let (rank, world) = (worker.rank().index(), worker.world().size());
    let rows = ROWS / world;
    let (tokens, labels) = batch(step, rank * rows..(rank + 1) * rows, worker.device());
    let loss = loss(net.forward(tokens), labels);
    let mut value = [f64::from(loss.clone().into_scalar::<f32>())];
    let mut grads = net.backward(loss)?;
    net.clip_grad_norm(&mut grads, 1.0)?;
    *net = optimizer.step(schedule.step(), net.clone(), grads);
    worker.all_reduce_sum(&mut value)?;
    Ok(value[0] / world as f64)
}
