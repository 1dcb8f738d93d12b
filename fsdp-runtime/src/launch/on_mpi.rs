//! A process that is a rank over MPI.
//!
//! Which ranks there are is said by the environment ([`RankEnv`]) and confirmed by MPI. The process
//! leaves MPI when it exits: in good order if every launch ended well, and by `MPI_Abort` otherwise,
//! so that no process of the world is left and `mpirun` exits with an error.

use std::error::Error as StdError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use super::process::{LocalTopology, run_rank};
use super::{LaunchOptions, Worker};
use crate::collectives::Op;
use crate::collectives::group::Group;
use crate::collectives::mpi::{MpiGroup, sys};
use crate::error::LaunchError;
use crate::launch::EngineError;
use crate::launch::env::RankEnv;

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
pub(super) fn run<T, E, F>(
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
    let failed = |rank, source: Box<dyn StdError + Send + Sync>| LaunchError {
        rank,
        world: place.world,
        source: source.into(),
    };
    let outcome = match join(place, options, debug) {
        Err(error) => Err(failed(place.rank, Box::new(error))),
        Ok(group) => {
            let group = Arc::new(group);
            let topology = topology(&group, options);
            let ended =
                topology.and_then(|topology| run_rank(&group, place, device, topology, rank));
            ended.map_err(|source| {
                let blamed = group.failure().and_then(|failure| failure.failed_rank());
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

/// Who shares this machine.
fn topology(
    group: &Group,
    options: &LaunchOptions,
) -> Result<LocalTopology, Box<dyn StdError + Send + Sync>> {
    let seat = Seat::own();
    let topology = group.exchange(&Op::new("all_gather", "the machines"), seat.clone())?;
    let local_size = topology.iter().filter(|other| other.machine == seat.machine).count();
    // `mpirun` binds processes to cores of their own, unless told otherwise.
    let sharing = topology.iter().filter(|other| ***other == seat).count();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = options.threads_per_rank.unwrap_or((cores / sharing.max(1)).max(1));
    Ok(LocalTopology { local_size, threads })
}
