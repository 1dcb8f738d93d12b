//! Training runs through Burn's `Learner`, sharded and not.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::Module;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::Device;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{ExecutionStrategy, Learner, LearningResult, SupervisedTraining};
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::CheckpointManager;
use fsdp_runtime::errors::LaunchError;
use fsdp_runtime::prelude::*;
use fsdp_runtime::train::{FsdpStrategy, RankLoader, supervised};

use super::model::{Batch, Net, Row, Rows, rows};

/// Rows for training: 8 batches of 16 and one of 4.
pub const TRAIN: usize = 132;
/// Rows for validation: no multiple of any number of ranks.
pub const VALID: usize = 21;
/// Items of one batch of all ranks.
pub const BATCH: usize = 16;

/// What a training run is to do.
#[derive(Clone)]
pub struct Run {
    pub world: usize,
    pub epochs: usize,
    /// Items of one batch of all ranks.
    pub batch: usize,
    /// Whether the loss is a sum with a weight.
    pub sums: bool,
    pub accumulation: Option<usize>,
    pub clip: Option<f64>,
    pub shuffle: Option<u64>,
    pub optimizer: fn() -> ModuleOptimizer,
    pub whole_param: bool,
    pub options: FsdpOptions,
    /// Checkpoints after so many steps, below the run's folder.
    pub checkpoint_every: Option<u64>,
}

impl Run {
    pub fn new(world: usize) -> Self {
        Self {
            world,
            epochs: 2,
            batch: BATCH,
            sums: false,
            accumulation: None,
            clip: None,
            shuffle: None,
            optimizer: || AdamWConfig::new().init(),
            whole_param: false,
            options: FsdpOptions::new(),
            checkpoint_every: None,
        }
    }
}

/// The metrics of a run, from the files that Burn writes.
#[derive(Clone, Debug, PartialEq)]
pub struct Metrics {
    /// Loss of each training batch of all ranks together.
    pub train_losses: Vec<f64>,
    pub valid_losses: Vec<f64>,
    pub valid_accuracies: Vec<f64>,
}

impl Metrics {
    pub fn read(folder: &Path, epochs: usize) -> Self {
        let all = |split: &str, name: &str| {
            let file = |epoch| folder.join(split).join(format!("epoch-{epoch}/{name}.log"));
            let text = |epoch| std::fs::read_to_string(file(epoch)).unwrap_or_default();
            let text: String = (1..=epochs).map(text).collect();
            let line = |line: &str| line.split(',').next().unwrap().parse().unwrap();
            let lines = text.lines().filter(|line| !line.ends_with("final"));
            lines.map(line).collect::<Vec<f64>>()
        };
        Self {
            train_losses: all("train", "Loss"),
            valid_losses: all("valid", "Loss"),
            valid_accuracies: all("valid", "Accuracy"),
        }
    }
}

fn schedule() -> ModuleLrScheduler {
    CosineAnnealingLrSchedulerConfig::new(2e-2, 12).init().unwrap()
}

fn with_settings<M>(run: &Run, training: SupervisedTraining<M>) -> SupervisedTraining<M>
where
    M: burn::train::LearnerModel,
    SupervisedTraining<M>: Sized,
    (LossMetric, AccuracyMetric): burn::train::MetricRegistration<M>,
{
    let training = training
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .num_epochs(run.epochs)
        .with_application_logger(None);
    match run.accumulation {
        Some(batches) => training.grads_accumulation(batches),
        None => training,
    }
}

/// Runs Burn's own strategy for one device on the whole model. Returns the last layer's weights.
pub fn plain(run: &Run, folder: &Path) -> Vec<f32> {
    let device = Device::flex().autodiff();
    let load = |dataset| DataLoaderBuilder::new(Rows).batch_size(run.batch).build(dataset);
    let training =
        SupervisedTraining::<Net>::new(folder, load(rows(0, TRAIN)), load(rows(500, VALID)));
    let training = with_settings(run, training)
        .with_training_strategy(ExecutionStrategy::single(device.clone()).into());
    let net = Net::new(&device).with_sums(run.sums);
    let learner = Learner::new(net, (run.optimizer)(), schedule());
    training.launch(learner).model.head_weights()
}

/// Returns the strategy of a run on one rank.
pub fn strategy(run: &Run, folder: &Path, worker: &Worker) -> FsdpStrategy {
    let mut strategy = FsdpStrategy::new(worker);
    if let Some(max_norm) = run.clip {
        strategy = strategy.with_max_grad_norm(max_norm);
    }
    if run.whole_param {
        strategy = strategy.with_whole_param();
    }
    if let Some(steps) = run.checkpoint_every {
        let manager = CheckpointManager::new(folder.join("checkpoints"), worker);
        strategy =
            strategy.with_checkpoints(manager).with_checkpoint_every(steps).with_resume_latest();
    }
    strategy
}

/// Returns the training of a run on one rank.
pub fn training(
    run: &Run,
    folder: &Path,
    worker: &Worker,
    train: InMemDataset<Row>,
) -> SupervisedTraining<Fsdp<Net>> {
    let loader = |dataset| RankLoader::new(Rows, dataset, worker).batch_size(run.batch / run.world);
    let train = match run.shuffle {
        Some(seed) => loader(train).shuffle(seed).build(),
        None => loader(train).equal_lengths(true).build(),
    };
    let valid: Arc<dyn DataLoader<Batch>> = loader(rows(500, VALID)).build();
    with_settings(run, supervised(worker, folder, train, valid))
        .with_training_strategy(strategy(run, folder, worker).into())
}

/// Returns the learner of a run on one rank.
pub fn learner(run: &Run, worker: &Worker) -> Result<Learner<Fsdp<Net>>, Error> {
    let net = Net::new(worker.device()).with_sums(run.sums);
    let model = fully_shard(net, worker, run.options.clone())?;
    Ok(Learner::new(model, (run.optimizer)(), schedule()))
}

/// What a rank has at the end of a run.
pub struct Outcome {
    pub head: Vec<f32>,
    pub interrupted: Option<String>,
}

impl Outcome {
    pub fn new(result: LearningResult<Fsdp<Net>>) -> Self {
        assert!(result.error.is_none(), "{:?}", result.error);
        let interrupted = result.interrupted.map(|stop| stop.reason.unwrap_or_default());
        Self { head: result.model.materialize().head_weights(), interrupted }
    }
}

/// Runs the sharded training on all ranks. Returns what each has at the end.
pub fn sharded(run: &Run, folder: &Path) -> Result<Vec<Outcome>, LaunchError> {
    sharded_with(run, folder, |_, training| training)
}

/// Trains as [`sharded`] does, with a change to the training.
pub fn sharded_with(
    run: &Run,
    folder: &Path,
    change: impl Fn(&Worker, SupervisedTraining<Fsdp<Net>>) -> SupervisedTraining<Fsdp<Net>>
    + Send
    + Sync
    + 'static,
) -> Result<Vec<Outcome>, LaunchError> {
    let (run, folder, world) = (run.clone(), folder.to_path_buf(), run.world);
    let options =
        LaunchOptions::new(world).with_device(Device::flex()).with_timeout(Duration::from_secs(60));
    let outcomes = launch(options, move |worker| {
        let training = change(&worker, training(&run, &folder, &worker, rows(0, TRAIN)));
        Ok::<_, Error>(Outcome::new(training.launch(learner(&run, &worker)?)))
    })?;
    assert_eq!(outcomes.len(), world, "a launch returns one value for each rank");
    Ok(outcomes)
}
