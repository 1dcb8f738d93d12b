//! Ranks that are threads of this process.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use burn::tensor::Device;

use super::device_panic::{DeviceWatch, GRACE, POLL};
use super::options::LaunchOptions;
use super::rank_thread::{BoxedError, RankProgram, start_rank};
use super::worker::Worker;
use crate::collectives::comm::Communicator;
use crate::collectives::group::AnyProcessGroup;
use crate::collectives::local::{Hub, LocalGroup};
use crate::error::{CollectiveError, LaunchError};
use crate::layout::{Mesh, Rank, WorldSize};

/// Runs every rank as a thread on one device; ranks communicate over the engine `local`.
pub(super) fn on_one_device<T: Send + 'static>(
    world: WorldSize,
    device: &Device,
    options: &LaunchOptions,
    debug: bool,
    program: RankProgram<T>,
) -> Result<Vec<T>, LaunchError> {
    let hub = Hub::new(world, options.timeout, debug);
    let end = |rank| (AnyProcessGroup::Local(LocalGroup::new(hub.clone(), rank)), device.clone());
    let ends = world.ranks().map(end).collect();
    run(&hub, world, ends, options, program)
}

/// Runs every rank as a thread. `ends` has the process group and the device of each rank, in rank
/// order.
pub(super) fn run<T: Send + 'static>(
    hub: &Hub,
    world: WorldSize,
    ends: Vec<(AnyProcessGroup, Device)>,
    options: &LaunchOptions,
    program: RankProgram<T>,
) -> Result<Vec<T>, LaunchError> {
    let threads = options.threads(world.size(), world.size());
    let devices = DeviceWatch::start();
    let (sender, outcomes) = channel();
    for (index, (group, device)) in world.ranks().zip(ends) {
        let start = || -> std::io::Result<()> {
            let mesh = Mesh::new(index, world);
            let comm = Communicator::start(Arc::new(group))?;
            let worker = Worker::new(mesh, device, world.size(), comm);
            let sender = sender.clone();
            start_rank(worker, threads, program.clone(), move |outcome| {
                // Nobody receives it where the launch has returned without this rank.
                let _ = sender.send((index, outcome));
            })
        };
        if let Err(error) = start() {
            hub.fail(CollectiveError::PeerFailed { rank: index, reason: error.to_string() });
            return Err(LaunchError::new(index, world, BoxedError::from(error)));
        }
    }
    drop(sender);
    collect(&outcomes, hub, world, options.timeout, &devices)
}

/// The result or the error of a rank that has ended.
type Outcome<T> = (Rank, Result<T, BoxedError>);

/// Waits for all ranks, for at most `timeout` after the first failure, and returns the results in
/// rank order or the error that was the cause. A panic on the thread of a device is a failure too.
fn collect<T>(
    outcomes: &Receiver<Outcome<T>>,
    hub: &Hub,
    world: WorldSize,
    timeout: Duration,
    devices: &DeviceWatch,
) -> Result<Vec<T>, LaunchError> {
    let mut results: Vec<Option<T>> = world.ranks().map(|_| None).collect();
    let mut errors: Vec<(Rank, BoxedError)> = Vec::new();
    let mut deadline: Option<Instant> = None;
    let mut running = world.size();
    while running > 0 {
        if let Some(panic) = devices.panic() {
            let reason = panic.to_string();
            hub.fail(CollectiveError::PeerFailed { rank: Rank::ZERO, reason });
            errors.push((Rank::ZERO, Box::new(panic)));
            let ended = Instant::now() + GRACE;
            deadline = Some(deadline.map_or(ended, |deadline| deadline.min(ended)));
        }
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            break;
        }
        match outcomes.recv_timeout(POLL) {
            Ok((rank, outcome)) => {
                running -= 1;
                match outcome {
                    Ok(result) => results[rank.index()] = Some(result),
                    Err(error) => {
                        deadline.get_or_insert_with(|| Instant::now() + timeout);
                        errors.push((rank, error));
                    }
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    if errors.is_empty() {
        return Ok(results.into_iter().flatten().collect());
    }
    // The other ranks fail because of the first failure: their errors are not the cause.
    let blamed = hub.failure().and_then(|failure| failure.failed_rank());
    let cause = errors.iter().position(|(rank, _)| Some(*rank) == blamed).unwrap_or(0);
    let (rank, source) = errors.swap_remove(cause);
    Err(LaunchError::new(blamed.unwrap_or(rank), world, source))
}
