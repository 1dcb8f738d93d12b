//! A process that is a rank over MPI.
//!
//! The environment ([`RankEnv`]) says which rank this is, and MPI confirms it. The process
//! finalizes MPI when it exits if every launch ended well. Otherwise it calls `MPI_Abort`, so that
//! no process of the world is left and `mpirun` exits with an error.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use super::env::RankEnv;
use super::error::EngineError;
use super::options::LaunchOptions;
use super::process::{EXIT_DELAY, LocalTopology, Machines, launch_error, run_rank};
use super::rank_thread::{BoxedError, RankProgram};
use crate::collectives::Op;
use crate::collectives::group::AnyProcessGroup;
use crate::collectives::mpi::{MpiGroup, sys};
use crate::error::LaunchError;

/// Number of launches in this process that have not ended.
static RUNNING: AtomicUsize = AtomicUsize::new(0);
/// Whether a launch in this process has failed.
static FAILED: AtomicBool = AtomicBool::new(false);

/// Finalizes MPI, or aborts the MPI world with the exit code of this process.
fn leave_mpi(code: libc::c_int) {
    if FAILED.load(Ordering::SeqCst) || RUNNING.load(Ordering::SeqCst) > 0 {
        sys::abort(if code == 0 { 1 } else { code });
    } else {
        sys::finalise();
    }
}

/// Makes the process leave MPI when it exits. glibc passes the exit code on, from which a launcher
/// sees whether a restart may help.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn leave_mpi_at_exit() {
    extern "C" fn leave(code: libc::c_int, _: *mut libc::c_void) {
        leave_mpi(code);
    }
    unsafe extern "C" {
        fn on_exit(
            function: extern "C" fn(libc::c_int, *mut libc::c_void),
            argument: *mut libc::c_void,
        ) -> libc::c_int;
    }
    // SAFETY: the function does not unwind, and does not use its argument.
    unsafe { on_exit(leave, std::ptr::null_mut()) };
}

/// Makes the process leave MPI when it exits.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn leave_mpi_at_exit() {
    extern "C" fn leave() {
        leave_mpi(1);
    }
    // SAFETY: the function takes nothing, returns nothing and does not unwind.
    unsafe { libc::atexit(leave) };
}

/// Time that MPI itself may take to start on a busy machine.
const START: Duration = Duration::from_secs(10);

/// Ends this process with an error if the returned sender still exists after the time-out and [`START`].
///
/// `MPI_Init` waits for all machines without a bound, and cannot be cancelled.
fn bound_start(env: &RankEnv, timeout: Duration) -> std::io::Result<SyncSender<()>> {
    let (running, ended) = sync_channel(0);
    let (rank, world) = (env.rank, env.world);
    std::thread::Builder::new().name("fsdp-mpi-start".into()).spawn(move || {
        // Ranks that have started MPI wait for as long as the time-out, and name the rank that is late.
        let timeout = timeout.saturating_add(START);
        if ended.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
            let reason = sys::MpiError::NotStarted { timeout }.to_string();
            let error = BoxedError::from(EngineError::Mpi { reason });
            eprintln!("Error: {}", LaunchError::new(rank, world, error));
            // SAFETY: the call does not return. Exit handlers of MPI might wait for its start.
            unsafe { libc::_exit(1) };
        }
    })?;
    Ok(running)
}

/// Joins the other processes of the MPI world.
fn join(
    env: &RankEnv,
    options: &LaunchOptions,
    debug: bool,
) -> Result<AnyProcessGroup, EngineError> {
    static EXIT_HANDLER: AtomicBool = AtomicBool::new(false);
    let unusable = |reason: String| EngineError::Mpi { reason };
    let starting =
        bound_start(env, options.timeout).map_err(|error| unusable(error.to_string()))?;
    let group = MpiGroup::world(options.timeout, debug);
    drop(starting);
    let group = group.map_err(|error| unusable(error.to_string()))?;
    if !EXIT_HANDLER.swap(true, Ordering::SeqCst) {
        leave_mpi_at_exit();
    }
    let (mpi_rank, mpi_world) = (group.rank(), group.members().len());
    if (mpi_rank, mpi_world) != (env.rank, env.world.size()) {
        return Err(EngineError::NotJoined {
            launcher: env.launcher,
            rank: env.rank,
            world: env.world,
            mpi_rank,
            mpi_world,
        });
    }
    Ok(AnyProcessGroup::Mpi(group))
}

/// The machine of a process, and the cores that the process may use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct MachineCores {
    machine: String,
    cores: Vec<usize>,
}

impl MachineCores {
    /// Returns the machine and the cores of this process.
    fn own() -> Self {
        Self { machine: MpiGroup::machine(), cores: cores() }
    }
}

/// Returns the numbers of the cores that this process may use.
#[cfg(target_os = "linux")]
fn cores() -> Vec<usize> {
    // SAFETY: all-zero bits are a valid `cpu_set_t`, and the call writes at most the size it is
    // given.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set);
        set
    };
    let count = usize::try_from(libc::CPU_SETSIZE).unwrap_or(0);
    // SAFETY: `core` is below `CPU_SETSIZE`.
    (0..count).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

/// Returns an empty list: all ranks of a machine then count as sharing the cores.
#[cfg(not(target_os = "linux"))]
fn cores() -> Vec<usize> {
    Vec::new()
}

/// Runs the rank of this process, and returns its result.
pub(super) fn run<T: Send + 'static>(
    env: &RankEnv,
    options: &LaunchOptions,
    device: Device,
    debug: bool,
    program: RankProgram<T>,
) -> Result<Vec<T>, LaunchError> {
    RUNNING.fetch_add(1, Ordering::SeqCst);
    let outcome = match join(env, options, debug) {
        Err(error) => Err(LaunchError::new(env.rank, env.world, BoxedError::from(error))),
        Ok(group) => {
            let (group, mut machines) = (Arc::new(group), Machines::new());
            let topology = topology(&group, options, &mut machines);
            let ended =
                topology.and_then(|topology| run_rank(&group, env, device, topology, program));
            ended.map_err(|source| launch_error(group.failure(), env, &machines, source))
        }
    };
    if outcome.is_err() {
        FAILED.store(true, Ordering::SeqCst);
        std::thread::sleep(EXIT_DELAY);
    }
    RUNNING.fetch_sub(1, Ordering::SeqCst);
    outcome.map(|result| vec![result])
}

/// Returns the number of ranks on this machine, and the number of threads of this rank. Writes the
/// names of the ranks' machines to `machines`.
fn topology(
    group: &AnyProcessGroup,
    options: &LaunchOptions,
    machines: &mut Machines,
) -> Result<LocalTopology, BoxedError> {
    let own = MachineCores::own();
    let all = group.exchange(&Op::new("all_gather", "the machines"), own.clone())?;
    *machines = all.iter().map(|rank| rank.machine.clone()).collect();
    let local_size = all.iter().filter(|other| other.machine == own.machine).count();
    // By default `mpirun` binds each process to separate cores, so only ranks with equal sets share
    // cores.
    let sharing = all.iter().filter(|other| ***other == own).count();
    Ok(LocalTopology { local_size, threads: options.threads(sharing, 1) })
}
