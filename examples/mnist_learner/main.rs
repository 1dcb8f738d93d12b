//! Trains PyTorch's MNIST network through Burn's `Learner`, with fully sharded data parallel
//! training.
//!
//! The network and the digits are those of the example `mnist`. In a terminal, rank 0 shows Burn's
//! dashboard. `fsdp-runtime/docs/learner.md` walks through it.
//!
//! `--resume` continues a run with the settings in its `config.json`.
//!
//! ```text
//! cargo run --example mnist_learner
//! cargo run --example mnist_learner -- --epochs 5 --resume
//! ```

#[path = "../common/config_file.rs"]
mod config_file;
#[allow(dead_code, reason = "the example `mnist` uses the rest")]
#[path = "../mnist/data.rs"]
mod data;
#[allow(dead_code, reason = "the example `mnist` uses the rest")]
#[path = "../mnist/model.rs"]
mod model;
mod steps;

use std::path::PathBuf;

use anyhow::{Context, Result};
use burn::config::Config;
use burn::lr_scheduler::step::StepLrSchedulerConfig;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{Learner, LearnerSummary};
use clap::Parser;
use fsdp_runtime::checkpoint::CheckpointManager;
use fsdp_runtime::optim::AdadeltaConfig;
use fsdp_runtime::options::FsdpConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::train::{FsdpStrategy, RankLoader, supervised};

use crate::data::Digits;
use crate::model::Net;

/// Trains PyTorch's MNIST network through Burn's Learner.
#[derive(Parser, Clone, Debug)]
#[command(name = "mnist_learner")]
struct Cli {
    /// Number of ranks, as threads, if the program is not started as one of several processes
    #[arg(long, value_name = "N", default_value_t = 2)]
    world: usize,

    /// Number of passes over the training digits
    #[arg(long, value_name = "N", default_value_t = 3)]
    epochs: usize,

    /// Continue from the newest checkpoint in `--out`
    #[arg(long)]
    resume: bool,

    /// Folder of metrics, checkpoints, the configuration and the trained model
    #[arg(long, value_name = "FOLDER", default_value = "mnist-learner-run")]
    out: PathBuf,
}

/// Settings of a run, saved as `config.json`.
#[derive(Config, Debug)]
struct TrainingConfig {
    /// Digits in a batch of one rank.
    #[config(default = 64)]
    batch_size: usize,
    /// Learning rate of Adadelta in the first epoch.
    #[config(default = 1.0)]
    lr: f64,
    /// Factor of the learning rate from one epoch to the next.
    #[config(default = 0.7)]
    gamma: f64,
    /// Seed of the order of the digits.
    #[config(default = 1)]
    seed: u64,
    fsdp: FsdpConfig,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    config_file::note_unread();
    launch(LaunchOptions::started_or(cli.world), move |worker| train(&cli, &worker))?;
    Ok(())
}

/// Returns the settings of the run: those of `config.json` if it is resumed, and otherwise new ones,
/// which rank 0 writes there.
fn settings(cli: &Cli, worker: &Worker) -> Result<TrainingConfig> {
    let file = cli.out.join("config.json");
    if cli.resume {
        return TrainingConfig::load(&file).with_context(|| format!("reading {}", file.display()));
    }
    let config = TrainingConfig::new(FsdpConfig::new().with_seed(Some(1)));
    if worker.is_rank_zero() {
        let folder = &cli.out;
        std::fs::create_dir_all(folder)
            .with_context(|| format!("creating {}", folder.display()))?;
        config.save(&file).with_context(|| format!("writing {}", file.display()))?;
    }
    Ok(config)
}

/// Trains on one rank.
fn train(cli: &Cli, worker: &Worker) -> Result<()> {
    let config = settings(cli, worker)?;
    let (train, test) = Digits::embedded()?;
    let batches = train.as_slice().len().div_ceil(worker.world().size() * config.batch_size);
    let loader = |digits: &Digits| {
        RankLoader::new(digits.clone(), digits.clone(), worker).batch_size(config.batch_size)
    };
    let train = loader(&train).shuffle(config.seed).build();
    let test = loader(&test).build();

    let model = fully_shard(Net::new(worker.device()), worker, config.fsdp.init::<Net>()?)?;
    let checkpoints = CheckpointManager::new(cli.out.join("checkpoints"), worker).with_keep_last(2);
    let mut strategy = FsdpStrategy::new(worker).with_checkpoints(checkpoints);
    if cli.resume {
        strategy = strategy.with_resume_latest();
    }
    // The learning rate falls once an epoch; Burn's Learner steps the scheduler with the optimizer.
    let schedule = StepLrSchedulerConfig::new(config.lr, batches).with_gamma(config.gamma);
    let schedule = schedule.init().map_err(anyhow::Error::msg)?;
    let result = supervised(worker, &cli.out, train, test)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .num_epochs(cli.epochs)
        .summary()
        .with_training_strategy(strategy.into())
        .launch(Learner::new(model, AdadeltaConfig::new().init(), schedule));

    result.model.state().save_burnpack(cli.out.join("model.bpk"))?;
    // The dashboard gives the terminal back.
    drop(result.renderer);
    if worker.is_rank_zero() {
        let summary = LearnerSummary::new(&cli.out, &["Accuracy"]).map_err(anyhow::Error::msg)?;
        let accuracy = summary.metrics.valid.first().and_then(|metric| metric.entries.last());
        let accuracy = accuracy.context("no epoch was run")?;
        println!("test accuracy after epoch {}: {:.2} %", accuracy.step, accuracy.value);
    }
    Ok(())
}
