//! Pretrains a GPT with fully sharded data parallel training. Follows fairseq's example of it.
//!
//! Every rank holds a shard of each matrix, of its gradient and of its optimizer state, and trains
//! on its own part of each batch. The example shows what large models need besides sharding: a
//! forecast of memory before anything is allocated, offload to host memory, recomputation of
//! activations, bfloat16 and float16 with loss scaling, and gradient accumulation. Arguments and
//! log lines are fairseq's.
//!
//! ```text
//! cargo run --release --example gpt_pretrain         # trains a tiny GPT on Moby-Dick, on two ranks
//! cargo run --release --example gpt_pretrain -- --help
//! cargo run --release --example gpt_pretrain -- --arch 1.3B --data wiki.txt --world-size 8
//! ```
//!
//! Read in this order:
//!
//! 1. `model.rs`: the model in plain Burn, and the annotations for sharding. `arch.rs` has its
//!    sizes.
//! 2. `sharding.rs`: strategy, precision, offload and recomputation.
//! 3. `train.rs`: the training loop of one rank.
//! 4. `checkpoints.rs`: saving and resuming.
//! 5. `memory_forecast.rs`: the memory that a rank will need; `plan.rs`: that, and the time, on GPUs.
//!
//! Inputs of a run are in `cli.rs` (arguments), `fairseq.rs` (those that fairseq's command needs),
//! `launch_config.rs` (the configuration file), `recipe.rs` (hyperparameters and their defaults),
//! `job.rs`, `data.rs`, `text.rs`, `bpe.rs` (tokenizer), `pretrained.rs` (weights of GPT-2),
//! `peft/` (adapters of GPT-2), `preprocess.rs`, `reader.rs`, `tokens.rs`, `token_index.rs` and
//! `dictionary.rs` (files of word pieces),
//! `batch.rs` and `available_memory.rs`. Results are in `init_progress.rs` (progress bar),
//! `generate.rs` (text), `run_log.rs`, `fairseq_log.rs` and `logger.rs` (log lines), `bigram.rs` (baseline to compare
//! with) and `summary.rs`. `learning_rate.rs` has the schedule, and `../common/` the code
//! that the examples share.

mod arch;
mod available_memory;
mod batch;
mod bigram;
mod bpe;
mod checkpoints;
mod cli;
#[path = "../common/mod.rs"]
mod common;
mod data;
mod dictionary;
mod fairseq;
mod fairseq_log;
mod generate;
mod init_progress;
mod job;
mod launch_config;
mod learning_rate;
mod logger;
mod memory_forecast;
mod model;
mod peft;
mod plan;
mod preprocess;
mod pretrained;
mod reader;
mod recipe;
mod run_log;
mod sharding;
mod summary;
mod text;
mod token_index;
mod tokens;
mod train;

#[cfg(test)]
mod fairseq_data;
#[cfg(test)]
mod gpt2_vocabulary;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod transformers;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use fsdp_runtime::Rank;
use fsdp_runtime::launch::env::RankEnv;
use fsdp_runtime::prelude::*;

use crate::available_memory::AvailableMemory;
use crate::cli::{Cli, Command};
use crate::common::checkpoints::{Outcome, handle_interrupts};
use crate::common::{allocator, report};
use crate::init_progress::InitBar;
use crate::job::{Job, Setup};
use crate::memory_forecast::forecast;
use crate::summary::Summary;
use crate::train::train;

fn main() -> ExitCode {
    report::exit_code(start(&Cli::parse()))
}

fn start(cli: &Cli) -> Result<()> {
    allocator::keep_pages();
    if let Some(Command::Preprocess(args)) = &cli.command {
        return preprocess::preprocess(args);
    }
    let cli = &report::refused(launch_config::filled(cli))?;
    cli.ranks.device.resolve_or_exit();
    // A process has one subscriber of `tracing`.
    if !cli.output.quiet && !cli.trace.is_on() {
        InitBar::show();
    }
    if cli.checkpoints.saves() {
        handle_interrupts()?;
    }
    if cli.plan.is_on() {
        println!("{}", plan::text(cli)?);
        return Ok(());
    }
    run(cli)?.report(cli.output)
}

/// Runs the ranks of this process: all of them as threads, or one of them if the ranks are
/// processes. The summary is that of the rank whose peak memory was highest.
fn run(cli: &Cli) -> Result<Outcome<Summary>> {
    let (device, setup) = (cli.ranks.device.resolve()?, report::refused(Setup::new(cli))?);
    let started = RankEnv::read()?;
    let world = cli.world_size(started.as_ref());
    let local = started.as_ref().and_then(|place| place.local_world).unwrap_or(world);
    let verbose = !cli.output.quiet && report::reports(started.as_ref());

    // A model that does not fit is refused before anything that takes time.
    let forecast = forecast(&setup, world, local, &device)?;
    let available = AvailableMemory::new(cli, local, started.is_none());
    if verbose {
        eprintln!("forecast, {available}\n{forecast}");
    }
    let memory = cli.memory.start()?;
    available.check(&forecast).map_err(|error| memory.refused(&forecast, error.into()))?;

    let job = report::refused(Job::new(cli, setup, verbose))?;
    let job = Job { memory: memory.clone(), ..job };
    let options = LaunchOptions::new(world).with_engine(cli.ranks.engine).with_device(device);
    let options = options.with_timeout(Duration::from_secs(cli.timeout));
    let options = if cli.debug { options.with_debug(true) } else { options };
    let trace = cli.trace.start()?;
    let results = launch(options, move |worker: Worker| {
        report::of_rank(train(&job, &forecast, &worker)).map(|summary| (worker.rank(), summary))
    });
    let results = memory.finish(trace.finish(results)?)?;
    // All ranks end after the same update, so that they are interrupted together.
    if results.iter().any(|(_, summary)| summary.is_none()) {
        return Ok(Outcome::Interrupted);
    }
    let is_first = results.iter().any(|(rank, _)| *rank == Rank::ZERO);
    let mut summaries: Vec<_> = results.into_iter().filter_map(|(_, summary)| summary).collect();
    let mut generated: Vec<_> =
        summaries.iter_mut().flat_map(|summary| summary.generated.drain(..)).collect();
    generated.sort_by_key(|text| text.index);
    let largest = summaries.into_iter().max_by_key(|summary| summary.memory.total.peak);
    Ok(match largest.filter(|_| is_first) {
        Some(summary) => Outcome::Finished(Box::new(Summary { generated, ..summary })),
        None => {
            // Processes print the texts of their own rank.
            generated.iter().for_each(|text| println!("{text}"));
            Outcome::FinishedElsewhere
        }
    })
}
