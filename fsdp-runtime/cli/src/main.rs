//! `fsdp`: the command-line tool of this crate.
//!
//! Each subcommand has a module of the same name. `ROOMS`, next to this file, lists the modules in
//! the order in which they may import each other.

mod config;
mod console;
mod env;
mod launch;
mod merge;
mod plan;
mod test;
mod trace;
mod validate;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Fully sharded data parallel training for Burn.
#[derive(Parser)]
#[command(name = "fsdp", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Asks how to train, and writes the answers to a configuration file
    Config(config::Args),
    /// Starts a program as several ranks on this machine
    Launch(launch::Args),
    /// Trains a small model as the configuration says, and compares it with unsharded training
    Test(test::Args),
    /// Prints the versions, the memory and the devices of this machine, for a bug report
    Env,
    /// Converts a checkpoint to safetensors files that transformers loads
    Merge(merge::Args),
    /// Plans memory, communication and time of a training step, without running it
    Plan(plan::Args),
    /// Joins or sums up files of traces
    Trace(trace::Args),
    /// Checks a configuration file, and lists its errors and the keys without effect
    Validate(validate::Args),
    /// Kills the process groups named on standard input when standard input closes
    #[command(hide = true)]
    Guard,
    /// Runs the ranks of `fsdp test`
    #[command(hide = true)]
    TestRank(test::RankArgs),
    /// Kills a process that is still there some seconds later
    #[command(hide = true)]
    Watch { process: i32, seconds: u64 },
    /// Runs a program as one rank of an `mpirun`
    #[command(hide = true)]
    Rank {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        program: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Config(args) => config::run(&args),
        Command::Launch(args) => launch::run(&args),
        Command::Env => env::run(),
        Command::Merge(args) => merge::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Validate(args) => validate::run(&args),
        Command::Test(args) => test::run(&args),
        Command::TestRank(args) => test::run_rank(&args),
        Command::Guard => launch::run_guard(),
        Command::Watch { process, seconds } => launch::run_watch(process, seconds),
        Command::Rank { program } => launch::run_rank(&program),
    }
}
