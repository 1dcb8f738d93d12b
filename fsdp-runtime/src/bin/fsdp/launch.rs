//! `fsdp launch`: starts the ranks of this machine, and answers for how they end.
//!
//! `plan.rs` settles how many and with which variables, from the flags and the file; `ranks.rs`
//! makes processes of them, or one of `mpirun`, whose output `mpi.rs` reads; `process.rs` starts and
//! ends a process, and `supervise.rs` decides when; `output.rs` relays what they print; `guard.rs`
//! ends them if the launcher itself is killed.

#[cfg(unix)]
mod guard;
#[cfg(unix)]
mod mpi;
#[cfg(unix)]
mod output;
mod plan;
#[cfg(unix)]
mod process;
#[cfg(unix)]
mod ranks;
#[cfg(unix)]
mod supervise;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use fsdp_runtime::config::Config;

use self::plan::{Flags, LaunchError, Plan};
use crate::{config, say};

#[derive(clap::Args)]
pub struct Args {
    /// The configuration file [default: fsdp/default_config.yaml in the cache directory, if there]
    #[arg(long, value_name = "FILE", alias = "config_file", alias = "config-file")]
    config: Option<PathBuf>,

    /// Ranks on all machines together
    #[arg(long, short = 'n', value_name = "N", alias = "num_processes")]
    num_processes: Option<usize>,

    /// Machines, each of which runs `fsdp launch`
    #[arg(long, value_name = "N", alias = "num_machines")]
    num_machines: Option<usize>,

    /// This machine's number, from 0
    #[arg(long, value_name = "N", alias = "machine_rank")]
    machine_rank: Option<usize>,

    /// Name or address of machine 0
    #[arg(long, value_name = "HOST", alias = "main_process_ip")]
    main_process_ip: Option<String>,

    /// Port at which ranks meet on machine 0
    #[arg(long, value_name = "PORT", alias = "main_process_port")]
    main_process_port: Option<u16>,

    /// Start the ranks, of all machines, by Open MPI's `mpirun`
    #[arg(long)]
    mpi: bool,

    /// Seconds between asking ranks to end and killing them, once one has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 3)]
    grace: u64,

    /// The program and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    program: Vec<String>,
}

pub fn run(args: &Args) -> ExitCode {
    match start(args) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn start(args: &Args) -> Result<u8, LaunchError> {
    let path = match &args.config {
        Some(path) => Some(path.clone()),
        None => config::default_path().filter(|path| path.is_file()),
    };
    let config = path.as_deref().map(Config::read).transpose()?;
    if let (Some((_, notes)), Some(path)) = (&config, &path) {
        say(format_args!("configuration: {}", path.display()));
        notes.iter().filter(|note| !note.off).for_each(say);
    }
    let flags = Flags {
        num_processes: args.num_processes,
        num_machines: args.num_machines,
        machine_rank: args.machine_rank,
        main_process_ip: args.main_process_ip.clone(),
        main_process_port: args.main_process_port,
        mpi: args.mpi,
    };
    let config = config.map(|(config, _)| config).unwrap_or_default();
    if let (Some(flag), Some(file)) = (flags.num_processes, config.num_processes)
        && flag != file
    {
        say(format_args!("--num-processes {flag} overrides `num_processes: {file}` of the file"));
    }
    let plan = Plan::new(&flags, &config, path.as_deref(), |name| std::env::var_os(name))?;
    let grace = Duration::from_secs(args.grace);
    supervised(&plan, &args.program, grace)
}

#[cfg(unix)]
fn supervised(plan: &Plan, program: &[String], grace: Duration) -> Result<u8, LaunchError> {
    supervise::run(plan, program, grace)
}

#[cfg(not(unix))]
fn supervised(_: &Plan, _: &[String], _: Duration) -> Result<u8, LaunchError> {
    Err(LaunchError::NotUnix)
}

/// `fsdp guard`, which a launcher starts beside its ranks.
pub fn guard() -> ExitCode {
    #[cfg(unix)]
    guard::run();
    ExitCode::SUCCESS
}

/// `fsdp rank`, which `mpirun` starts for each rank.
#[cfg(unix)]
pub fn run_rank(program: &[std::ffi::OsString]) -> ExitCode {
    mpi::run_rank(program)
}

/// `fsdp rank`, which nothing starts here.
#[cfg(not(unix))]
pub fn run_rank(_: &[std::ffi::OsString]) -> ExitCode {
    ExitCode::FAILURE
}
