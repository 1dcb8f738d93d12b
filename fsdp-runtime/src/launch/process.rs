//! The rank of a process that is one of several processes.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use burn::tensor::Device;

use super::device_panic::{DeviceWatch, GRACE, POLL};
use super::env::RankEnv;
use super::rank_thread::{BoxedError, RankProgram, start_rank};
use super::worker::Worker;
use crate::collectives::Op;
use crate::collectives::comm::Communicator;
use crate::collectives::group::AnyProcessGroup;
use crate::error::{CollectiveError, LaunchError};
use crate::layout::Mesh;

/// Time that a failed rank waits before it exits. A launcher kills all ranks as soon as one has
/// exited, and the other ranks need this time to report their errors.
pub(super) const EXIT_DELAY: Duration = Duration::from_millis(300);

/// The ranks of one machine.
pub(super) struct LocalTopology {
    /// Number of ranks on this machine.
    pub(super) local_size: usize,
    /// Number of threads of this rank's pool.
    pub(super) threads: usize,
}

/// The name of each rank's machine, by rank; empty until the ranks have met.
pub(super) type Machines = Vec<String>;

/// Runs this process's rank, whose process group of all ranks is `group`, and waits until every
/// rank has ended.
pub(super) fn run_rank<T: Send + 'static>(
    group: &Arc<AnyProcessGroup>,
    env: &RankEnv,
    device: Device,
    topology: LocalTopology,
    program: RankProgram<T>,
) -> Result<T, BoxedError> {
    let mesh = Mesh::new(env.rank, env.world);
    let comm = Communicator::start(group.clone())?;
    let worker = Worker::new(mesh, device, topology.local_size, comm.clone());
    let devices = DeviceWatch::start();
    let (sender, result) = sync_channel(1);
    start_rank(worker, topology.threads, program, move |outcome| {
        // The receiver below waits for the outcome.
        let _ = sender.send(outcome);
    })?;
    let result = outcome(&result, env, &devices)?;
    // A rank that fails after this one has ended fails this one too.
    let op = Op::new("barrier", "the end of the run");
    comm.issue(move |group| group.exchange(&op, ())).wait()?;
    Communicator::end(comm);
    Ok(result)
}

/// Waits for the rank. After a panic on the thread of a device the rank has a moment to end by itself.
fn outcome<T>(
    result: &Receiver<Result<T, BoxedError>>,
    env: &RankEnv,
    devices: &DeviceWatch,
) -> Result<T, BoxedError> {
    let closed = || Err(BoxedError::from(CollectiveError::Closed { rank: env.rank }));
    loop {
        match result.recv_timeout(POLL) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Disconnected) => return closed(),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(panic) = devices.panic() {
            return match result.recv_timeout(GRACE) {
                Ok(Err(error)) => Err(error),
                _ => Err(Box::new(panic)),
            };
        }
    }
}

/// Converts an error of this process's rank into that of the launch, preferring the rank that
/// failed first. `failure` is that of the process group.
pub(super) fn launch_error(
    failure: Option<CollectiveError>,
    env: &RankEnv,
    machines: &Machines,
    source: BoxedError,
) -> LaunchError {
    let rank = failure.and_then(|failure| failure.failed_rank()).unwrap_or(env.rank);
    let several = machines.iter().any(|machine| *machine != machines[0]);
    let machine = machines.get(rank.index()).filter(|_| several).cloned();
    LaunchError { rank, world: env.world, machine, source: source.into() }
}
