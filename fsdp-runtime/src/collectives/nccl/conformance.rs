//! Conformance tests of the engine `nccl`, with threads and with the store: on a NCCL that works in
//! host memory, and on NVIDIA's with as many GPUs as the machine has.
//!
//! On a machine with GPUs: `cargo test --release --features cuda --lib nccl -- --nocapture`.

use std::cell::RefCell;
use std::time::Instant;

use burn_cubecl::CubeBackend;
use burn_cubecl::CubeDevice;
use cubecl::device::CudaDevice;

use super::*;
use crate::backend::BUSY;
use crate::collectives::local::Hub;
use crate::collectives::nccl::{MOST_IN_FLIGHT, NcclGroup, fake};
use crate::collectives::store::{Heartbeats, HostGroup, Rendezvous, RunSecret};
use fake::OnStream;

thread_local! {
    /// Index of this rank's GPU.
    static GPU: RefCell<usize> = const { RefCell::new(0) };
}

impl Tested for CubeBackend {
    fn device() -> CubeDevice {
        CubeDevice::Cuda(CudaDevice::new(GPU.with_borrow(|gpu| *gpu)))
    }
}

/// How the ranks of a test exchange host values.
#[derive(Clone, Copy, Debug)]
enum Over {
    /// Through a hub, as threads do.
    Threads,
    /// Over the store, as processes do, with rank 0 at this port.
    Store(u16),
}

fn free_port() -> u16 {
    std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

/// Joins the host group of a world of processes, with rank 0 at this port.
fn process(rank: Rank, world: WorldSize, port: u16, check: &Check) -> HostGroup {
    HostGroup::process(&Rendezvous {
        rank,
        world,
        host: "127.0.0.1",
        port,
        run: String::new(),
        secret: RunSecret::default(),
        listen: None,
        timeout: check.timeout,
        debug: check.debug,
    })
    .unwrap()
}

/// Runs a check on every rank of a world, on process groups that `join` forms.
fn run(world: WorldSize, over: Over, check: &Check, join: impl Fn(HostGroup) -> NcclGroup + Sync) {
    println!("{world} ranks, {over:?}: {}", check.name);
    let (hub, heartbeats) = (Hub::new(world, check.timeout, check.debug), Heartbeats::new(world));
    // Without the barrier a fast rank could fail the group before another one has joined it.
    let joined = std::sync::Barrier::new(world.size());
    std::thread::scope(|scope| {
        for rank in world.ranks() {
            let (hub, heartbeats, join, joined) = (hub.clone(), heartbeats.clone(), &join, &joined);
            scope.spawn(move || {
                GPU.with_borrow_mut(|gpu| *gpu = rank.index());
                let host = match over {
                    Over::Threads => HostGroup::thread(hub, heartbeats, rank),
                    Over::Store(port) => process(rank, world, port, check),
                };
                let group = AnyProcessGroup::Nccl(join(host));
                joined.wait();
                (check.run)(&group);
                if let AnyProcessGroup::Nccl(group) = &group {
                    group.leave();
                }
            });
        }
    });
}

#[test]
fn ranks_conform_on_a_nccl_in_host_memory() {
    for size in 1..=4 {
        let world = WorldSize::new(size).unwrap();
        for check in &checks::<Flex>() {
            for is_on_stream in [false, true] {
                for over in [Over::Threads, Over::Store(free_port())] {
                    let join = |host| {
                        if is_on_stream {
                            fake::run_on_stream(OnStream::ShownLate);
                        }
                        NcclGroup::on_host(host, fake::library(), is_on_stream).unwrap()
                    };
                    run(world, over, check, join);
                }
            }
        }
    }
}

#[test]
fn ranks_conform_on_gpus() {
    let count = match crate::collectives::cuda::device_count() {
        Ok(count) => count,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    if let Err(error) = crate::collectives::cuda::nccl_version() {
        return eprintln!("skipped: {error}");
    }
    for size in 1..=count.min(4) {
        let world = WorldSize::new(size).unwrap();
        for check in &checks::<CubeBackend>() {
            for over in [Over::Threads, Over::Store(free_port())] {
                run(world, over, check, |host| {
                    let gpu = host.rank().index();
                    NcclGroup::world(host, gpu).unwrap()
                });
            }
        }
    }
    println!("conformed: {} of {count} GPUs", count.min(4));
}

#[test]
fn a_gpu_that_two_ranks_share_is_refused_by_both() {
    if let Err(error) = crate::collectives::cuda::device_count() {
        return eprintln!("skipped: {error}");
    }
    let world = WorldSize::new(2).unwrap();
    let (hub, heartbeats) = (Hub::new(world, LONG, false), Heartbeats::new(world));
    std::thread::scope(|scope| {
        for rank in world.ranks() {
            let host = HostGroup::thread(hub.clone(), heartbeats.clone(), rank);
            scope.spawn(move || {
                let error = NcclGroup::world(host, 0).unwrap_err().to_string();
                assert!(error.contains("rank 0 and rank 1 use the same GPU"), "{error}");
            });
        }
    });
}

/// Runs `f` on each of two ranks whose collectives are on the stream, or wait on the host.
fn two_ranks_on(is_on_stream: bool, timeout: Duration, f: impl Fn(&AnyProcessGroup, usize) + Sync) {
    let world = WorldSize::new(2).unwrap();
    let f = &f;
    let (hub, heartbeats) = (Hub::new(world, timeout, false), Heartbeats::new(world));
    std::thread::scope(|scope| {
        for rank in world.ranks() {
            let host = HostGroup::thread(hub.clone(), heartbeats.clone(), rank);
            scope.spawn(move || {
                let group = NcclGroup::on_host(host, fake::library(), is_on_stream).unwrap();
                let group = AnyProcessGroup::Nccl(group);
                gather::<Flex>(&group, &[100], &buffer(200));
                let AnyProcessGroup::Nccl(nccl) = &group else { unreachable!() };
                nccl.finish().unwrap();
                f(&group, rank.index());
            });
        }
    });
}

fn two_ranks(timeout: Duration, f: impl Fn(&AnyProcessGroup, usize) + Sync) {
    for is_on_stream in [false, true] {
        two_ranks_on(is_on_stream, timeout, &f);
    }
}

fn gather_error(group: &AnyProcessGroup) -> CollectiveError {
    let buffer = buffer::<Flex>(200);
    group
        .all_gather(&op("all_gather", "encoder.3"), &FlexDevice, Vec::new(), 64, &buffer)
        .unwrap_err()
}

#[test]
fn an_error_of_nccl_ends_all_ranks_and_names_the_one_that_had_it() {
    two_ranks(LONG, |group, rank| {
        let aborted = fake::aborts();
        if rank == 1 {
            fake::fail_next();
        }
        let error = gather_error(group);
        assert_eq!(error.failed_rank().unwrap().index(), 1, "{error}");
        let text = error.to_string();
        assert!(text.contains("all_gather of encoder.3") && text.contains("the fake"), "{text}");
        assert!(fake::aborts() > aborted, "the communicator is aborted");
        assert_eq!(gather_error(group), error, "the group has ended");
    });
}

#[test]
fn a_collective_that_hangs_is_ended_by_the_time_out_and_named() {
    two_ranks(SHORT, |group, rank| {
        if rank == 1 {
            fake::hang_next();
        }
        let started = std::time::Instant::now();
        let error = gather_error(group);
        let CollectiveError::Timeout { op, unit, waited, missing } = error else {
            panic!("{error}")
        };
        assert_eq!((op, unit.as_str(), waited), ("all_gather", "encoder.3", SHORT));
        assert_eq!(missing.len(), 1);
        assert!(started.elapsed() < 10 * SHORT);
    });
}

fn gather_into(group: &AnyProcessGroup, buffer: &Arc<GatherBuffer<Flex>>) {
    let op = op("all_gather", "encoder.3");
    group.all_gather(&op, &FlexDevice, Vec::new(), 64, buffer).unwrap();
}

/// Waits until the group has failed, and returns the failure.
fn failure(group: &AnyProcessGroup) -> CollectiveError {
    for _ in 0..1000 {
        if let Some(failure) = group.failure() {
            return failure;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("nobody watches the collective");
}

#[test]
fn a_collective_on_the_stream_holds_its_buffer_until_it_has_ended() {
    two_ranks_on(true, LONG, |group, _| {
        fake::run_on_stream(OnStream::Later);
        let own = buffer::<Flex>(200);
        let weak = Arc::downgrade(&own);
        gather_into(group, &own);
        drop(own);
        assert!(weak.upgrade().is_some(), "NCCL may write the buffer");
        let AnyProcessGroup::Nccl(group) = group else { unreachable!() };
        group.finish().unwrap();
        assert!(weak.upgrade().is_none(), "the buffer is free after the end");
    });
}

#[test]
fn the_communication_thread_is_two_collectives_ahead_at_most() {
    two_ranks_on(true, LONG, |group, _| {
        fake::run_on_stream(OnStream::ShownLate);
        let AnyProcessGroup::Nccl(nccl) = group else { unreachable!() };
        let mut most = 0;
        for _ in 0..10 {
            gather_into(group, &buffer(200));
            most = most.max(nccl.in_flight());
        }
        assert!(most <= MOST_IN_FLIGHT, "{most} collectives hold their memory");
    });
}

#[test]
fn a_collective_that_stays_on_the_stream_is_ended_by_the_time_out_and_named() {
    two_ranks_on(true, SHORT, |group, rank| {
        fake::run_on_stream([OnStream::Later, OnStream::Never][rank]);
        let aborted = fake::aborts();
        gather_into(group, &buffer(200));
        let CollectiveError::Timeout { op, unit, waited, missing } = failure(group) else {
            panic!("{:?}", group.failure())
        };
        assert_eq!((op, unit.as_str(), waited), ("all_gather", "encoder.3", SHORT));
        assert_eq!(missing.len(), 1);
        assert_eq!(gather_error(group), group.failure().unwrap(), "the group has ended");
        let AnyProcessGroup::Nccl(group) = group else { unreachable!() };
        assert!(group.finish().is_err());
        assert!(fake::aborts() > aborted, "the device does not wait for ever");
    });
}

#[test]
fn an_error_of_nccl_on_the_stream_ends_all_ranks() {
    two_ranks_on(true, LONG, |group, rank| {
        fake::run_on_stream([OnStream::Later, OnStream::Fails][rank]);
        gather_into(group, &buffer(200));
        let error = failure(group);
        assert_eq!(error.failed_rank().unwrap().index(), 1, "{error}");
        let text = error.to_string();
        assert!(text.contains("all_gather of encoder.3") && text.contains("the fake"), "{text}");
    });
}

#[test]
fn the_failure_of_a_peer_ends_a_collective_on_the_stream() {
    two_ranks_on(true, LONG, |group, rank| {
        fake::run_on_stream(OnStream::Never);
        gather_into(group, &buffer(200));
        // Both collectives are on their streams.
        group.exchange(&op("barrier", "ranks"), ()).unwrap();
        if rank == 1 {
            group.fail(CollectiveError::PeerFailed { rank: group.rank(), reason: "full".into() });
        }
        let started = std::time::Instant::now();
        let AnyProcessGroup::Nccl(nccl) = group else { unreachable!() };
        let error = nccl.finish().unwrap_err();
        assert_eq!(error.failed_rank().unwrap().index(), 1, "{error}");
        assert!(started.elapsed() < LONG / 2, "without a wait for the time-out");
    });
}

#[test]
fn threads_launch_a_collective_while_the_devices_of_all_do_nothing_else() {
    const BUSY_TIME: Duration = Duration::from_millis(300);
    two_ranks(LONG, |group, rank| {
        let barrier = || group.exchange(&op("barrier", "ranks"), ()).map(drop).unwrap();
        // The device of rank 1 frees memory first.
        barrier();
        let started = Instant::now();
        BUSY.set(if rank == 1 { BUSY_TIME } else { Duration::ZERO });
        gather_into(group, &buffer(200));
        let launched = fake::launched().unwrap().duration_since(started);
        assert!(launched > BUSY_TIME / 2, "rank {rank} launched after {launched:?}");
        // Rank 1 takes long to launch. Until then the device of rank 0 must do nothing else.
        barrier();
        let started = Instant::now();
        if rank == 1 {
            fake::launch_slowly(BUSY_TIME);
        }
        gather_into(group, &buffer(200));
        let returned = started.elapsed();
        assert!(returned > BUSY_TIME / 2, "rank {rank} returned after {returned:?}");
    });
}

#[test]
fn a_split_waits_for_the_collectives_before() {
    two_ranks_on(true, LONG, |group, rank| {
        fake::run_on_stream(OnStream::Later);
        gather_into(group, &buffer(200));
        let AnyProcessGroup::Nccl(nccl) = group else { unreachable!() };
        assert_eq!(nccl.split(rank).unwrap().members(), [nccl.rank()]);
    });
}

#[test]
fn communicators_without_work_are_aborted_after_a_failure() {
    two_ranks(LONG, |group, rank| {
        let AnyProcessGroup::Nccl(nccl) = group else { unreachable!() };
        drop(nccl.split(0).unwrap());
        assert_eq!(fake::finalized(), 1, "the regular end");
        let part = nccl.split(0).unwrap();
        group.exchange(&op("barrier", "ranks"), ()).unwrap();
        if rank == 1 {
            group.fail(CollectiveError::PeerFailed { rank: group.rank(), reason: "full".into() });
        }
        assert_eq!(failure(group).failed_rank().unwrap().index(), 1);
        drop(part);
        assert_eq!(fake::finalized(), 1, "a peer may have ended without it");
    });
}

/// A rank of several processes that share a GPU (`fsdp-runtime/benches/gpu`): `RANK/WORLD@PORT`.
#[test]
fn ranks_conform_as_processes_on_one_gpu() {
    let Ok(place) = std::env::var("FSDP_NCCL_TEST_RANK") else {
        return eprintln!("skipped: FSDP_NCCL_TEST_RANK is not set");
    };
    let parts: Vec<usize> = place.split(['/', '@']).map(|part| part.parse().unwrap()).collect();
    let [rank, size, port] = parts[..] else { panic!("`{place}` is not RANK/WORLD@PORT") };
    let world = WorldSize::new(size).unwrap();
    let rank = world.rank(rank).unwrap();
    for (number, check) in checks::<CubeBackend>().iter().enumerate() {
        println!("{world} ranks: {}", check.name);
        let port = u16::try_from(port + number).unwrap();
        let host = process(rank, world, port, check);
        let group = NcclGroup::world(host, 0).unwrap();
        // Without the barrier a fast rank could fail the group before another one has joined it.
        group.exchange(&op("barrier", "the check"), ()).unwrap();
        let group = AnyProcessGroup::Nccl(group);
        (check.run)(&group);
        let AnyProcessGroup::Nccl(group) = &group else { unreachable!() };
        group.leave();
    }
    println!("conformed: rank {} of {size}", rank.index());
}

/// On a machine with NVIDIA's library and without a GPU, the library's calls return errors.
#[test]
fn nvidias_library_without_a_gpu_reports_its_own_error() {
    let library = match crate::collectives::nccl::library() {
        Ok(library) => library,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    if crate::collectives::cuda::device_count().is_ok() {
        return eprintln!("skipped: this machine has a GPU");
    }
    let world = WorldSize::new(1).unwrap();
    let host = HostGroup::thread(Hub::new(world, LONG, false), Heartbeats::new(world), Rank::ZERO);
    let error = NcclGroup::on_host(host, library, true).unwrap_err().to_string();
    println!("{error}");
    assert!(error.contains("nccl"), "{error}");
}

#[test]
fn a_rank_without_a_gpu_says_so_on_every_rank() {
    if crate::collectives::cuda::device_count().is_ok()
        && crate::collectives::cuda::nccl_version().is_ok()
    {
        return eprintln!("skipped: this machine has a GPU and NCCL");
    }
    let (world, port) = (WorldSize::new(2).unwrap(), free_port());
    std::thread::scope(|scope| {
        for rank in world.ranks() {
            scope.spawn(move || {
                let (run, secret) = (String::new(), RunSecret::default());
                let rendezvous = Rendezvous {
                    rank,
                    world,
                    host: "localhost",
                    port,
                    run,
                    secret,
                    listen: None,
                    timeout: LONG,
                    debug: false,
                };
                let error =
                    NcclGroup::world(HostGroup::process(&rendezvous).unwrap(), 0).unwrap_err();
                let text = error.to_string();
                let missing =
                    text.contains("NCCL was not found") || text.contains("no CUDA device");
                assert!(missing, "{text}");
            });
        }
    });
}
