//! The settings of a launch: the flags, and the configuration that they and the file make.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use fsdp_runtime::config::{Config, Overrides};
use fsdp_runtime::launch::cuda;

use super::error::LaunchError;
use super::flags::{Answer, Flags};
use super::restarts::Restarts;
use crate::{config, console};

/// Time before the first restart.
const DEFAULT_BACKOFF: Duration = Duration::from_secs(1);

// No doc comment: clap would show it as the description of the command.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Configuration file [default: fsdp/default_config.yaml in the cache directory, if it exists]
    #[arg(long, value_name = "FILE", alias = "config_file", alias = "config-file")]
    config: Option<PathBuf>,

    /// Start the ranks of all machines with Open MPI's `mpirun`
    #[arg(long)]
    mpi: bool,

    /// Threads of each rank for computing on the CPU [default: `OMP_NUM_THREADS`, or the cores of
    /// the machine divided by its ranks]
    #[arg(long, value_name = "N", alias = "num_cpu_threads_per_process")]
    num_cpu_threads_per_process: Option<NonZeroUsize>,

    /// Folder in which each rank's output is appended to a file as well, such as `rank-0.log`
    #[arg(long, value_name = "FOLDER", alias = "log_dir")]
    log_dir: Option<PathBuf>,

    /// Seconds between SIGTERM and SIGKILL to the other ranks, once a rank has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 3)]
    grace: u64,

    /// Times that all ranks are started again after a failure, with a new secret and port [default:
    /// 0]
    ///
    /// A rank that was refused its input (exit codes 2, 78, 126 and 127) and a signal to the
    /// launcher end the run without a restart.
    #[arg(long, value_name = "N", alias = "max_restarts", default_value_t = 0)]
    #[arg(hide_default_value = true)]
    max_restarts: usize,

    /// Seconds before a restart; twice as many after each failure within a minute, at most 60 or
    /// SECONDS [default: 1]
    #[arg(long, value_name = "SECONDS", alias = "restart_backoff", value_parser = seconds)]
    restart_backoff: Option<Duration>,

    /// `Trainer`'s form of the strategy, such as "full_shard auto_wrap offload"
    #[arg(long, value_name = "OPTIONS")]
    fsdp: Option<String>,

    /// JSON file of `Trainer`'s `fsdp_config`, or the JSON itself; flags override it
    #[arg(long, value_name = "FILE", alias = "fsdp_config")]
    fsdp_config: Option<String>,

    #[command(flatten)]
    flags: Flags,
}

/// The settings of a launch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// The file, with the values of the command line.
    pub(crate) config: Config,
    /// File that `config` was read from.
    pub(crate) path: Option<PathBuf>,
    /// Values of the command line.
    pub(crate) overrides: Overrides,
    /// Whether the flag `--mpi` was given.
    pub(crate) mpi: bool,
    /// Value of `--num-cpu-threads-per-process`.
    pub(crate) threads: Option<NonZeroUsize>,
    /// Folder of the ranks' log files.
    pub(crate) logs: Option<PathBuf>,
    /// Time between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
    /// Restarts of the ranks after a failure.
    pub(crate) restarts: Restarts,
}

impl Options {
    /// Reads the configuration. Prints the flags and keys that have no effect.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Flags`] for flags that ask for something that would not happen, and
    /// [`LaunchError::Config`] for a configuration that cannot be used.
    pub(crate) fn settings(&self) -> Result<Settings, LaunchError> {
        if !self.flags.refused.is_empty() {
            return Err(LaunchError::Flags { refused: self.flags.refused.clone() });
        }
        let path = match &self.config {
            Some(path) => Some(path.clone()),
            None => config::default_path().filter(|path| path.is_file()),
        };
        let overrides = self.overrides()?;
        let (mut config, notes) = Config::read_with(path.as_deref(), &overrides)?;
        config.check()?;
        if let Some(path) = &path {
            console::err(format_args!("configuration: {}", path.display()));
        }
        self.flags.noted.iter().for_each(|Answer { flag, because }| {
            console::err(format_args!("--{flag} has no effect here: {because}"));
        });
        notes.iter().filter(|note| !note.off).for_each(console::err);
        let gpus = || cuda::driver().map_or(0, |driver| driver.gpus.len());
        if let Some(ranks) = ranks_of_gpus(&config, gpus) {
            console::err(format_args!("the number of ranks is not set: {ranks}, one for each GPU"));
            config.num_processes = Some(ranks);
        }
        Ok(Settings {
            config,
            path,
            overrides,
            mpi: self.mpi,
            threads: self.num_cpu_threads_per_process,
            logs: self.log_dir.clone(),
            grace: Duration::from_secs(self.grace),
            restarts: Restarts {
                max: self.max_restarts,
                backoff: self.restart_backoff.unwrap_or(DEFAULT_BACKOFF),
                min_processes: self.flags.min_processes,
            },
        })
    }

    /// Returns the values of the command line. A flag of a key overrides `Trainer`'s JSON file.
    fn overrides(&self) -> Result<Overrides, LaunchError> {
        let mut overrides = Overrides::default();
        match &self.fsdp_config {
            // As in `Trainer`, a brace begins the JSON itself.
            Some(json) if json.starts_with('{') => {
                overrides.parse_trainer_config(json, "--fsdp_config")?;
            }
            Some(path) => overrides.read_trainer_config(path)?,
            None => {}
        }
        self.flags.set_keys(&mut overrides)?;
        if let Some(options) = &self.fsdp {
            overrides.set_trainer_options(options)?;
        }
        Ok(overrides)
    }
}

/// Parses a number of seconds, such as `0.5`.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "expected a number of seconds from 0, such as 0.5".into())
}

/// Returns the number of ranks where the configuration has none: one for each GPU of all machines,
/// as in Accelerate. `None` on a machine without GPUs. `gpus` counts those of this machine.
fn ranks_of_gpus(config: &Config, gpus: impl FnOnce() -> usize) -> Option<usize> {
    if config.num_processes.is_some() || config.use_cpu {
        return None;
    }
    let chosen = config.gpu_ids.as_ref().map(|ids| ids.split(',').count());
    // Without a driver there are no GPUs to choose from.
    let found = gpus();
    let here = chosen.map_or(found, |chosen| chosen.min(found));
    (here > 0).then_some(here * config.num_machines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_without_a_number_have_a_gpu_each() {
        let ranks = |text: &str, gpus: usize| {
            let (config, _) = Config::parse(text, "config.yaml").unwrap();
            ranks_of_gpus(&config, || gpus)
        };
        assert_eq!(ranks("", 8), Some(8));
        assert_eq!(ranks("num_processes: -1\nnum_machines: 2\n", 8), Some(16));
        assert_eq!(ranks("gpu_ids: 0,3\n", 8), Some(2));
        assert_eq!(ranks("", 0), None);
        assert_eq!(ranks("num_processes: 4\n", 8), None);
        assert_eq!(ranks("use_cpu: true\n", 8), None);
    }
}
