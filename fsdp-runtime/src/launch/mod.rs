//! Starting ranks, each with a rayon pool and a communication thread of its own: all as threads of
//! this process, or this process as one of several (`launch/process.rs`, `on_mpi.rs`, `on_gpus.rs`).

pub(crate) mod agree;
pub mod env;
mod error;

#[cfg(feature = "nccl")]
mod on_gpus;
#[cfg(feature = "mpi")]
mod on_mpi;
mod process;

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use burn::tensor::Device;

pub use self::error::EngineError;
use self::process::{Gpus, Place};
use crate::collectives::Op;
use crate::collectives::comm::Communicator;
use crate::collectives::group::{Group, Message};
use crate::collectives::local::{Hub, LocalGroup};
use crate::error::{CollectiveError, Error, LaunchError, RankPanic, ShardError, panic_message};
use crate::launch::env::RankEnv;
use crate::layout::{Mesh, Rank, WorldSize};

/// The environment variable that turns on the launch option `debug`.
pub const DEBUG_VARIABLE: &str = "FSDP_DEBUG";

/// What ranks are, and how they communicate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Engine {
    /// On CUDA devices `Nccl`, where there is a GPU for each of several ranks; otherwise `Mpi` where
    /// the program was started as one of several processes, and `Local` where it was not.
    #[default]
    Auto,
    /// Threads of one process.
    Local,
    /// Processes that Open MPI's `mpirun` has started; the feature `mpi`.
    Mpi,
    /// Threads or processes with a GPU each, over NCCL; the feature `cuda`.
    Nccl,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Local => "local",
            Self::Mpi => "mpi",
            Self::Nccl => "nccl",
        })
    }
}

impl FromStr for Engine {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Self, ShardError> {
        let known = [Self::Auto, Self::Local, Self::Mpi, Self::Nccl];
        known.into_iter().find(|engine| engine.to_string() == text).ok_or_else(|| {
            ShardError::InvalidOption {
                option: "engine",
                value: text.into(),
                expected: "use auto, local, mpi or nccl".into(),
            }
        })
    }
}

/// How many ranks there are to be.
#[derive(Clone, Copy, Debug)]
enum Ranks {
    Exactly(usize),
    StartedOr(usize),
}

/// How ranks are started.
#[derive(Clone, Debug)]
#[must_use]
pub struct LaunchOptions {
    ranks: Ranks,
    engine: Engine,
    device: Option<Device>,
    timeout: Duration,
    threads_per_rank: Option<usize>,
    debug: Option<bool>,
}

impl LaunchOptions {
    /// `world` ranks on Burn's default device, which wait for each other for at most 10 minutes.
    /// A program that was started as one of several processes must be one of `world`.
    pub const fn new(world: usize) -> Self {
        Self::with_ranks(Ranks::Exactly(world))
    }

    /// As many ranks as processes of this program were started, by `mpirun` for one; `world` ranks
    /// where it was started by itself.
    pub const fn started_or(world: usize) -> Self {
        Self::with_ranks(Ranks::StartedOr(world))
    }

    const fn with_ranks(ranks: Ranks) -> Self {
        Self {
            ranks,
            engine: Engine::Auto,
            device: None,
            timeout: Duration::from_secs(600),
            threads_per_rank: None,
            debug: None,
        }
    }

    /// What ranks are: by default threads, or processes where several were started.
    pub fn with_engine(mut self, engine: Engine) -> Self {
        self.engine = engine;
        self
    }

    /// Whether the number of elements of each collective is compared across ranks before it runs,
    /// beside its operation, unit and sequence number, and each is told to `tracing`. By default
    /// where the environment has `FSDP_DEBUG=1`.
    pub fn with_debug(mut self, debug: bool) -> Self {
        self.debug = Some(debug);
        self
    }

    /// The device of every rank; autodiff is turned on. With the engine `nccl`, the GPU of a machine's
    /// first rank, after which the others have one each.
    pub fn with_device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// How long a collective waits for the other ranks before it ends the run.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Threads of each rank's rayon pool. By default the cores are shared evenly, at least one each.
    pub fn with_threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = Some(threads.max(1));
        self
    }
}

/// One rank: its place, its device and its end of the process group. Clones are the same rank.
#[derive(Clone, Debug)]
pub struct Worker {
    mesh: Mesh,
    device: Device,
    local_size: usize,
    comm: Arc<Communicator>,
}

impl Worker {
    /// This rank.
    pub fn rank(&self) -> Rank {
        self.mesh.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> WorldSize {
        self.mesh.world
    }

    /// The rank's device, with autodiff.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// The number of ranks on this machine.
    pub(crate) fn local_size(&self) -> usize {
        self.local_size
    }

    pub(crate) fn comm(&self) -> &Arc<Communicator> {
        &self.comm
    }

    /// Waits until every rank is here.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`] when a rank does not come.
    pub fn barrier(&self) -> Result<(), Error> {
        self.exchange("barrier", "the worker", ()).map(|_| ())
    }

    /// Replaces each value by its sum over ranks, added in rank order.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`] when a rank does not come, or gives another number of values.
    pub fn all_reduce_sum(&self, values: &mut [f64]) -> Result<(), Error> {
        let all = self.exchange("all_reduce", "the worker's values", values.to_vec())?;
        let first = all[0].len();
        if let Some((rank, other)) =
            self.world().ranks().zip(&all).find(|(_, other)| other.len() != first)
        {
            let describe = |len| format!("all_reduce of {len} values");
            let (found, expected) = (describe(other.len()), describe(first));
            let failure = CollectiveError::Mismatch { rank, found, peer: Rank::ZERO, expected };
            return Err(failure.into());
        }
        for (index, value) in values.iter_mut().enumerate() {
            *value = all.iter().map(|rank| rank[index]).sum();
        }
        Ok(())
    }

    /// The fewest steps that any rank has batches for: as many as all can take, since every step is one
    /// of all ranks. Every rank calls it, before an epoch.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`] when a rank does not come.
    pub fn agree_steps(&self, own: usize) -> Result<usize, Error> {
        let all = self.exchange("all_gather", "the number of steps", own)?;
        Ok(all.iter().map(|steps| **steps).min().unwrap_or(own))
    }

    /// Every rank's value, in rank order.
    pub(crate) fn exchange<T: Message>(
        &self,
        name: &'static str,
        what: &str,
        value: T,
    ) -> Result<Vec<Arc<T>>, Error> {
        let op = Op::new(name, what);
        Ok(self.comm.issue(move |group| group.exchange(&op, value)).wait()?)
    }
}

/// Runs `rank` once on each rank and returns what they returned, in rank order. Where ranks are
/// processes, each runs it once, as its own rank, and has its own result alone.
///
/// Each rank runs inside a rayon pool of its own, so that ranks do not wait for each other's work.
/// The first rank that fails or panics ends the others at their next collective.
///
/// # Errors
///
/// [`LaunchError`] with the first failing rank and its own error; a panic becomes [`RankPanic`], and
/// ranks that cannot be started as asked an [`EngineError`](crate::EngineError). A thread rank that
/// neither ends nor reaches a collective within the time-out after a failure is left behind, so that
/// the launch returns. A process that has had a failed launch ends all processes when it exits.
pub fn launch<T, E, F>(options: LaunchOptions, rank: F) -> Result<Vec<T>, LaunchError>
where
    T: Send + 'static,
    E: Into<Box<dyn StdError + Send + Sync>> + 'static,
    F: Fn(Worker) -> Result<T, E> + Send + Sync + 'static,
{
    let place = RankEnv::read().map_err(Into::into);
    let device = options.device.clone().unwrap_or_default();
    let device = if device.is_autodiff() { device } else { device.autodiff() };
    let place = place
        .and_then(|started| Place::new(options.engine, options.ranks, started, &gpus_of(&device)?));
    let place = place.map_err(|error| refused(error.into()))?;
    let debug = match options.debug {
        Some(debug) => debug,
        None => debug_variable().map_err(|error| refused(error.into()))?,
    };
    match place {
        Place::Threads(world) => {
            let world = WorldSize::new(world).map_err(|error| refused(error.into()))?;
            let hub = Hub::new(world, options.timeout, debug);
            let seat = |rank| (Group::Local(LocalGroup::new(hub.clone(), rank)), device.clone());
            let topology = world.ranks().map(seat).collect();
            threads(&hub, world, topology, &options, rank)
        }
        #[cfg(feature = "nccl")]
        Place::ThreadsOnGpus(world) => on_gpus::threads(world, &options, &device, debug, rank),
        #[cfg(feature = "nccl")]
        Place::ProcessOnGpu(place) => on_gpus::run(&place, &options, &device, debug, rank),
        #[cfg(feature = "mpi")]
        Place::Process(place) => on_mpi::run(&place, &options, device, debug, rank),
        #[allow(unreachable_patterns, reason = "reached without the engines only")]
        _ => unreachable!("a place for an engine that is not compiled in"),
    }
}

/// The GPUs that ranks on `device` can have.
fn gpus_of(device: &Device) -> Result<Gpus, EngineError> {
    let name = format!("{:?}", device.clone().inner());
    #[cfg(feature = "nccl")]
    if let Some(first) = crate::collectives::cuda::index_of(device) {
        let count = crate::collectives::cuda::device_count()?;
        crate::collectives::cuda::require_device(first)?;
        return Ok(Gpus { device: name, from_here: Some(count - first), first });
    }
    Ok(Gpus { device: name, from_here: None, first: 0 })
}

/// What ends a launch before there are ranks, on the rank that the environment says this is.
fn refused(source: Box<dyn StdError + Send + Sync>) -> LaunchError {
    let started = RankEnv::read().ok().flatten();
    let (rank, world) =
        started.map_or((Rank::ZERO, WorldSize::ONE), |started| (started.rank, started.world));
    LaunchError { rank, world, source: source.into() }
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

/// Runs every rank as a thread, each with its end of the group and its device.
fn threads<T, E, F>(
    hub: &Hub,
    world: WorldSize,
    topology: Vec<(Group, Device)>,
    options: &LaunchOptions,
    rank: F,
) -> Result<Vec<T>, LaunchError>
where
    T: Send + 'static,
    E: Into<Box<dyn StdError + Send + Sync>> + 'static,
    F: Fn(Worker) -> Result<T, E> + Send + Sync + 'static,
{
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = options.threads_per_rank.unwrap_or((cores / world.size()).max(1));
    let rank = Arc::new(rank);
    let (sender, outcomes) = channel();
    for (index, (group, device)) in world.ranks().zip(topology) {
        let start = || -> std::io::Result<()> {
            let worker = Worker {
                mesh: Mesh::new(index, world),
                device,
                local_size: world.size(),
                comm: Communicator::start(Arc::new(group))?,
            };
            let sender = sender.clone();
            start_rank(worker, threads, rank.clone(), move |outcome| {
                // The launch has returned already when this rank was left behind.
                let _ = sender.send((index, outcome));
            })
        };
        if let Err(error) = start() {
            hub.fail(CollectiveError::PeerFailed { rank: index, reason: error.to_string() });
            return Err(LaunchError { rank: index, world, source: Arc::new(error) });
        }
    }
    drop(sender);
    collect(&outcomes, hub, world, options.timeout)
}

/// Runs one rank on a thread of its own, inside its rayon pool. A failure ends the others.
fn start_rank<T, E, F>(
    worker: Worker,
    threads: usize,
    rank: Arc<F>,
    ended: impl FnOnce(Result<T, Box<dyn StdError + Send + Sync>>) + Send + 'static,
) -> std::io::Result<()>
where
    T: Send + 'static,
    E: Into<Box<dyn StdError + Send + Sync>> + 'static,
    F: Fn(Worker) -> Result<T, E> + Send + Sync + 'static,
{
    let index = worker.rank();
    // Lives on until the others know how this rank has ended.
    let comm = worker.comm.clone();
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(move |thread| format!("fsdp-rank-{index}-{thread}"))
        .build()
        .map_err(std::io::Error::other)?;
    std::thread::Builder::new().name(format!("fsdp-rank-{index}")).spawn(move || {
        let run = || pool.install(|| rank(worker).map_err(Into::into));
        let outcome =
            catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(unwound(panic)));
        if let Err(error) = &outcome {
            let reason = error.to_string();
            comm.world().fail(CollectiveError::PeerFailed { rank: index, reason });
        }
        drop(comm);
        ended(outcome);
    })?;
    Ok(())
}

type Outcome<T> = (Rank, Result<T, Box<dyn StdError + Send + Sync>>);

fn collect<T>(
    outcomes: &std::sync::mpsc::Receiver<Outcome<T>>,
    hub: &Hub,
    world: WorldSize,
    timeout: Duration,
) -> Result<Vec<T>, LaunchError> {
    let mut results: Vec<Option<T>> = world.ranks().map(|_| None).collect();
    let mut errors: Vec<(Rank, Box<dyn StdError + Send + Sync>)> = Vec::new();
    let mut deadline: Option<Instant> = None;
    for _ in world.ranks() {
        let outcome = match deadline {
            None => outcomes.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(deadline) => {
                outcomes.recv_timeout(deadline.saturating_duration_since(Instant::now()))
            }
        };
        match outcome {
            Ok((rank, Ok(result))) => results[rank.index()] = Some(result),
            Ok((rank, Err(error))) => {
                deadline.get_or_insert_with(|| Instant::now() + timeout);
                errors.push((rank, error));
            }
            Err(_) => break,
        }
    }
    if errors.is_empty() {
        return Ok(results.into_iter().flatten().collect());
    }
    // What a rank's failure made of the others is not the cause.
    let blamed = hub.failure().and_then(|failure| failure.failed_rank());
    let cause = errors.iter().position(|(rank, _)| Some(*rank) == blamed).unwrap_or(0);
    let (rank, source) = errors.swap_remove(cause);
    Err(LaunchError { rank: blamed.unwrap_or(rank), world, source: source.into() })
}

/// What a rank unwound with: a typed error, or a panic's message.
fn unwound(panic: Box<dyn Any + Send>) -> Box<dyn StdError + Send + Sync> {
    match panic.downcast::<Error>() {
        Ok(error) => error,
        Err(panic) => Box::new(RankPanic { message: panic_message(&*panic) }),
    }
}
