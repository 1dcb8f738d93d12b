//! PyTorch's network on MNIST's digits through Burn's `Learner`: the parts of the example
//! `mnist_learner`, sharded and on a single device.

#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/mnist/data.rs"]
mod data;
#[allow(dead_code, reason = "the examples use the rest")]
#[path = "../../examples/mnist/model.rs"]
mod model;
#[path = "../../examples/mnist_learner/steps.rs"]
mod steps;

use std::path::Path;

use burn::config::Config;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::step::StepLrSchedulerConfig;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ExecutionStrategy, Learner, LearnerModel, LearningResult, MetricEarlyStoppingStrategy,
    MetricRegistration, StoppingCondition, SupervisedTraining,
};
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::CheckpointManager;
use fsdp_runtime::optim::AdadeltaConfig;
use fsdp_runtime::options::FsdpConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::train::{FsdpStrategy, RankLoader, supervised};
use tempfile::tempdir;

use self::data::{Digit, Digits};
use self::model::Net;
use super::run::Metrics;
use super::support::compare::{Within, assert_close};
use super::support::on_ranks;

/// Digits for training: 8 batches of 32 of all ranks, and one of 12.
pub const TRAIN: usize = 268;
/// Number of batches in an epoch.
pub const BATCHES: usize = TRAIN.div_ceil(BATCH);
/// Digits for validation: no multiple of any number of ranks.
const VALID: usize = 101;
/// Digits of one batch of all ranks.
const BATCH: usize = 32;
const SEED: u64 = 1;
/// Learning rate of runs that are compared with others. At the example's 1.0 the loss jumps in the
/// first steps: a pixel that becomes the largest of its pool by a rounding then changes it by 1e-5.
const CALM_RATE: f64 = 0.1;

/// Settings of a training run.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub epochs: usize,
    pub accumulation: usize,
    /// Whether dropout is on, the digits are shuffled, and checkpoints are saved every three steps.
    pub is_long: bool,
}

impl Run {
    fn net(self, device: &Device) -> Net {
        let net = Net::new(device);
        if self.is_long { net } else { net.without_dropout() }
    }

    /// Returns the optimizer and schedule of the example, for a model on one rank or on several.
    fn learner<M: LearnerModel + 'static>(self, model: M) -> Learner<M> {
        let rate = if self.is_long { 1.0 } else { CALM_RATE };
        let schedule = StepLrSchedulerConfig::new(rate, BATCHES.div_ceil(self.accumulation));
        let schedule: ModuleLrScheduler = schedule.with_gamma(0.7).init().unwrap();
        Learner::new(model, AdadeltaConfig::new().init(), schedule)
    }

    fn with_settings<M: LearnerModel + 'static>(
        self,
        training: SupervisedTraining<M>,
    ) -> SupervisedTraining<M>
    where
        (LossMetric, AccuracyMetric): MetricRegistration<M>,
    {
        let training = training
            .metrics((LossMetric::new(), AccuracyMetric::new()))
            .num_epochs(self.epochs)
            .with_application_logger(None);
        match self.accumulation {
            1 => training,
            batches => training.grads_accumulation(batches),
        }
    }

    /// Trains on one rank of several. Continues from the newest checkpoint of a long run.
    pub fn train(self, worker: &Worker, folder: &Path) -> Result<LearningResult<Fsdp<Net>>, Error> {
        let digits = Digits::embedded().unwrap();
        let [train, valid] = parts(&digits);
        let loader = |digits: &Digits, part| {
            let loader = RankLoader::new(digits.clone(), InMemDataset::new(part), worker);
            loader.batch_size(BATCH / worker.world().size())
        };
        let train = loader(&digits.0, train);
        let train = if self.is_long { train.shuffle(SEED) } else { train };
        let valid = loader(&digits.1, valid).build();
        let options = FsdpConfig::new().with_seed(Some(SEED)).init::<Net>()?;
        let model = fully_shard(self.net(worker.device()), worker, options)?;
        let mut strategy = FsdpStrategy::new(worker);
        if self.is_long {
            let manager = CheckpointManager::new(folder.join("checkpoints"), worker);
            strategy =
                strategy.with_checkpoints(manager).with_checkpoint_every(3).with_resume_latest();
        }
        Ok(self
            .with_settings(supervised(worker, folder, train.build(), valid))
            .with_training_strategy(strategy.into())
            .launch(self.learner(model)))
    }

    /// Trains on several ranks, and returns each one's weights.
    fn sharded(self, world: usize, folder: &Path) -> Vec<Vec<f32>> {
        let folder = folder.to_path_buf();
        on_ranks(world, move |worker| Ok(full_weights(self.train(worker, &folder)?.model)))
    }

    /// Trains with Burn's own strategy for a single device, from the weights that sharded runs
    /// start from. Returns the weights.
    fn plain(self, folder: &Path) -> Vec<f32> {
        let nets = on_ranks(1, move |worker| {
            let options = FsdpConfig::new().with_seed(Some(SEED)).init::<Net>()?;
            let options = options.with_strategy(ShardingStrategy::NoShard);
            let start = fully_shard(self.net(worker.device()), worker, options)?;
            Ok((*start).clone().materialize())
        });
        let [net] = <[Net; 1]>::try_from(nets).unwrap();
        let digits = Digits::embedded().unwrap();
        let [train, valid] = parts(&digits);
        let load = |digits: &Digits, part| {
            let loader = DataLoaderBuilder::new(digits.clone()).batch_size(BATCH);
            loader.build(InMemDataset::new(part))
        };
        let training =
            SupervisedTraining::<Net>::new(folder, load(&digits.0, train), load(&digits.1, valid));
        let device = Device::flex().autodiff();
        let training = self
            .with_settings(training)
            .with_training_strategy(ExecutionStrategy::single(device).into());
        weights(&training.launch(self.learner(net)).model)
    }
}

/// Returns the digits to train on, and those to validate with.
fn parts((train, valid): &(Digits, Digits)) -> [Vec<Digit>; 2] {
    [train.as_slice()[..TRAIN].to_vec(), valid.as_slice()[..VALID].to_vec()]
}

/// The weights of a model, in the order of their declaration.
struct Weights(Vec<f32>);

impl ModuleVisitor for Weights {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f32>());
    }
}

fn weights(net: &Net) -> Vec<f32> {
    let mut weights = Weights(Vec::new());
    net.visit(&mut weights);
    weights.0
}

/// Returns all weights of a sharded model. Every rank calls it.
pub fn full_weights(model: Fsdp<Net>) -> Vec<f32> {
    weights(&model.materialize())
}

/// The losses of every step, and the metrics of every epoch, are those of Burn's single-device
/// `Learner` on the batches of all ranks together.
#[test]
fn mnist_has_the_losses_of_burns_learner() {
    for accumulation in [1, 2] {
        let run = Run { epochs: 2, accumulation, is_long: false };
        let single = tempdir().unwrap();
        let expected_weights = run.plain(single.path());
        let expected = Metrics::read(single.path(), run.epochs);
        assert_eq!(expected.train_losses.len(), run.epochs * BATCHES, "a loss for each batch");
        let last = expected.train_losses.last().unwrap();
        assert!(*last < 0.8 * expected.train_losses[0], "it learns: {last}");
        for world in [1, 2, 4] {
            let folder = tempdir().unwrap();
            let what = |it| format!("{it} of {world} ranks, accumulation {accumulation}");
            let ranks = run.sharded(world, folder.path());
            let found = Metrics::read(folder.path(), run.epochs);
            let within = Within::Scaled(1e-5);
            assert_close(&found.train_losses, &expected.train_losses, within, what("losses"));
            assert_close(&found.valid_losses, &expected.valid_losses, within, what("validation"));
            let accuracies = (&found.valid_accuracies, &expected.valid_accuracies);
            assert_close(accuracies.0, accuracies.1, within, what("accuracies"));
            assert_eq!(ranks.len(), world);
            for rank in ranks {
                assert_close(&rank, &expected_weights, within, what("weights"));
            }
        }
    }
}

/// Settings of the whole program, which are saved as a file.
#[derive(Config, Debug)]
struct ProgramConfig {
    num_epochs: usize,
    fsdp: FsdpConfig,
}

/// Runs the program that the guide shows, with everything that the strategy does, and continues
/// from its newest checkpoint if there is one. Returns the number of steps of this launch.
fn program(worker: &Worker, folder: &Path, config: &ProgramConfig) -> Result<usize, Error> {
    let digits = Digits::embedded().unwrap();
    let [train, valid] = parts(&digits).map(InMemDataset::new);
    let train = RankLoader::new(digits.0.clone(), train, worker).batch_size(64).shuffle(42).build();
    let valid = RankLoader::new(digits.1.clone(), valid, worker).batch_size(64).build();
    let model = fully_shard(Net::new(worker.device()), worker, config.fsdp.init::<Net>()?)?;
    let checkpoints = CheckpointManager::new(folder.join("checkpoints"), worker).with_keep_last(2);
    let training = supervised(worker, folder, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .early_stopping(MetricEarlyStoppingStrategy::new(
            &LossMetric::new(),
            Aggregate::Mean,
            Direction::Lowest,
            Split::Valid,
            StoppingCondition::NoImprovementSince { n_epochs: 2 },
        ))
        .grads_accumulation(2)
        .num_epochs(config.num_epochs)
        .summary()
        .with_training_strategy(
            FsdpStrategy::new(worker)
                .with_max_grad_norm(1.0)
                .with_checkpoints(checkpoints)
                .with_resume_latest()
                .into(),
        );
    let result = training.launch(Learner::new(model, AdadeltaConfig::new().init(), 1e-3));
    result.model.state().save_burnpack(folder.join("model.bpk"))?;
    Ok(result.model.stats().counts().reduce_scatters)
}

#[test]
fn the_whole_program_trains_stops_and_resumes() {
    for world in [1, 2] {
        let folder = tempdir().unwrap();
        let mut found = Vec::new();
        for num_epochs in [1, 2] {
            let path = folder.path().to_path_buf();
            let config = ProgramConfig::new(num_epochs, FsdpConfig::new().with_seed(Some(SEED)));
            let config = ProgramConfig::load_binary(config.to_string().as_bytes()).unwrap();
            found.push(on_ranks(world, move |worker| program(worker, &path, &config)));
            assert!(folder.path().join("model.bpk").exists());
        }
        assert!(found[0][0] > 0);
        assert_eq!(found[1], found[0], "the second launch trains the second epoch only");
        let losses = Metrics::read(folder.path(), 2).valid_losses;
        assert_eq!(losses.len(), 2 * VALID.div_ceil(64 * world), "of both epochs");
    }
}
