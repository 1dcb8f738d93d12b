//! Trains PyTorch's MNIST network with fully sharded data parallel training.
//!
//! Follows PyTorch's tutorial "Getting Started with Fully Sharded Data Parallel", with its network,
//! flags, loops and optimizer. Compares DDP, FSDP as one unit, FSDP with size-based wrapping, and
//! FSDP with CPU offload, as the tutorial does. `fsdp-runtime/docs/mnist.md` walks through it.
//!
//! ```text
//! cargo run --example mnist                 # ten epochs on 4,000 digits, with two ranks
//! cargo run --example mnist -- --compare    # all four ways: times, memory, accuracy, pictures
//! cargo run --example mnist -- --help
//! ```
//!
//! Read in this order:
//!
//! 1. `model.rs`: the network in plain Burn, and the annotations for sharding.
//! 2. `sharding.rs`: the four ways to share the model between ranks.
//! 3. `train.rs`: the train and test loops of one rank.
//! 4. `compare.rs`: the comparison.
//!
//! The other files: `cli.rs` (arguments), `data.rs` (digits), `sampler.rs` (each rank's part of the
//! digits), `summary.rs` (the result), and `../common/` (code that the examples share).

mod cli;
#[allow(dead_code, reason = "this example uses a part of it")]
#[path = "../common/mod.rs"]
mod common;
mod compare;
mod data;
mod model;
mod sampler;
mod sharding;
mod summary;
mod train;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Parser;
use fsdp_runtime::launch::env::RankEnv;
use fsdp_runtime::prelude::*;

use crate::cli::Cli;
use crate::common::{allocator, config_file, report};
use crate::compare::compare;
use crate::summary::Summary;
use crate::train::{Job, fsdp_main};

fn main() -> ExitCode {
    report::exit_code(start(&Cli::parse()))
}

fn start(cli: &Cli) -> Result<()> {
    allocator::keep_pages();
    cli.device().resolve_or_exit();
    if !cli.output.quiet {
        config_file::note_unread();
    }
    if cli.compare {
        return compare(cli);
    }
    let job = Job::new(cli, cli.sharding())?;
    match run(cli, job)? {
        Some(summary) => report::print_summary(&summary, cli.output),
        // Another process runs rank 0, and prints the result.
        None => Ok(()),
    }
}

/// Runs the ranks of this process: all of them as threads, or one of them if the ranks are
/// processes. Returns the summary of the rank whose peak memory was highest, or `None` if another
/// process runs rank 0.
fn run(cli: &Cli, job: Job) -> Result<Option<Summary>> {
    let started = RankEnv::read()?;
    let world = cli.world_size(started.as_ref());
    let options = LaunchOptions::new(world)
        .with_engine(cli.ranks.engine)
        .with_device(cli.device().resolve()?);
    let summaries = launch(options, move |worker: Worker| fsdp_main(&job, &worker))?;
    ensure!(!summaries.is_empty(), "no rank ran in this process");
    if !report::reports(started.as_ref()) {
        return Ok(None);
    }
    Ok(summaries.into_iter().max_by_key(|summary| summary.memory.total))
}
