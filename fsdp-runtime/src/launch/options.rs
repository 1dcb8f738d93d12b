//! The options of a launch.

use std::time::Duration;

use burn::tensor::Device;

use super::engine::Engine;
use crate::error::ShardError;

/// The environment variable that turns on the option [`debug`](LaunchOptions::with_debug) of a
/// launch where the program does not set it: `1` or `0`.
pub const DEBUG_VARIABLE: &str = "FSDP_DEBUG";

/// The environment variable with the number of threads of a process, as OpenMP has it.
const THREADS_VARIABLE: &str = "OMP_NUM_THREADS";

/// The number of ranks that a program asks for.
#[derive(Clone, Copy, Debug)]
pub(super) enum NumRanks {
    /// A fixed number of ranks. A program that was started as one of several processes must be one
    /// of this many.
    Exactly(usize),
    /// As many ranks as processes were started. A program that was started by itself has the given
    /// number of threads.
    StartedOr(usize),
}

impl NumRanks {
    /// Returns the number in the program.
    pub(super) const fn asked(self) -> usize {
        match self {
            Self::Exactly(asked) | Self::StartedOr(asked) => asked,
        }
    }
}

/// The number of ranks to start, and their engine, device and resources.
///
/// | option | default |
/// |---|---|
/// | engine | [`Engine::Auto`] |
/// | device | Burn's default device |
/// | time-out | 10 minutes |
/// | threads per rank | the environment variable `OMP_NUM_THREADS`, else the cores of the machine, shared evenly by its ranks |
/// | debug | the environment variable `FSDP_DEBUG` |
/// | malloc tuning | on |
#[derive(Clone, Debug)]
#[must_use]
pub struct LaunchOptions {
    pub(super) ranks: NumRanks,
    pub(super) engine: Engine,
    pub(super) device: Option<Device>,
    pub(super) timeout: Duration,
    pub(super) threads_per_rank: Option<usize>,
    debug: Option<bool>,
    pub(super) malloc_tuning: bool,
}

impl LaunchOptions {
    /// Asks for `world` ranks. A program that was started as one of several processes must be one
    /// of `world`.
    pub const fn new(world: usize) -> Self {
        Self::with_ranks(NumRanks::Exactly(world))
    }

    /// Asks for as many ranks as processes of this program were started (by `mpirun`, for example),
    /// or for `world` ranks where the program was started by itself.
    pub const fn started_or(world: usize) -> Self {
        Self::with_ranks(NumRanks::StartedOr(world))
    }

    const fn with_ranks(ranks: NumRanks) -> Self {
        Self {
            ranks,
            engine: Engine::Auto,
            device: None,
            timeout: Duration::from_secs(600),
            threads_per_rank: None,
            debug: None,
            malloc_tuning: true,
        }
    }

    /// Sets whether ranks are threads or processes, and how they communicate. Default:
    /// [`Engine::Auto`].
    pub fn with_engine(mut self, engine: Engine) -> Self {
        self.engine = engine;
        self
    }

    /// Sets whether ranks compare the number of elements of each collective before it runs. The
    /// operation, the unit and the sequence number are always compared. With `debug`, each
    /// collective is also reported to `tracing`. Default: on where the environment has
    /// `FSDP_DEBUG=1`.
    pub fn with_debug(mut self, debug: bool) -> Self {
        self.debug = Some(debug);
        self
    }

    /// Sets the device of every rank; autodiff is turned on. With the engine `nccl`, this is the
    /// GPU of a machine's first rank, and each further rank takes the next GPU. Default: Burn's
    /// default device.
    pub fn with_device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Sets how long a collective waits for the other ranks before it ends the run with an error.
    /// Default: 10 minutes.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the number of threads of each rank's rayon pool, at least 1.
    ///
    /// Default: the environment variable `OMP_NUM_THREADS`, which limits a process: ranks that are
    /// threads of one process share that many. `fsdp launch --num-cpu-threads-per-process` sets it.
    /// Without it, the cores of the machine divided by the number of its ranks.
    pub fn with_threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = Some(threads.max(1));
        self
    }

    /// Sets whether `launch` configures glibc's allocator for training. Default: on.
    ///
    /// The allocator then keeps freed pages, and uses huge pages for its heap. This saves about a
    /// quarter of a training step on a CPU.
    ///
    /// The setting applies to the whole process, from its first launch on. It does not change an
    /// allocator that the environment configures (`MALLOC_*`, or `glibc.malloc` in
    /// `GLIBC_TUNABLES`), that of another C library, or another `#[global_allocator]`. The process
    /// keeps the memory of its peak until it exits. It reserves 4 GiB of addresses, which take
    /// memory only where they are used. Huge pages need a first launch on the process's main
    /// thread.
    pub fn with_malloc_tuning(mut self, tuning: bool) -> Self {
        self.malloc_tuning = tuning;
        self
    }

    /// Returns the device of every rank, with autodiff.
    pub(super) fn autodiff_device(&self) -> Device {
        let device = self.device.clone().unwrap_or_default();
        if device.is_autodiff() { device } else { device.autodiff() }
    }

    /// Returns the option `debug`, or the environment's value where the option is not set.
    pub(super) fn debug(&self) -> Result<bool, ShardError> {
        self.debug.map_or_else(debug_variable, Ok)
    }

    /// Returns the threads of one rank's pool. `sharing` ranks share the cores of this process, and
    /// `here` of them run in this process.
    pub(super) fn threads(&self, sharing: usize, here: usize) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let limit = std::env::var(THREADS_VARIABLE).ok().and_then(|text| thread_limit(&text));
        let share = limit.map_or(cores / sharing.max(1), |limit| limit / here.max(1));
        self.threads_per_rank.unwrap_or(share.max(1))
    }
}

/// Returns the number of threads that a value of `OMP_NUM_THREADS` allows a process. `None` for a
/// value that OpenMP ignores too.
fn thread_limit(text: &str) -> Option<usize> {
    // With commas, the numbers are those of nested parallel regions, the outermost first.
    let first = text.split(',').next()?.trim();
    let limit = first.parse().ok().filter(|limit| *limit > 0);
    if limit.is_none() && !first.is_empty() {
        tracing::warn!("{THREADS_VARIABLE} is `{text}`, which is no number of threads");
    }
    limit
}

fn debug_variable() -> Result<bool, ShardError> {
    match std::env::var(DEBUG_VARIABLE).as_deref() {
        Err(_) | Ok("" | "0") => Ok(false),
        Ok("1") => Ok(true),
        Ok(value) => Err(ShardError::InvalidOption {
            option: DEBUG_VARIABLE,
            value: value.into(),
            expected: "use 0 or 1".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openmps_variable_limits_a_process() {
        let cases = [("4", Some(4)), (" 2 ", Some(2)), ("8,4,1", Some(8)), ("0", None)];
        for (text, limit) in cases.into_iter().chain([("", None), ("many", None), ("-1", None)]) {
            assert_eq!(thread_limit(text), limit, "{text}");
        }
        assert_eq!(LaunchOptions::new(2).with_threads_per_rank(3).threads(2, 2), 3);
    }
}
