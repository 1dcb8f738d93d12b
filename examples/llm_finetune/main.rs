//! Fine-tunes a language model of the Llama family with fully sharded data parallel training: in full, or
//! with LoRA adapters on a frozen model, which may be stored in 4 bits.
//!
//! Every rank holds a shard of each matrix, of its gradient and of its optimizer state, and trains on its own
//! conversations. The program reads and writes the directories of Hugging Face transformers and PEFT.
//!
//! ```text
//! cargo run --release --example llm_finetune         # trains a tiny model on conversations, on two ranks
//! cargo run --release --example llm_finetune -- --help
//! cargo run --release --example llm_finetune -- --model SmolLM2/ --data chat.jsonl --save tuned/
//! cargo run --release --example llm_finetune -- --model SmolLM2/ --data chat.jsonl --lora 16 --quantize nf4
//! ```
//!
//! Read in this order:
//!
//! 1. `model.rs`: the model in plain Burn, and the annotations for sharding. `config.rs` has its settings.
//! 2. `sharding.rs`: strategy, precision, adapters, and the loading of weights.
//! 3. `train.rs`: the training loop of one rank.
//! 4. `../common/saver.rs`: saving and resuming.
//!
//! Inputs of a run are in `cli.rs` (arguments and hyperparameters), `job.rs`, `conversations.rs`, `data/`
//! (conversations, chat templates, tokens and rows) and `tiny.rs` (the model without `--model`). Results are
//! in `export.rs`, `generate.rs` (answers), `plan.rs` and `summary.rs`. `learning_rate.rs` has the schedule,
//! and `../common/` the code that the examples share.

mod cli;
#[path = "../common/mod.rs"]
mod common;
mod config;
mod conversations;
mod data;
mod export;
mod generate;
mod job;
mod learning_rate;
mod model;
mod plan;
mod sharding;
mod summary;
mod tiny;
mod train;

#[cfg(test)]
mod tests;

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
    if cli.checkpoint_plan().directory.is_some() {
        handle_interrupts()?;
    }
    if cli.plan.is_on() {
        println!("{}", plan::text(cli, &settings)?);
        return Ok(());
    }
    run(cli, settings)?.report(cli.output)
}

/// Runs the ranks of this process: all of them as threads, or one of them if the ranks are processes.
fn run(cli: &Cli, settings: LaunchSettings) -> Result<Outcome<Summary>> {
    let device = settings.device.resolve()?;
    let job = report::refused(Job::new(cli, &settings))?;
    let (trace, memory) = (cli.trace.start()?, job.memory.clone());
    let results = launch(settings.launch.with_device(device), move |worker: Worker| {
        report::of_rank(train(&job, &worker)).map(|summary| (worker.rank(), summary))
    });
    let results = memory.finish(trace.finish(results)?)?;
    // All ranks end after the same step, so that they are interrupted together.
    if results.iter().any(|(_, summary)| summary.is_none()) {
        return Ok(Outcome::Interrupted);
    }
    let mut answers = Vec::new();
    let mut first = None;
    for (rank, mut summary) in results.into_iter().filter_map(|(rank, it)| Some((rank, it?))) {
        answers.append(&mut summary.answers);
        first = first.or((rank == Rank::ZERO).then_some(summary));
    }
    answers.sort_by_key(|answer| answer.index);
    Ok(match first {
        Some(summary) => Outcome::Finished(Box::new(Summary { answers, ..summary })),
        None => {
            // Processes print the answers of their own rank.
            answers.iter().for_each(|answer| println!("{answer}"));
            Outcome::FinishedElsewhere
        }
    })
}
