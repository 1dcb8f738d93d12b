//! `fsdp`: writes and checks configuration files, starts ranks, merges checkpoints, and says what a
//! machine has.

mod config;
mod env;
mod launch;
mod merge;
mod validate;

use std::ffi::OsString;
use std::fmt;
use std::io::Write as _;
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
    /// Asks how to train, and writes a configuration file
    Config(config::Args),
    /// Starts a program as ranks on this machine
    Launch(launch::Args),
    /// Says what was found on this machine
    Env,
    /// Writes the model of a checkpoint as what transformers loads
    Merge(merge::Args),
    /// Reads a configuration file and says what is wrong with it
    Validate(validate::Args),
    /// Ends the process groups named on standard input once that closes
    #[command(hide = true)]
    Guard,
    /// Runs the program as a rank of `mpirun`'s
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
        Command::Validate(args) => validate::run(&args),
        Command::Guard => launch::guard(),
        Command::Rank { program } => launch::run_rank(&program),
    }
}

/// A line on standard output. That nobody reads it is no error.
fn print(line: impl fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// A line on standard error.
fn say(line: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "fsdp: {line}");
}
