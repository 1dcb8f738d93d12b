//! `fsdp launch`: starts the ranks of this machine, supervises them, and reports how they ended.
//!
//! The files in order. Each uses only those before it; this file comes last.
//!
//! | file | owns |
//! |---|---|
//! | `flags/` | the flags of `accelerate launch` |
//! | `error.rs` | the errors of a launch, as data |
//! | `restarts.rs` | the policy of restarts |
//! | `settings.rs` | the settings of a launch: the flags, and the configuration that they and the file make |
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
//! | `session.rs` | what all attempts share: the guard, and events |
//! | `supervisor.rs` | one attempt: starting and ending all processes |
//! | `hosts.rs` | the hosts of `mpirun` that can be reached |
//! | `remains.rs` | waiting for processes that an attempt has left |
//! | `attempts.rs` | attempts, until one ends well or no restart is left |

#[cfg(unix)]
mod attempts;
#[cfg(unix)]
mod child;
#[cfg(unix)]
mod commands;
mod error;
#[cfg(unix)]
mod events;
#[cfg(unix)]
mod exit;
mod flags;
#[cfg(unix)]
mod guard;
#[cfg(unix)]
mod hosts;
#[cfg(unix)]
mod mpi;
#[cfg(unix)]
mod output;
mod plan;
#[cfg(unix)]
mod process;
#[cfg(unix)]
mod remains;
mod rendezvous;
#[cfg(unix)]
mod report;
mod restarts;
#[cfg(unix)]
mod session;
mod settings;
#[cfg(unix)]
mod supervisor;

use std::ffi::OsString;
use std::process::ExitCode;

use fsdp_runtime::launch::cuda;

use self::error::LaunchError;
use self::plan::LaunchPlan;
pub(crate) use self::restarts::Restarts;
pub(crate) use self::settings::{Options, Settings};
use crate::console;

#[derive(clap::Args)]
#[command(
    after_help = "Every flag of `accelerate launch` is known, with hyphens or underscores. One \
                        that has no effect here is reported, and one that asks for something else is \
                        refused, with the reason."
)]
pub(crate) struct Args {
    #[command(flatten)]
    options: Options,

    /// Program to start, and its arguments. `--` before it ends the flags
    #[arg(trailing_var_arg = true, required = true)]
    program: Vec<String>,
}

/// Exits as the run does: `fsdp-runtime/docs/launch.md` lists the exit codes.
pub(crate) fn run(args: &Args) -> ExitCode {
    exit_code(args.options.settings().and_then(|settings| start(&settings, &args.program)))
}

/// Returns the exit code of a launch. Prints the error, if there is one.
pub(crate) fn exit_code(launched: Result<u8, LaunchError>) -> ExitCode {
    match launched {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            console::err(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

/// Starts the ranks of this machine and waits for them. Returns the exit code.
pub(crate) fn start(settings: &Settings, program: &[String]) -> Result<u8, LaunchError> {
    let plan = LaunchPlan::new(settings, 0, |name| std::env::var_os(name))?;
    if plan.mpirun.is_some() && !has_mpirun() {
        return Err(LaunchError::NoMpirun { processes: plan.world });
    }
    if plan.mpirun.is_none() && plan.world > 1 && !has_gpu() {
        let install = if has_mpirun() { "" } else { " (Open MPI, which is not installed)" };
        console::err(format_args!(
            "no GPU was found; processes on CPUs communicate over MPI{install}: add `--mpi`, and \
             build the program with `--features mpi`"
        ));
    }
    supervise(settings, plan, program)
}

/// Returns whether this machine has a GPU that ranks can use.
pub(crate) fn has_gpu() -> bool {
    cuda::driver().is_ok_and(|driver| !driver.gpus.is_empty())
}

/// Returns whether `mpirun` is on `PATH`.
pub(crate) fn has_mpirun() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join("mpirun").is_file())
}

#[cfg(unix)]
fn supervise(settings: &Settings, plan: LaunchPlan, program: &[String]) -> Result<u8, LaunchError> {
    attempts::run(settings, plan, program)
}

#[cfg(not(unix))]
fn supervise(_: &Settings, _: LaunchPlan, _: &[String]) -> Result<u8, LaunchError> {
    Err(LaunchError::NotUnix)
}

/// Runs `fsdp guard`, which the launcher starts in addition to its ranks.
pub(crate) fn run_guard() -> ExitCode {
    #[cfg(unix)]
    guard::run();
    ExitCode::SUCCESS
}

/// Runs `fsdp watch`, which a failed rank of `mpirun` leaves behind.
pub(crate) fn run_watch(process: i32, seconds: u64) -> ExitCode {
    #[cfg(unix)]
    mpi::run_watch(process, std::time::Duration::from_secs(seconds));
    #[cfg(not(unix))]
    let _ = (process, seconds);
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
