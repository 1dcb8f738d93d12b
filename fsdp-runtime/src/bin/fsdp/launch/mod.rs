//! `fsdp launch`: starts the ranks of this machine, supervises them, and reports how they ended.
//!
//! The files in order. Each uses only those before it; this file comes last.
//!
//! | file | owns |
//! |---|---|
//! | `error.rs` | the errors of a launch, as data |
//! | `rendezvous.rs` | host and port at which ranks connect |
//! | `plan.rs` | the plan: number of ranks and their environment variables |
//! | `commands.rs` | the plan's commands: a rank, or `mpirun` |
//! | `exit.rs` | how a process ended |
//! | `output.rs` | forwarding lines of ranks, and keeping the last ones |
//! | `events.rs` | what the supervisor waits for, and how long |
//! | `guard.rs` | the guard process, which kills the ranks if the launcher is killed |
//! | `process.rs` | starting one process, its signals and its end |
//! | `mpi/` | `fsdp rank` under `mpirun`, and reading the output of `mpirun` |
//! | `child.rs` | the processes of a launch: ranks, or one `mpirun` |
//! | `report.rs` | the report of a run that failed |
//! | `supervisor.rs` | starting and ending all processes |

#[cfg(unix)]
mod child;
#[cfg(unix)]
mod commands;
mod error;
#[cfg(unix)]
mod events;
#[cfg(unix)]
mod exit;
#[cfg(unix)]
mod guard;
#[cfg(unix)]
mod mpi;
#[cfg(unix)]
mod output;
mod plan;
#[cfg(unix)]
mod process;
mod rendezvous;
#[cfg(unix)]
mod report;
#[cfg(unix)]
mod supervisor;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use fsdp_runtime::config::Config;

use self::error::LaunchError;
use self::plan::{Flags, Plan};
use crate::{config, console};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Configuration file [default: fsdp/default_config.yaml in the cache directory, if it exists]
    #[arg(long, value_name = "FILE", alias = "config_file", alias = "config-file")]
    config: Option<PathBuf>,

    #[command(flatten)]
    flags: Flags,

    /// Seconds between SIGTERM and SIGKILL to the other ranks, once a rank has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 3)]
    grace: u64,

    /// Program to start, and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    program: Vec<String>,
}

/// Exits as the run does: `fsdp-runtime/docs/launch.md` lists the exit codes.
pub(crate) fn run(args: &Args) -> ExitCode {
    match launch(args) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            console::err(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn launch(args: &Args) -> Result<u8, LaunchError> {
    let path = match &args.config {
        Some(path) => Some(path.clone()),
        None => config::default_path().filter(|path| path.is_file()),
    };
    let file = path.as_deref().map(Config::read).transpose()?;
    if let (Some((_, notes)), Some(path)) = (&file, &path) {
        console::err(format_args!("configuration: {}", path.display()));
        notes.iter().filter(|note| !note.off).for_each(console::err);
    }
    let config = file.map(|(config, _)| config).unwrap_or_default();
    if let (Some(flag), Some(file)) = (args.flags.num_processes, config.num_processes)
        && flag != file
    {
        console::err(format_args!(
            "--num-processes {flag} overrides `num_processes: {file}` of the file"
        ));
    }
    let plan = Plan::new(&args.flags, &config, path.as_deref(), |name| std::env::var_os(name))?;
    supervise(&plan, &args.program, Duration::from_secs(args.grace))
}

#[cfg(unix)]
fn supervise(plan: &Plan, program: &[String], grace: Duration) -> Result<u8, LaunchError> {
    supervisor::run(plan, program, grace)
}

#[cfg(not(unix))]
fn supervise(_: &Plan, _: &[String], _: Duration) -> Result<u8, LaunchError> {
    Err(LaunchError::NotUnix)
}

/// Runs `fsdp guard`, which the launcher starts in addition to its ranks.
pub(crate) fn run_guard() -> ExitCode {
    #[cfg(unix)]
    guard::run();
    ExitCode::SUCCESS
}

/// Runs `fsdp rank`, which `mpirun` starts for each rank.
#[cfg(unix)]
pub(crate) fn run_rank(program: &[OsString]) -> ExitCode {
    mpi::run_rank(program)
}

/// Fails, since `fsdp rank` needs Unix, as `fsdp launch` does.
#[cfg(not(unix))]
pub(crate) fn run_rank(_: &[OsString]) -> ExitCode {
    ExitCode::FAILURE
}
