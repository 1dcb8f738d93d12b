//! One rank a process: how it finds its place, and how it ends.
//!
//! Which ranks there are is said by the environment ([`RankEnv`]) and confirmed by MPI. The process
//! leaves MPI when it exits: in good order if every launch ended well, and by `MPI_Abort` otherwise,
//! so that no process of the world is left and `mpirun` exits with an error.

use super::{Engine, Ranks};
use crate::env::RankEnv;
use crate::error::EngineError;
use crate::mesh::WorldSize;

/// Where ranks are to run.
#[derive(Clone, Debug)]
pub(super) enum Place {
    /// As threads of this process.
    Threads(usize),
    /// Each as a process, of which this is one.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "never made without an engine"))]
    Process(RankEnv),
}

impl Place {
    /// What is asked for, given what was started.
    pub(super) fn new(
        engine: Engine,
        ranks: Ranks,
        started: Option<RankEnv>,
    ) -> Result<Self, EngineError> {
        let (Ranks::Exactly(asked) | Ranks::StartedOr(asked)) = ranks;
        let Some(started) = started else {
            return match engine {
                Engine::Mpi => Err(EngineError::NotStarted { world: asked }),
                Engine::Auto | Engine::Local => Ok(Self::Threads(asked)),
            };
        };
        let (world, starter) = (started.world, started.starter);
        let one = world == WorldSize::ONE;
        match engine {
            Engine::Local if !one => Err(EngineError::SeveralProcesses { started: world, starter }),
            // One process can run any number of thread ranks.
            Engine::Local | Engine::Auto if one => Ok(Self::Threads(match ranks {
                Ranks::Exactly(asked) => asked,
                Ranks::StartedOr(_) => 1,
            })),
            _ => match ranks {
                Ranks::Exactly(asked) if asked != world.size() => {
                    Err(EngineError::WorldMismatch { asked, started: world, starter })
                }
                _ if cfg!(feature = "mpi") => Ok(Self::Process(started)),
                _ => Err(EngineError::NotCompiled),
            },
        }
    }
}

#[cfg(feature = "mpi")]
pub(super) use on_mpi::run;

#[cfg(feature = "mpi")]
mod on_mpi {
    use std::error::Error as StdError;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc::sync_channel;
    use std::time::Duration;

    use burn::tensor::Device;
    use serde::{Deserialize, Serialize};

    use super::super::{LaunchOptions, Worker, start_rank};
    use crate::collectives::Op;
    use crate::collectives::comm::Communicator;
    use crate::collectives::group::Group;
    use crate::collectives::mpi::{MpiGroup, sys};
    use crate::env::RankEnv;
    use crate::error::{CollectiveError, EngineError, LaunchError};
    use crate::mesh::Mesh;

    /// `mpirun` ends all ranks as soon as one has exited: what the others need to report as well.
    const LAST_WORDS: Duration = Duration::from_millis(300);

    /// Launches under way, and whether one has failed.
    static RUNNING: AtomicUsize = AtomicUsize::new(0);
    static FAILED: AtomicBool = AtomicBool::new(false);

    extern "C" fn leave_mpi() {
        if FAILED.load(Ordering::SeqCst) || RUNNING.load(Ordering::SeqCst) > 0 {
            sys::abort();
        } else {
            sys::finalise();
        }
    }

    /// Joins the other processes.
    fn join(place: &RankEnv, options: &LaunchOptions, debug: bool) -> Result<Group, EngineError> {
        static LEAVES: AtomicBool = AtomicBool::new(false);
        let group = MpiGroup::world(options.timeout, debug);
        let group = group.map_err(|error| EngineError::Mpi { reason: error.to_string() })?;
        if !LEAVES.swap(true, Ordering::SeqCst) {
            // SAFETY: the function takes nothing, returns nothing and does not unwind.
            unsafe { libc::atexit(leave_mpi) };
        }
        let (mpi_rank, mpi_world) = (group.rank(), group.members().len());
        if (mpi_rank, mpi_world) != (place.rank, place.world.size()) {
            return Err(EngineError::NotJoined {
                starter: place.starter,
                rank: place.rank,
                world: place.world,
                mpi_rank,
                mpi_world,
            });
        }
        Ok(Group::Mpi(group))
    }

    /// The machine a process runs on, and which of its cores it may use.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Seat {
        machine: String,
        cores: Vec<usize>,
    }

    impl Seat {
        fn own() -> Self {
            Self { machine: MpiGroup::machine(), cores: cores() }
        }
    }

    #[cfg(target_os = "linux")]
    fn cores() -> Vec<usize> {
        // SAFETY: a set of cores is plain bits, and the call writes no more than its size.
        let set = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set);
            set
        };
        let count = usize::try_from(libc::CPU_SETSIZE).unwrap_or(0);
        // SAFETY: the number is below the set's size.
        (0..count).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
    }

    #[cfg(not(target_os = "linux"))]
    fn cores() -> Vec<usize> {
        Vec::new()
    }

    /// Runs this process's rank.
    pub(crate) fn run<T, E, F>(
        place: &RankEnv,
        options: &LaunchOptions,
        device: Device,
        debug: bool,
        rank: F,
    ) -> Result<Vec<T>, LaunchError>
    where
        T: Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>> + 'static,
        F: Fn(Worker) -> Result<T, E> + Send + Sync + 'static,
    {
        RUNNING.fetch_add(1, Ordering::SeqCst);
        let failed = |rank, source| LaunchError { rank, world: place.world, source };
        let outcome = match join(place, options, debug) {
            Err(error) => Err(failed(place.rank, Box::new(error))),
            Ok(group) => {
                let group = Arc::new(group);
                run_rank(&group, place, options, device, rank).map_err(|source| {
                    let blamed = group.failure().and_then(|failure| failure.blames());
                    failed(blamed.unwrap_or(place.rank), source)
                })
            }
        };
        if outcome.is_err() {
            FAILED.store(true, Ordering::SeqCst);
            std::thread::sleep(LAST_WORDS);
        }
        RUNNING.fetch_sub(1, Ordering::SeqCst);
        outcome.map(|result| vec![result])
    }

    fn run_rank<T, E, F>(
        group: &Arc<Group>,
        place: &RankEnv,
        options: &LaunchOptions,
        device: Device,
        rank: F,
    ) -> Result<T, Box<dyn StdError + Send + Sync>>
    where
        T: Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>> + 'static,
        F: Fn(Worker) -> Result<T, E> + Send + Sync + 'static,
    {
        let seat = Seat::own();
        let seats = group.exchange(&Op::new("all_gather", "the machines"), seat.clone())?;
        let local_size = seats.iter().filter(|other| other.machine == seat.machine).count();
        // `mpirun` binds processes to cores of their own, unless told otherwise.
        let sharing = seats.iter().filter(|other| ***other == seat).count();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads_per_rank.unwrap_or((cores / sharing.max(1)).max(1));

        let worker = Worker {
            mesh: Mesh::new(place.rank, place.world),
            device,
            local_size,
            comm: Communicator::start(group.clone())?,
        };
        let (sender, result) = sync_channel(1);
        let ended = worker.comm.clone();
        start_rank(worker, threads, Arc::new(rank), move |outcome| {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Starter;

    fn started(world: usize) -> Option<RankEnv> {
        let world = WorldSize::new(world).unwrap();
        let rank = world.ranks().next().unwrap();
        let starter = Starter::OpenMpi;
        Some(RankEnv { rank, world, local_rank: 0, local_world: None, starter, main_process: None })
    }

    #[test]
    fn a_program_by_itself_runs_thread_ranks() {
        for engine in [Engine::Auto, Engine::Local] {
            let place = Place::new(engine, Ranks::Exactly(3), None);
            assert!(matches!(place, Ok(Place::Threads(3))), "{place:?}");
        }
        let error = Place::new(Engine::Mpi, Ranks::Exactly(3), None).unwrap_err();
        assert!(error.to_string().contains("mpirun -n 3"), "{error}");
        let place = Place::new(Engine::Auto, Ranks::Exactly(3), started(1));
        assert!(matches!(place, Ok(Place::Threads(3))), "{place:?}");
        let place = Place::new(Engine::Auto, Ranks::StartedOr(3), started(1));
        assert!(matches!(place, Ok(Place::Threads(1))), "{place:?}");
    }

    #[test]
    fn a_world_that_was_not_asked_for_is_refused() {
        let error = Place::new(Engine::Auto, Ranks::Exactly(4), started(2)).unwrap_err();
        assert!(matches!(error, EngineError::WorldMismatch { asked: 4, .. }), "{error}");
        let error = Place::new(Engine::Local, Ranks::Exactly(2), started(2)).unwrap_err();
        assert!(matches!(error, EngineError::SeveralProcesses { .. }), "{error}");
        let place = Place::new(Engine::Auto, Ranks::StartedOr(4), started(2));
        if cfg!(feature = "mpi") {
            assert!(
                matches!(&place, Ok(Place::Process(env)) if env.world.size() == 2),
                "{place:?}"
            );
        } else {
            assert!(matches!(place, Err(EngineError::NotCompiled)), "{place:?}");
        }
    }
}
