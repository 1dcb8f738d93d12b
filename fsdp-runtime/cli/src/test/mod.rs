//! `fsdp test`: a small sharded training on the configured engine, which is compared with an
//! unsharded one.
//!
//! The ranks are started as `fsdp launch` starts those of a program. The program is this
//! executable, with the subcommand `test-rank`. Order of the files, each of which uses only those
//! before it: `model.rs` (the model), `rank.rs` (the checks on each rank), and this file.

mod model;
mod rank;

use std::process::ExitCode;

use crate::console;
use crate::launch::{self, Options, Restarts, Settings};

pub(crate) use self::rank::{Args as RankArgs, run as run_rank};

/// Number of ranks where the configuration has none, on the CPU.
const DEFAULT_RANKS: usize = 2;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    options: Options,
}

/// Form of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ranks {
    /// Processes with a GPU each, over NCCL.
    OnGpus,
    /// Processes on CPUs, over MPI.
    OverMpi,
    /// Threads of one process, which needs no library.
    Threads,
}

/// What this build and this machine have.
#[derive(Clone, Copy, Debug)]
struct Available {
    /// A GPU.
    gpu: bool,
    /// The feature `cuda` of this executable.
    cuda: bool,
    /// The feature `mpi` of this executable.
    mpi: bool,
    /// `mpirun`.
    mpirun: bool,
}

/// Exits with 0 if all checks hold.
pub(crate) fn run(args: &Args) -> ExitCode {
    let mut settings = match args.options.settings() {
        Ok(settings) => settings,
        Err(error) => return launch::exit_code(Err(error)),
    };
    let available = Available {
        gpu: launch::has_gpu(),
        cuda: cfg!(feature = "cuda"),
        mpi: cfg!(feature = "mpi"),
        mpirun: launch::has_mpirun(),
    };
    // The ranks of the test know how many they are.
    settings.restarts = Restarts::default();
    let world = *settings.config.num_processes.get_or_insert(DEFAULT_RANKS);
    let ranks = match choose(&settings, world, available) {
        Ok(ranks) => ranks,
        Err(reason) => {
            console::err(reason);
            return ExitCode::FAILURE;
        }
    };
    prepare(&mut settings, ranks);
    if ranks == Ranks::Threads && world > 1 {
        console::err(
            "testing ranks that are threads; to test processes on CPUs, install Open MPI and `fsdp` \
             with `--features mpi`, and add `--mpi`",
        );
    }
    let Ok(this) = std::env::current_exe() else {
        console::err("the path of this executable is unknown");
        return ExitCode::FAILURE;
    };
    let this = this.to_string_lossy().into_owned();
    let program = [this, "test-rank".into(), "--ranks".into(), world.to_string()];
    let ended = launch::start(&settings, &program);
    match &ended {
        Ok(0) => console::out("the test passed"),
        _ => console::err("the test failed"),
    }
    launch::exit_code(ended)
}

/// Returns the form of the ranks that `fsdp launch` gives a program with these settings, or why
/// this executable cannot be such a program.
fn choose(settings: &Settings, world: usize, available: Available) -> Result<Ranks, String> {
    let config = &settings.config;
    let install = |feature: &str| {
        format!("install it with `cargo install --path fsdp-runtime/cli --features {feature}`")
    };
    if available.gpu && !config.use_cpu {
        if !available.cuda {
            let install = install("cuda");
            return Err(format!(
                "this `fsdp` was built without CUDA, which ranks on GPUs need; {install}, or test \
                 the CPU with `--cpu`"
            ));
        }
        return Ok(Ranks::OnGpus);
    }
    if settings.mpi || config.mpirun.is_some() {
        if !available.mpi {
            let install = install("mpi");
            return Err(format!("this `fsdp` was built without MPI; {install}"));
        }
        return Ok(Ranks::OverMpi);
    }
    if world > 1 && available.mpi && available.mpirun {
        return Ok(Ranks::OverMpi);
    }
    if config.num_machines > 1 {
        let install = install("mpi");
        return Err(format!("ranks on CPUs of several machines need MPI: {install}, add `--mpi`"));
    }
    Ok(Ranks::Threads)
}

/// Changes the settings so that ranks of this form are started.
fn prepare(settings: &mut Settings, ranks: Ranks) {
    match ranks {
        Ranks::OnGpus => {}
        Ranks::OverMpi => {
            settings.mpi = true;
            settings.config.use_cpu = true;
        }
        Ranks::Threads => settings.config.num_processes = Some(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Available = Available { gpu: false, cuda: false, mpi: false, mpirun: false };

    fn settings(mpi: bool, use_cpu: bool) -> Settings {
        let mut settings = Settings { mpi, ..Settings::default() };
        settings.config.use_cpu = use_cpu;
        settings
    }

    #[test]
    fn the_engine_is_the_one_that_a_program_would_have() {
        let cpu = |mpi, available| choose(&settings(mpi, true), 2, available);
        assert_eq!(cpu(false, NOTHING), Ok(Ranks::Threads));
        let with_mpi = Available { mpi: true, mpirun: true, ..NOTHING };
        assert_eq!(cpu(false, with_mpi), Ok(Ranks::OverMpi));
        assert_eq!(cpu(true, with_mpi), Ok(Ranks::OverMpi));
        assert_eq!(choose(&settings(false, true), 1, with_mpi), Ok(Ranks::Threads));
        assert!(cpu(true, NOTHING).unwrap_err().contains("--features mpi"));

        let gpu = Available { gpu: true, cuda: true, ..with_mpi };
        assert_eq!(choose(&settings(false, false), 2, gpu), Ok(Ranks::OnGpus));
        assert_eq!(cpu(false, gpu), Ok(Ranks::OverMpi));
        let without = choose(&settings(false, false), 2, Available { cuda: false, ..gpu });
        assert!(without.unwrap_err().contains("--features cuda"));

        let mut two = settings(false, true);
        two.config.num_machines = 2;
        assert!(choose(&two, 2, NOTHING).unwrap_err().contains("several machines"));
    }
}
