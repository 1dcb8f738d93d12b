//! Fine-tunes a BERT sentence classifier with fully sharded data parallel training.
//!
//! Every rank holds a shard of each matrix, of its gradient and of its optimizer state, and trains
//! on its own part of each batch. The example shows all that such a program needs: annotations on
//! the model, sharding, a training loop, evaluation, checkpoints that any number of ranks can
//! resume from, and loading and saving Hugging Face models.
//!
//! ```text
//! cargo run --release --example bert_finetune          # trains a small BERT on mail, on two ranks
//! cargo run --release --example bert_finetune -- --help
//! cargo run --release --example bert_finetune -- --pretrained MiniLM-L6/ --data mrpc/
//! cargo run --release --example bert_finetune -- --pretrained MiniLM-L6/ --lora 8 --quantize nf4
//! ```
//!
//! Read in this order:
//!
//! 1. `model.rs`: the model in plain Burn, and the annotations for sharding.
//! 2. `sharding.rs`: how the model is sharded, with new, pretrained or restored weights.
//! 3. `train.rs`: the training loop of one rank.
//! 4. `../common/saver.rs`: saving and resuming.
//!
//! Inputs of a run are in `cli.rs` (arguments and hyperparameters), `job.rs`, `bert_config.rs`, `corpus.rs` (text),
//! `tokenizer.rs` and `batch.rs`. `lora.rs` has adapters on a frozen model, and
//! `plan.rs` the plan of a step on GPUs. Results are in `metrics.rs`, `summary.rs` and
//! `export.rs` (files next to exported weights). `learning_rate.rs` has the schedule, and
//! `../common/` the code that the examples share.

mod batch;
mod bert_config;
#[cfg(test)]
mod checkpoint_tests;
mod cli;
#[path = "../common/mod.rs"]
mod common;
mod corpus;
mod export;
mod job;
mod learning_rate;
mod lora;
mod metrics;
mod model;
mod plan;
mod sharding;
mod summary;
mod tokenizer;
mod train;
#[cfg(test)]
mod transformers;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use fsdp_runtime::Rank;
use fsdp_runtime::prelude::*;

use crate::cli::Cli;
use crate::common::checkpoints::{Outcome, handle_interrupts};
use crate::common::launch_settings::LaunchSettings;
use crate::common::{allocator, report};
use crate::job::Job;
use crate::summary::Summary;
use crate::train::train;

fn main() -> ExitCode {
    report::exit_code(start(&Cli::parse()))
}

fn start(cli: &Cli) -> Result<()> {
    allocator::keep_pages();
    let settings = report::refused(cli.launch_settings())?;
    settings.device.resolve_or_exit();
    if cli.plan.is_on() {
        println!("{}", plan::text(cli, &settings)?);
        return Ok(());
    }
    run(cli, settings)?.report(cli.output)
}

/// Runs the ranks of this process: all of them as threads, or one of them if the ranks are
/// processes.
fn run(cli: &Cli, settings: LaunchSettings) -> Result<Outcome<Summary>> {
    let device = settings.device.resolve()?;
    let job = report::refused(Job::new(cli, &settings))?;
    if job.checkpoints.directory.is_some() {
        handle_interrupts()?;
    }
    let (trace, memory) = (cli.trace.start()?, job.memory.clone());
    let results = launch(settings.launch.with_device(device), move |worker: Worker| {
        report::of_rank(train(&job, &worker)).map(|summary| (worker.rank(), summary))
    });
    let results = memory.finish(trace.finish(results)?)?;
    // All ranks end after the same step, so the first result stands for all of them.
    Ok(match results.into_iter().next() {
        Some((_, None)) => Outcome::Interrupted,
        Some((Rank::ZERO, Some(summary))) => Outcome::Finished(Box::new(summary)),
        _ => Outcome::FinishedElsewhere,
    })
}
