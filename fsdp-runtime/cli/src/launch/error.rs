//! Reasons why `fsdp launch` cannot start or supervise ranks.

use std::io;

use fsdp_runtime::config::ConfigError;
use fsdp_runtime::launch::env::{EnvError, Launcher};

use super::flags::Answer;

/// An error that ends the launcher, with the reason and what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Env(#[from] EnvError),
    #[error(
        "the number of ranks is not set; give --num-processes N, or a file with `num_processes` \
         (`fsdp config` writes one)"
    )]
    NoProcesses,
    #[error("not supported here: {}", lines(refused))]
    Flags { refused: Vec<Answer> },
    #[error(
        "`mpirun` was not found, and {processes} processes on CPUs communicate over MPI; install \
         Open MPI (on Debian: `apt-get install openmpi-bin libopenmpi-dev libclang-dev`) and build \
         the program with `--features mpi`, or start the program without the launcher: its ranks \
         are threads then"
    )]
    NoMpirun { processes: usize },
    #[error(
        "{machines} machines need the address of machine 0; give --main-process-ip HOST, or \
         `main_process_ip` in the file"
    )]
    NoMainProcess { machines: usize },
    #[error(
        "the main process's host `{host}` cannot be resolved: {source}; check --main-process-ip"
    )]
    Unresolved { host: String, source: io::Error },
    #[error(
        "port {port} is taken on this machine; stop the process that listens on it, or choose \
         another port with --main-process-port"
    )]
    PortTaken { port: u16 },
    #[error("port {port} cannot be used: {source}; choose another with --main-process-port")]
    Port { port: u16, source: io::Error },
    #[error(
        "the ranks are started twice: this launcher is itself rank {rank} of {world}, started by \
         {launcher}; start the program with one of the two"
    )]
    StartedTwice { rank: usize, world: usize, launcher: Launcher },
    #[error(
        "--machine-rank is {rank}, but `mpirun` starts the ranks of all machines; run this command \
         on machine 0 only"
    )]
    MpirunOnce { rank: usize },
    #[error(
        "--num-processes MIN:MAX was given for {machines} machines; their launchers do not know of \
         each other, so give one number, or start the ranks of all machines with `mpirun` (`--mpi`)"
    )]
    RangeOfMachines { machines: usize },
    #[error(
        "{lost} cannot be reached, and the other hosts of {file} take {world} ranks of at least \
         {min}; restore the hosts, or lower MIN of --num-processes MIN:MAX"
    )]
    TooFewRanks { lost: String, file: String, world: usize, min: usize },
    #[error("`{program}` was not found; give a path, or a program on PATH")]
    NotFound { program: String },
    #[error("`{program}` cannot be started: {source}")]
    CannotStart { program: String, source: io::Error },
    #[error("the launcher cannot {action}: {source}")]
    System { action: &'static str, source: io::Error },
    #[cfg(not(unix))]
    #[error("`fsdp launch` needs Unix; start each rank with RANK, LOCAL_RANK and WORLD_SIZE set")]
    NotUnix,
}

impl LaunchError {
    /// Returns the error for a program that the system could not start.
    pub(super) fn not_started(program: String, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::NotFound { program },
            _ => Self::CannotStart { program, source },
        }
    }

    /// Returns whether a later start of the same ranks may succeed.
    pub(super) fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Unresolved { .. }
                | Self::PortTaken { .. }
                | Self::Port { .. }
                | Self::CannotStart { .. }
                | Self::System { .. }
                | Self::TooFewRanks { .. }
        )
    }

    /// Returns the launcher's exit code: 127 and 126 for a program that cannot be started, as in
    /// `sh`, otherwise 1.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound { .. } => 127,
            Self::CannotStart { .. } => 126,
            _ => 1,
        }
    }
}

/// Returns the refused flags with the reasons, one a line if there are several.
fn lines(refused: &[Answer]) -> String {
    let line = |Answer { flag, because }: &Answer| format!("--{flag}: {because}");
    match refused {
        [one] => line(one),
        several => several.iter().map(|answer| format!("\n  {}", line(answer))).collect(),
    }
}
