//! Ranks with a GPU each, as threads of this process or as processes, over NCCL.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;

use super::env::RankEnv;
use super::error::EngineError;
use super::options::LaunchOptions;
use super::process::{EXIT_DELAY, LocalTopology, Machines, launch_error, run_rank};
use super::rank_thread::{BoxedError, RankProgram};
use crate::collectives::Op;
use crate::collectives::cuda::{device_count, index_of};
use crate::collectives::group::AnyProcessGroup;
use crate::collectives::local::Hub;
use crate::collectives::nccl::NcclGroup;
use crate::collectives::store::{Heartbeats, HostGroup, Rendezvous, RunSecret, SECRET_VARIABLE};
use crate::error::{CollectiveError, LaunchError, with_causes};
use crate::layout::{Rank, WorldSize};

/// Returns the GPU with this index as a device with autodiff.
fn gpu(index: usize) -> Device {
    Device::cuda(index).autodiff()
}

/// Runs every rank as a thread, rank 0 on `device` and each further rank on the next GPU.
pub(super) fn threads<T: Send + 'static>(
    world: WorldSize,
    options: &LaunchOptions,
    device: &Device,
    debug: bool,
    program: RankProgram<T>,
) -> Result<Vec<T>, LaunchError> {
    let first = index_of(device).unwrap_or(0);
    let hub = Hub::new(world, options.timeout, debug);
    let heartbeats = Heartbeats::new(world);
    let join = |rank: Rank| -> Result<(AnyProcessGroup, Device), BoxedError> {
        let host = HostGroup::thread(hub.clone(), heartbeats.clone(), rank);
        let index = first + rank.index();
        Ok((AnyProcessGroup::Nccl(NcclGroup::world(host, index)?), gpu(index)))
    };
    // Each rank joins on a thread of its own, since joining waits for all ranks.
    let ends: Vec<_> = std::thread::scope(|scope| {
        let joining: Vec<_> =
            world.ranks().map(|rank| (rank, scope.spawn(move || join(rank)))).collect();
        let joined = joining.into_iter().map(|(rank, joining)| {
            let panicked = || Err(BoxedError::from("a thread panicked while it joined the others"));
            (rank, joining.join().unwrap_or_else(|_| panicked()))
        });
        joined.collect()
    });
    let mut joined = Vec::with_capacity(world.size());
    for (rank, end) in ends {
        let failed = hub.failure().and_then(|failure| failure.failed_rank()).unwrap_or(rank);
        joined.push(end.map_err(|source| LaunchError::new(failed, world, source))?);
    }
    super::threads::run(&hub, world, joined, options, program)
}

/// Runs two ranks as threads on one device, over a NCCL that works in host memory.
#[cfg(all(test, feature = "cpu"))]
pub(crate) fn two_ranks_on_host(
    device: &Device,
    program: impl Fn(&super::Worker) -> Result<(), crate::Error> + Send + Sync + 'static,
) -> Result<(), LaunchError> {
    use crate::collectives::nccl::fake;
    let world = WorldSize::new(2).expect("two ranks are a world");
    let options = LaunchOptions::new(2);
    let hub = Hub::new(world, options.timeout, false);
    let heartbeats = Heartbeats::new(world);
    let join = |rank: Rank| {
        let host = HostGroup::thread(hub.clone(), heartbeats.clone(), rank);
        let group = NcclGroup::on_host(host, fake::library(), true).expect("a communicator");
        (AnyProcessGroup::Nccl(group), device.clone().autodiff())
    };
    let ends = std::thread::scope(|scope| {
        let joining: Vec<_> = world.ranks().map(|rank| scope.spawn(move || join(rank))).collect();
        joining.into_iter().map(|joining| joining.join().expect("a rank")).collect()
    });
    let program = Arc::new(move |worker| program(&worker).map_err(BoxedError::from));
    super::threads::run(&hub, world, ends, &options, program).map(drop)
}

/// Runs the rank of this process, and returns its result.
pub(super) fn run<T: Send + 'static>(
    env: &RankEnv,
    options: &LaunchOptions,
    device: &Device,
    debug: bool,
    program: RankProgram<T>,
) -> Result<Vec<T>, LaunchError> {
    let (group, device) = join(env, options, device, debug)
        .map_err(|source| LaunchError::new(env.rank, env.world, source))?;
    let mut machines = Machines::new();
    let topology = topology(&group, env, options, &mut machines);
    let outcome = topology.and_then(|topology| run_rank(&group, env, device, topology, program));
    let outcome = outcome.map_err(|source| launch_error(group.failure(), env, &machines, source));
    if let Err(error) = &outcome {
        // The other ranks may not know of the failure yet.
        let (rank, reason) = (env.rank, with_causes(&*error.source));
        group.fail(CollectiveError::PeerFailed { rank, reason });
        std::thread::sleep(EXIT_DELAY);
    }
    if let AnyProcessGroup::Nccl(group) = &*group {
        group.leave();
    }
    outcome.map(|result| vec![result])
}

/// Joins the other processes, and returns the process group and the GPU of this process.
fn join(
    env: &RankEnv,
    options: &LaunchOptions,
    device: &Device,
    debug: bool,
) -> Result<(Arc<AnyProcessGroup>, Device), BoxedError> {
    let no_main = EngineError::NoMainProcess { launcher: env.launcher };
    let rendezvous = rendezvous(env, options.timeout, debug).ok_or(no_main)?;
    let index =
        own_gpu(env, index_of(device).unwrap_or(0), device_count().map_err(EngineError::from)?);
    let host = HostGroup::process(&rendezvous).map_err(EngineError::from)?;
    let group = NcclGroup::world(host, index)?;
    Ok((Arc::new(AnyProcessGroup::Nccl(group)), gpu(index)))
}

/// Returns the address at which the processes of this launch connect, from the environment; `None`
/// if the environment has no address of rank 0.
fn rendezvous(env: &RankEnv, timeout: Duration, debug: bool) -> Option<Rendezvous<'_>> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let main = env.main_process.as_ref()?;
    // torchrun's agent may use the port for its own store; the next port is used then.
    let port = match variable("TORCHELASTIC_USE_AGENT_STORE").as_str() {
        "True" => main.port.checked_add(1).unwrap_or(main.port - 1),
        _ => main.port,
    };
    // `fsdp launch` names the run differently on each machine; torchrun's name is equal on all
    // machines.
    let one_machine = env.local_world == Some(env.world.size());
    let launcher = if one_machine { variable("FSDP_RUN_ID") } else { String::new() };
    let run = launcher + &variable("TORCHELASTIC_RUN_ID");
    let (rank, world, host) = (env.rank, env.world, main.host.as_str());
    let secret = RunSecret::new(variable(SECRET_VARIABLE));
    let listen = Some(variable("FSDP_LISTEN")).filter(|address| !address.is_empty());
    Some(Rendezvous { rank, world, host, port, run, secret, listen, timeout, debug })
}

/// Returns the index of a process's GPU: `first` plus the process's number on its machine.
///
/// A launcher may make only one GPU visible to each process; its index is 0. Joining fails if two
/// processes have the same GPU.
fn own_gpu(env: &RankEnv, first: usize, count: usize) -> usize {
    if count == 1 { 0 } else { first + env.local_rank }
}

/// Returns the number of ranks on this machine, and the number of threads of this rank. Writes the
/// names of the ranks' machines to `machines`.
fn topology(
    group: &AnyProcessGroup,
    env: &RankEnv,
    options: &LaunchOptions,
    machines: &mut Machines,
) -> Result<LocalTopology, BoxedError> {
    let machine = machine_name();
    let all = group.exchange(&Op::new("all_gather", "the machines"), machine.clone())?;
    *machines = all.iter().map(|machine| (**machine).clone()).collect();
    let named = machines.iter().filter(|other| **other == machine).count();
    let local_size = env.local_world.unwrap_or(named).max(1);
    Ok(LocalTopology { local_size, threads: options.threads(local_size, 1) })
}

/// Returns the name of this machine; an empty one where the system has none.
fn machine_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim_end().to_string()
}

#[cfg(test)]
mod tests;
