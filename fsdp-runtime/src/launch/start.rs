//! [`launch`], which starts all ranks of a program.

use std::error::Error as StdError;
use std::sync::Arc;

use super::env::RankEnv;
use super::location::{DeviceGpus, RankLocation};
use super::options::LaunchOptions;
use super::rank_thread::{BoxedError, RankProgram};
use super::worker::Worker;
use super::{error::EngineError, malloc, threads};
use crate::error::LaunchError;
use crate::layout::{Rank, WorldSize};

/// Runs `program` once on each rank and returns the results in rank order. Where ranks are
/// processes, each process runs the program once, as its own rank, and returns only its own result.
///
/// Each rank runs inside a rayon pool of its own, so that ranks do not wait for each other's work.
/// The first rank that fails or panics ends the others at their next collective. The program must
/// own what it uses (`move`), since a rank's thread may outlive the call (see below).
///
/// The first launch tells glibc's allocator to keep freed pages, unless the environment configures
/// the allocator or [`LaunchOptions::with_malloc_tuning`] turns this off.
///
/// An error inside `forward` or `backward` unwinds to this function, which returns it: the crate
/// needs `panic = "unwind"` and does not compile with `panic = "abort"`.
///
/// # Errors
///
/// [`LaunchError`] with the first failing rank and its own error. A panic becomes a
/// [`RankPanic`](crate::errors::RankPanic); ranks that cannot be started as asked give an [`EngineError`].
/// A thread rank that neither ends nor reaches a collective within the time-out after a failure is
/// left running, so that the launch returns. A process that has had a failed launch ends all
/// processes when it exits.
///
/// # Examples
///
/// ```no_run
/// use fsdp_runtime::prelude::*;
///
/// fn train(worker: Worker) -> Result<(), Error> {
///     println!("rank {} of {}", worker.rank(), worker.world());
///     worker.barrier()
/// }
///
/// fn main() -> Result<(), Error> {
///     launch(LaunchOptions::new(2), train)?;
///     Ok(())
/// }
/// ```
pub fn launch<T, E, F>(options: LaunchOptions, program: F) -> Result<Vec<T>, LaunchError>
where
    T: Send + 'static,
    E: Into<Box<dyn StdError + Send + Sync>> + 'static,
    F: Fn(Worker) -> Result<T, E> + Send + Sync + 'static,
{
    start(&options, Arc::new(move |worker| program(worker).map_err(Into::into)))
}

fn start<T: Send + 'static>(
    options: &LaunchOptions,
    program: RankProgram<T>,
) -> Result<Vec<T>, LaunchError> {
    if options.malloc_tuning {
        malloc::keep_freed_pages();
    }
    #[cfg(feature = "cube")]
    super::kernel_cache::claim();
    let device = options.autodiff_device();
    let location = || -> Result<RankLocation, EngineError> {
        let started = RankEnv::read()?;
        RankLocation::new(options.engine, options.ranks, started, &DeviceGpus::of(&device)?)
    };
    let location = location().map_err(|error| refused(error.into()))?;
    let debug = options.debug().map_err(|error| refused(error.into()))?;
    let world = |ranks| WorldSize::new(ranks).map_err(|error| refused(error.into()));
    match location {
        RankLocation::Threads(ranks) => {
            threads::on_one_device(world(ranks)?, &device, options, debug, program)
        }
        #[cfg(feature = "nccl")]
        RankLocation::ThreadsOnGpus(ranks) => {
            super::gpus::threads(world(ranks)?, options, &device, debug, program)
        }
        #[cfg(feature = "nccl")]
        RankLocation::ProcessOnGpu(env) => super::gpus::run(&env, options, &device, debug, program),
        #[cfg(feature = "mpi")]
        RankLocation::Process(env) => super::mpi::run(&env, options, device, debug, program),
        #[allow(unreachable_patterns, reason = "reached without the engines only")]
        _ => unreachable!("a location for an engine that is not compiled in"),
    }
}

/// Converts an error from before there are ranks into that of the launch, on the rank that the
/// environment says this process is.
fn refused(source: BoxedError) -> LaunchError {
    let started = RankEnv::read().ok().flatten();
    let (rank, world) =
        started.map_or((Rank::ZERO, WorldSize::ONE), |started| (started.rank, started.world));
    LaunchError::new(rank, world, source)
}
