//! Ranks with a GPU each: threads of this process, or this process as one of several.

use std::error::Error as StdError;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;

use super::process::{LocalTopology, run_rank};
use super::{LaunchOptions, Worker, refused};
use crate::collectives::Op;
use crate::collectives::cuda::{device_count, index_of};
use crate::collectives::group::Group;
use crate::collectives::local::Hub;
use crate::collectives::nccl::NcclGroup;
use crate::collectives::store::{Host, Rendezvous, Roll};
use crate::error::{CollectiveError, LaunchError};
use crate::launch::EngineError;
use crate::launch::env::RankEnv;
use crate::layout::{Rank, WorldSize};

type Boxed = Box<dyn StdError + Send + Sync>;

/// A launcher ends all ranks as soon as one has exited: what the others need to report as well.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// The GPU of that index, as a rank's device.
fn gpu(index: usize) -> Device {
    Device::cuda(index).autodiff()
}

/// Runs every rank as a thread, the first on `device`, the others on the GPUs after it.
pub(super) fn threads<T, E, F>(
    world: usize,
    options: &LaunchOptions,
    device: &Device,
    debug: bool,
    rank: F,
) -> Result<Vec<T>, LaunchError>
where
    T: Send + 'static,
    E: Into<Boxed> + 'static,
    F: Fn(Worker) -> Result<T, E> + Send + Sync + 'static,
{
    let world = WorldSize::new(world).map_err(|error| refused(Box::new(error)))?;
    let first = index_of(device).unwrap_or(0);
    let hub = Hub::new(world, options.timeout, debug);
    let roll = Roll::new(world);
    let seat = |rank: Rank| -> Result<(Group, Device), Boxed> {
        let host = Host::thread(hub.clone(), roll.clone(), rank);
        let index = first + rank.index();
        Ok((Group::Nccl(NcclGroup::world(host, index)?), gpu(index)))
    };
    // Each joins on a thread of its own, as all must come.
    let topology: Vec<_> = std::thread::scope(|scope| {
        let joining: Vec<_> =
            world.ranks().map(|rank| (rank, scope.spawn(move || seat(rank)))).collect();
        let joined = joining.into_iter().map(|(rank, joining)| {
            let panicked = || Err(Boxed::from("a thread panicked while it joined the others"));
            (rank, joining.join().unwrap_or_else(|_| panicked()))
        });
        joined.collect()
    });
    let mut joined = Vec::with_capacity(world.size());
    for (rank, seat) in topology {
        let blamed = hub.failure().and_then(|failure| failure.failed_rank()).unwrap_or(rank);
        joined.push(seat.map_err(|source| LaunchError {
            rank: blamed,
            world,
            source: source.into(),
        })?);
    }
    super::threads(&hub, world, joined, options, rank)
}

/// Runs this process's rank.
pub(super) fn run<T, E, F>(
    place: &RankEnv,
    options: &LaunchOptions,
    device: &Device,
    debug: bool,
    rank: F,
) -> Result<Vec<T>, LaunchError>
where
    T: Send + 'static,
    E: Into<Boxed> + 'static,
    F: Fn(Worker) -> Result<T, E> + Send + Sync + 'static,
{
    let failed =
        |rank, source: Boxed| LaunchError { rank, world: place.world, source: source.into() };
    let (group, device) =
        join(place, options, device, debug).map_err(|source| failed(place.rank, source))?;
    let topology = topology(&group, place, options);
    let outcome = topology.and_then(|topology| run_rank(&group, place, device, topology, rank));
    let outcome = outcome.map_err(|source| {
        let blamed = group.failure().and_then(|failure| failure.failed_rank());
        failed(blamed.unwrap_or(place.rank), source)
    });
    if let Err(error) = &outcome {
        // Unless the others know of it already.
        let (rank, reason) = (place.rank, error.source.to_string());
        group.fail(CollectiveError::PeerFailed { rank, reason });
        std::thread::sleep(LAST_WORDS);
    }
    if let Group::Nccl(group) = &*group {
        group.leave();
    }
    outcome.map(|result| vec![result])
}

/// Joins the other processes, with the GPU that is this one's.
fn join(
    place: &RankEnv,
    options: &LaunchOptions,
    device: &Device,
    debug: bool,
) -> Result<(Arc<Group>, Device), Boxed> {
    let no_main = EngineError::NoMainProcess { starter: place.starter };
    let meeting = meeting(place, options.timeout, debug).ok_or(no_main)?;
    let index =
        own_gpu(place, index_of(device).unwrap_or(0), device_count().map_err(EngineError::from)?);
    let host = Host::process(&meeting).map_err(EngineError::from)?;
    let group = NcclGroup::world(host, index)?;
    Ok((Arc::new(Group::Nccl(group)), gpu(index)))
}

/// Returns where the processes of this launch meet, from the environment; `None` where it names no
/// main process.
fn meeting(place: &RankEnv, timeout: Duration, debug: bool) -> Option<Rendezvous<'_>> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let main = place.main_process.as_ref()?;
    // torchrun's agent may keep the port for a store of its own.
    let port = match variable("TORCHELASTIC_USE_AGENT_STORE").as_str() {
        "True" => main.port.checked_add(1).unwrap_or(main.port - 1),
        _ => main.port,
    };
    // Each machine's `fsdp launch` names a run of its own; torchrun's name is the same on all.
    let one_machine = place.local_world == Some(place.world.size());
    let launcher = if one_machine { variable("FSDP_RUN_ID") } else { String::new() };
    let run = launcher + &variable("TORCHELASTIC_RUN_ID");
    let (rank, world, host) = (place.rank, place.world, main.host.as_str());
    Some(Rendezvous { rank, world, host, port, run, timeout, debug })
}

/// The GPU of a process: the first one for the first process of a machine, and so on. Where a
/// launcher shows each process one GPU alone, that one; two that are shown the same are found later.
fn own_gpu(place: &RankEnv, first: usize, count: usize) -> usize {
    if count == 1 { 0 } else { first + place.local_rank }
}

/// Who shares this machine.
fn topology(
    group: &Group,
    place: &RankEnv,
    options: &LaunchOptions,
) -> Result<LocalTopology, Boxed> {
    let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let machines = group.exchange(&Op::new("all_gather", "the machines"), machine.clone())?;
    let named = machines.iter().filter(|other| ***other == machine).count();
    let local_size = place.local_world.unwrap_or(named).max(1);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = options.threads_per_rank.unwrap_or((cores / local_size).max(1));
    Ok(LocalTopology { local_size, threads })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::env::Launcher;

    #[test]
    fn a_process_has_the_gpu_of_its_place_on_its_machine() {
        let world = WorldSize::new(8).unwrap();
        let place = |local_rank| RankEnv {
            rank: world.ranks().nth(4 + local_rank).unwrap(),
            world,
            local_rank,
            local_world: Some(4),
            starter: Launcher::Torchrun,
            main_process: None,
        };
        assert_eq!((own_gpu(&place(0), 0, 4), own_gpu(&place(3), 0, 4)), (0, 3));
        assert_eq!(own_gpu(&place(1), 2, 4), 3, "after the first one asked for");
        assert_eq!(own_gpu(&place(3), 0, 1), 0, "the only one it is shown");
    }
}
