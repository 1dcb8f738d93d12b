//! Where ranks run, and what a process does that is one of them. How it joins the others, and how it
//! ends, is in `on_mpi.rs` and `on_gpus.rs`.

#[cfg(any(feature = "mpi", feature = "nccl"))]
use std::error::Error as StdError;
#[cfg(any(feature = "mpi", feature = "nccl"))]
use std::sync::{Arc, mpsc::sync_channel};

#[cfg(any(feature = "mpi", feature = "nccl"))]
use burn::tensor::Device;

use super::{Engine, Ranks};
#[cfg(any(feature = "mpi", feature = "nccl"))]
use super::{Worker, start_rank};
#[cfg(any(feature = "mpi", feature = "nccl"))]
use crate::collectives::Op;
use crate::collectives::comm::Communicator;
use crate::collectives::group::Group;
#[cfg(any(feature = "mpi", feature = "nccl"))]
use crate::error::CollectiveError;
use crate::launch::EngineError;
use crate::launch::env::RankEnv;
#[cfg(any(feature = "mpi", feature = "nccl"))]
use crate::layout::Mesh;
use crate::layout::WorldSize;

/// Where ranks are to run, and how they communicate.
#[derive(Clone, Debug)]
pub(super) enum Place {
    /// As threads of this process, on one device.
    Threads(usize),
    /// As threads of this process, on a GPU each.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "never made without the engine"))]
    ThreadsOnGpus(usize),
    /// Each as a process, of which this is one, over MPI.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "never made without the engine"))]
    Process(RankEnv),
    /// Each as a process, of which this is one, on a GPU of its own.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "never made without the engine"))]
    ProcessOnGpu(RankEnv),
}

/// The device of a launch, as far as the choice of an engine goes.
#[derive(Clone, Debug)]
pub(super) struct Gpus {
    /// What it is called in errors.
    pub(super) device: String,
    /// The GPUs from the device's index on, if it is a CUDA device.
    pub(super) from_here: Option<usize>,
    /// Its index.
    pub(super) first: usize,
}

impl Place {
    /// What is asked for, given what was started and what there is.
    pub(super) fn new(
        engine: Engine,
        ranks: Ranks,
        started: Option<RankEnv>,
        gpus: &Gpus,
    ) -> Result<Self, EngineError> {
        let on_gpus = gpus.from_here.is_some();
        if engine == Engine::Nccl && !cfg!(feature = "nccl") {
            return Err(EngineError::NotCompiled { engine, feature: "cuda" });
        }
        if engine == Engine::Nccl && !on_gpus {
            return Err(EngineError::NotCuda { device: gpus.device.clone() });
        }
        let Some(started) = started else {
            let (Ranks::Exactly(asked) | Ranks::StartedOr(asked)) = ranks;
            return match engine {
                Engine::Mpi => Err(EngineError::NotStarted { world: asked }),
                _ => Self::threads(engine, asked, gpus),
            };
        };
        let (world, starter) = (started.world, started.starter);
        let one = world == WorldSize::ONE;
        match engine {
            Engine::Local if !one => Err(EngineError::SeveralProcesses { started: world, starter }),
            // One process can run any number of thread ranks.
            Engine::Local | Engine::Auto | Engine::Nccl if one => {
                let asked = match ranks {
                    Ranks::Exactly(asked) => asked,
                    Ranks::StartedOr(_) => 1,
                };
                Self::threads(engine, asked, gpus)
            }
            _ => match ranks {
                Ranks::Exactly(asked) if asked != world.size() => {
                    Err(EngineError::WorldMismatch { asked, started: world, starter })
                }
                _ if engine != Engine::Mpi && on_gpus => Ok(Self::ProcessOnGpu(started)),
                _ if cfg!(feature = "mpi") => Ok(Self::Process(started)),
                _ => Err(EngineError::NotCompiled { engine: Engine::Mpi, feature: "mpi" }),
            },
        }
    }

    /// Threads on a GPU each, where there are enough, or else on the one device.
    fn threads(engine: Engine, asked: usize, gpus: &Gpus) -> Result<Self, EngineError> {
        let Gpus { from_here, first, .. } = *gpus;
        match (engine, from_here) {
            (Engine::Nccl, Some(gpus)) if asked > gpus => {
                Err(EngineError::TooFewGpus { ranks: asked, gpus, first })
            }
            (Engine::Nccl, _) => Ok(Self::ThreadsOnGpus(asked)),
            (Engine::Auto, Some(gpus)) if asked > 1 && asked <= gpus => {
                Ok(Self::ThreadsOnGpus(asked))
            }
            _ => Ok(Self::Threads(asked)),
        }
    }
}

/// Runs this process's rank, whose group of all is `group`, and waits for the others' end.
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(super) fn run_rank<T, E, F>(
    group: &Arc<Group>,
    place: &RankEnv,
    device: Device,
    topology: LocalTopology,
    rank: F,
) -> Result<T, Box<dyn StdError + Send + Sync>>
where
    T: Send + 'static,
    E: Into<Box<dyn StdError + Send + Sync>> + 'static,
    F: Fn(Worker) -> Result<T, E> + Send + Sync + 'static,
{
    let worker = Worker {
        mesh: Mesh::new(place.rank, place.world),
        device,
        local_size: topology.local_size,
        comm: Communicator::start(group.clone())?,
    };
    let (sender, result) = sync_channel(1);
    let ended = worker.comm.clone();
    start_rank(worker, topology.threads, Arc::new(rank), move |outcome| {
        // The receiver waits until it has this.
        let _ = sender.send(outcome);
    })?;
    let closed = CollectiveError::Closed { rank: place.rank };
    let result = result.recv().unwrap_or(Err(Box::new(closed)))?;
    // A rank that fails later than this one ends it too.
    let op = Op::new("barrier", "the end of the run");
    ended.issue(move |group| group.exchange(&op, ())).wait()?;
    Ok(result)
}

/// How a machine is shared.
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(super) struct LocalTopology {
    /// Ranks on this machine.
    pub(super) local_size: usize,
    /// Threads of this rank's pool.
    pub(super) threads: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::env::Launcher;

    fn started(world: usize) -> Option<RankEnv> {
        let world = WorldSize::new(world).unwrap();
        let rank = world.ranks().next().unwrap();
        let starter = Launcher::OpenMpi;
        Some(RankEnv { rank, world, local_rank: 0, local_world: None, starter, main_process: None })
    }

    /// The CPU, or so many GPUs.
    fn gpus(from_here: Option<usize>) -> Gpus {
        Gpus { device: "a device".into(), from_here, first: 0 }
    }

    fn place(engine: Engine, ranks: Ranks, started: Option<RankEnv>) -> Result<Place, EngineError> {
        Place::new(engine, ranks, started, &gpus(None))
    }

    #[test]
    fn a_program_by_itself_runs_thread_ranks() {
        for engine in [Engine::Auto, Engine::Local] {
            let place = place(engine, Ranks::Exactly(3), None);
            assert!(matches!(place, Ok(Place::Threads(3))), "{place:?}");
        }
        let error = place(Engine::Mpi, Ranks::Exactly(3), None).unwrap_err();
        assert!(error.to_string().contains("mpirun -n 3"), "{error}");
        let threads = place(Engine::Auto, Ranks::Exactly(3), started(1));
        assert!(matches!(threads, Ok(Place::Threads(3))), "{threads:?}");
        let threads = place(Engine::Auto, Ranks::StartedOr(3), started(1));
        assert!(matches!(threads, Ok(Place::Threads(1))), "{threads:?}");
    }

    #[test]
    fn a_world_that_was_not_asked_for_is_refused() {
        let error = place(Engine::Auto, Ranks::Exactly(4), started(2)).unwrap_err();
        assert!(matches!(error, EngineError::WorldMismatch { asked: 4, .. }), "{error}");
        let error = place(Engine::Local, Ranks::Exactly(2), started(2)).unwrap_err();
        assert!(matches!(error, EngineError::SeveralProcesses { .. }), "{error}");
        let place = place(Engine::Auto, Ranks::StartedOr(4), started(2));
        if cfg!(feature = "mpi") {
            assert!(
                matches!(&place, Ok(Place::Process(env)) if env.world.size() == 2),
                "{place:?}"
            );
        } else {
            assert!(matches!(place, Err(EngineError::NotCompiled { .. })), "{place:?}");
        }
    }

    #[test]
    fn threads_have_a_gpu_each_where_there_are_enough() {
        let on = |engine, ranks, count| {
            Place::new(engine, Ranks::Exactly(ranks), None, &gpus(Some(count)))
        };
        assert!(matches!(on(Engine::Auto, 1, 4), Ok(Place::Threads(1))), "nobody to talk to");
        assert!(matches!(on(Engine::Auto, 4, 4), Ok(Place::ThreadsOnGpus(4))));
        assert!(matches!(on(Engine::Auto, 4, 1), Ok(Place::Threads(4))), "they share it");
        assert!(matches!(on(Engine::Local, 4, 4), Ok(Place::Threads(4))));
        if cfg!(feature = "nccl") {
            assert!(matches!(on(Engine::Nccl, 1, 1), Ok(Place::ThreadsOnGpus(1))));
            let error = on(Engine::Nccl, 4, 2).unwrap_err();
            let expected = EngineError::TooFewGpus { ranks: 4, gpus: 2, first: 0 };
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn processes_on_gpus_use_nccl() {
        let on = |engine| Place::new(engine, Ranks::StartedOr(1), started(2), &gpus(Some(2)));
        assert!(matches!(on(Engine::Auto), Ok(Place::ProcessOnGpu(_))));
        if cfg!(feature = "nccl") {
            assert!(matches!(on(Engine::Nccl), Ok(Place::ProcessOnGpu(_))));
            let error = place(Engine::Nccl, Ranks::StartedOr(1), started(2)).unwrap_err();
            assert!(matches!(error, EngineError::NotCuda { .. }), "{error}");
        } else {
            let error = place(Engine::Nccl, Ranks::StartedOr(1), started(2)).unwrap_err();
            assert!(error.to_string().contains("--features cuda"), "{error}");
        }
    }
}
