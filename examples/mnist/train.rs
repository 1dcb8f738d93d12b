//! Train and test loops of one rank, step by step as in PyTorch's tutorial.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use burn::lr_scheduler::step::StepLrSchedulerConfig;
use burn::optim::ModuleOptimizer;
use fsdp_runtime::Mesh;
use fsdp_runtime::memory::{MemoryForecast, MemoryTimeline};
use fsdp_runtime::optim::AdadeltaConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::SavePretrained;

use crate::cli::Cli;
use crate::common::training::read_loss;
use crate::data::{Batch, Digits};
use crate::model::{Net, nll_loss_sum};
use crate::sampler::DistributedSampler;
use crate::sharding::Sharding;
use crate::summary::{Peaks, Summary};

/// Number of f32 tensors of a parameter's shape that Adadelta keeps for it.
const ADADELTA_AVERAGES: usize = 2;
/// Number of training steps in a picture of memory over time.
const PICTURED_STEPS: usize = 4;
/// Maximum number of changes of memory that are recorded for a picture.
const MAX_SAMPLES: usize = 10_000;

/// Inputs of a run, the same on every rank.
#[derive(Clone, Debug)]
pub struct Job {
    /// Digits to train on.
    pub train: Digits,
    /// Digits to test on.
    pub test: Digits,
    /// Distribution of the model over ranks.
    pub sharding: Sharding,
    /// Digits in a training batch, per rank.
    pub batch_size: usize,
    /// Digits in a test batch, per rank.
    pub test_batch_size: usize,
    /// Number of passes over the training digits.
    pub epochs: usize,
    /// Learning rate in the first epoch.
    pub lr: f64,
    /// Factor of the learning rate from one epoch to the next.
    pub gamma: f64,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Directory to write the trained model to.
    pub save_to: Option<PathBuf>,
    /// Whether to record memory over time in the first steps.
    pub pictured: bool,
    /// Whether to print no progress.
    pub quiet: bool,
}

impl Job {
    /// Reads the digits. `sharding` replaces what the arguments say about it.
    ///
    /// # Errors
    ///
    /// If the embedded digits are damaged.
    pub fn new(cli: &Cli, sharding: Sharding) -> Result<Self> {
        let (train, test) = Digits::embedded()?;
        Ok(Self {
            train,
            test,
            sharding,
            batch_size: cli.batch_size,
            test_batch_size: cli.test_batch_size,
            epochs: cli.epochs(),
            lr: cli.lr,
            gamma: cli.gamma,
            seed: cli.seed,
            save_to: cli.save_model.then(|| cli.out.clone()),
            pictured: cli.compare,
            quiet: cli.output.quiet,
        })
    }
}

/// Shards the model, trains and tests it, and saves it if asked to: the tutorial's function of the
/// same name. Every rank calls it within [`launch`].
///
/// # Errors
///
/// If a loss is not finite, the model cannot be written, or a peer fails.
pub fn fsdp_main(job: &Job, worker: &Worker) -> Result<Summary> {
    let options = job.sharding.options(job.seed);
    let net = Net::new(worker.device());
    let mesh = Mesh::new(worker.rank(), worker.world());
    let forecast = MemoryForecast::new(&net, mesh, &options)?.with_optimizer(ADADELTA_AVERAGES);
    let model = fully_shard(net, worker, options)?;
    if job.pictured {
        model.stats().start_memory_timeline(MAX_SAMPLES);
    }
    let optimizer = AdadeltaConfig::new().init();
    let scheduler = StepLrSchedulerConfig::new(job.lr, 1).with_gamma(job.gamma).init();
    let mut scheduler = scheduler.map_err(|error| anyhow!("learning rate schedule: {error}"))?;
    let mut trainer = Trainer { job, worker, model, optimizer, steps: 0, timeline: None };

    let begin = Instant::now();
    let (mut train_loss, mut scores) = (0.0, Scores::default());
    for epoch in 1..=job.epochs {
        (trainer, train_loss) = trainer.train(scheduler.step().base(), epoch)?;
        scores = trainer.test()?;
    }
    let seconds = begin.elapsed().as_secs_f64();

    let model = &trainer.model;
    if let Some(folder) = &job.save_to {
        model.state().save_pretrained(folder, &SavePretrained::new())?;
    }
    let stats = model.stats();
    Ok(Summary {
        world_size: worker.world().size(),
        strategy: job.sharding.strategy.to_string(),
        units: stats.wrapping().units.len(),
        num_params: stats.num_params(),
        epochs: job.epochs,
        seconds,
        train_loss,
        test_loss: scores.loss,
        accuracy: scores.accuracy,
        memory: Peaks::new(stats.memory(), stats.host_memory()),
        forecast,
        wrapped: model.to_string(),
        timeline: trainer.timeline.clone().or_else(|| stats.stop_memory_timeline()),
    })
}

/// Result of a test.
#[derive(Clone, Copy, Debug, Default)]
struct Scores {
    /// Mean negative log-likelihood.
    loss: f64,
    /// Fraction of the digits that are classified correctly.
    accuracy: f64,
}

/// One rank's part of a run.
struct Trainer<'a> {
    job: &'a Job,
    worker: &'a Worker,
    model: Fsdp<Net>,
    optimizer: ModuleOptimizer,
    /// Number of steps taken.
    steps: usize,
    /// Memory over time in the first steps.
    timeline: Option<MemoryTimeline>,
}

impl Trainer<'_> {
    /// Trains on this rank's part of the digits. Returns the mean loss over all ranks.
    ///
    /// The trainer is passed by value because Burn's optimizers take the model by value.
    fn train(mut self, lr: f64, epoch: usize) -> Result<(Self, f64)> {
        let Job { train, batch_size, seed, .. } = self.job;
        let share = self.sampler(train).shuffled(*seed, epoch);
        let mut ddp_loss = [0.0, 0.0];
        for indices in share.indices.chunks(*batch_size) {
            let digits = indices.iter().map(|index| &train.as_slice()[*index]);
            let batch = Batch::new(digits, self.worker.device());
            let output = self.model.forward(batch.images);
            let loss = nll_loss_sum(output, batch.targets);
            let value = loss.clone().inner();
            let gradients = self.model.backward(loss)?;
            self.model = self.optimizer.step(lr, self.model, gradients);
            ddp_loss[0] += read_loss(value)?;
            ddp_loss[1] += indices.len() as f64;
            self.steps += 1;
            self.record_memory()?;
        }
        self.worker.all_reduce_sum(&mut ddp_loss)?;
        let loss = ddp_loss[0] / ddp_loss[1];
        ensure!(loss.is_finite(), "the loss of epoch {epoch} is {loss}; a lower --lr may help");
        self.say(format_args!("Train Epoch: {epoch}\tLoss: {loss:.6}"));
        Ok((self, loss))
    }

    /// Tests the model on this rank's part of the digits. Returns the scores over all ranks.
    fn test(&self) -> Result<Scores> {
        let Job { test, test_batch_size, .. } = self.job;
        let model = self.model.valid();
        let device = self.worker.device().clone().inner();
        let share = self.sampler(test).in_order();
        // Sum of the losses, correct answers, and digits.
        let mut ddp_loss = [0.0, 0.0, 0.0];
        let mut counted = share.counted;
        for indices in share.indices.chunks(*test_batch_size) {
            // Every rank runs as many forwards, but each digit counts once.
            let digits = indices.iter().map(|index| &test.as_slice()[*index]);
            let batch = Batch::new(digits, &device);
            let output = model.forward(batch.images);
            let own = indices.len().min(counted);
            counted -= own;
            if own == 0 {
                continue;
            }
            let (output, targets) = (output.slice(0..own), batch.targets.slice(0..own));
            let correct = output.clone().argmax(1).squeeze_dim::<1>(1).equal(targets.clone());
            ddp_loss[0] += read_loss(nll_loss_sum(output, targets))?;
            ddp_loss[1] += f64::from(correct.int().sum().try_into_scalar::<i32>()?);
            ddp_loss[2] += own as f64;
        }
        self.worker.all_reduce_sum(&mut ddp_loss)?;
        let [loss, correct, digits] = ddp_loss;
        let scores = Scores { loss: loss / digits, accuracy: correct / digits };
        self.say(format_args!(
            "Test set: Average loss: {:.4}, Accuracy: {correct}/{digits} ({:.2}%)\n",
            scores.loss,
            100.0 * scores.accuracy
        ));
        Ok(scores)
    }

    /// Measures the optimizer's state after the first step, and ends the record of memory over time
    /// after a few.
    fn record_memory(&mut self) -> Result<()> {
        let stats = self.model.stats();
        if self.steps == 1 {
            stats.record_optimizer(&self.optimizer)?;
        }
        if self.steps == PICTURED_STEPS {
            self.timeline = stats.stop_memory_timeline();
        }
        Ok(())
    }

    fn sampler(&self, digits: &Digits) -> DistributedSampler {
        DistributedSampler {
            len: digits.as_slice().len(),
            world_size: self.worker.world().size(),
            rank: self.worker.rank().index(),
        }
    }

    /// Prints a line on rank 0.
    fn say(&self, line: std::fmt::Arguments<'_>) {
        if !self.job.quiet && self.worker.is_rank_zero() {
            println!("{line}");
        }
    }
}
