//! The checks on the engine `nccl`: its groups, over threads and over the store, with a NCCL of the
//! tests' own on the host's memory; and with NVIDIA's, on as many GPUs as there are.
//!
//! On a machine with GPUs: `cargo test --release --features cuda --lib nccl -- --nocapture`.

use std::cell::RefCell;

use burn::backend::Cube;
use burn_cubecl::CubeDevice;
use cubecl::device::CudaDevice;

use super::*;
use crate::collectives::local::Hub;
use crate::collectives::nccl::{NcclGroup, fake};
use crate::collectives::store::{Host, Rendezvous, Roll};

thread_local! {
    /// The GPU of this rank.
    static GPU: RefCell<usize> = const { RefCell::new(0) };
}

impl Tested for Cube {
    fn device() -> CubeDevice {
        CubeDevice::Cuda(CudaDevice::new(GPU.with_borrow(|gpu| *gpu)))
    }
}

/// Where the ranks of a test meet.
#[derive(Clone, Copy, Debug)]
enum Over {
    /// At a hub, as threads do.
    Threads,
    /// Over the store, as processes do, at this port.
    Store(u16),
}

fn free_port() -> u16 {
    std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

/// Runs a check on every rank of a world, on groups that `join` makes.
fn run(world: WorldSize, over: Over, check: &Check, join: impl Fn(Host) -> NcclGroup + Sync) {
    println!("{world} ranks, {over:?}: {}", check.name);
    let (hub, roll) = (Hub::new(world, check.timeout, check.debug), Roll::new(world));
    // A rank in a hurry may end the world before another has heard that all have joined.
    let joined = std::sync::Barrier::new(world.size());
    std::thread::scope(|scope| {
        for rank in world.ranks() {
            let (hub, roll, join, joined) = (hub.clone(), roll.clone(), &join, &joined);
            scope.spawn(move || {
                GPU.with_borrow_mut(|gpu| *gpu = rank.index());
                let host = match over {
                    Over::Threads => Host::thread(hub, roll, rank),
                    Over::Store(port) => Host::process(&Rendezvous {
                        rank,
                        world,
                        host: "127.0.0.1",
                        port,
                        run: String::new(),
                        timeout: check.timeout,
                        debug: check.debug,
                    })
                    .unwrap(),
                };
                let group = Group::Nccl(join(host));
                joined.wait();
                (check.run)(&group);
                if let Group::Nccl(group) = &group {
                    group.leave();
                }
            });
        }
    });
}

#[test]
fn ranks_conform_on_a_nccl_of_our_own() {
    for size in 1..=4 {
        let world = WorldSize::new(size).unwrap();
        for check in &checks::<Flex>() {
            for over in [Over::Threads, Over::Store(free_port())] {
                run(world, over, check, |host| NcclGroup::on_host(host, fake::library()).unwrap());
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
        for check in &checks::<Cube>() {
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
    let (hub, roll) = (Hub::new(world, LONG, false), Roll::new(world));
    std::thread::scope(|scope| {
        for rank in world.ranks() {
            let host = Host::thread(hub.clone(), roll.clone(), rank);
            scope.spawn(move || {
                let error = NcclGroup::world(host, 0).unwrap_err().to_string();
                assert!(error.contains("rank 0 and rank 1 use the same GPU"), "{error}");
            });
        }
    });
}

fn two_ranks(timeout: Duration, f: impl Fn(&Group, usize) + Sync) {
    let check = Check { name: "trouble", timeout, debug: false, run: |_| () };
    let world = WorldSize::new(2).unwrap();
    let f = &f;
    let (hub, roll) = (Hub::new(world, check.timeout, false), Roll::new(world));
    std::thread::scope(|scope| {
        for rank in world.ranks() {
            let host = Host::thread(hub.clone(), roll.clone(), rank);
            scope.spawn(move || {
                let group = Group::Nccl(NcclGroup::on_host(host, fake::library()).unwrap());
                gather::<Flex>(&group, &[100], &slot(200));
                f(&group, rank.index());
            });
        }
    });
}

fn gather_error(group: &Group) -> CollectiveError {
    let slot = slot::<Flex>(200);
    group
        .all_gather(&op("all_gather", "encoder.3"), &FlexDevice, Vec::new(), 64, &slot)
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
        assert_eq!(gather_error(group), error, "and the group has ended");
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

/// NVIDIA's own library, where it is installed and there is no GPU: its calls return errors.
#[test]
fn nvidias_library_without_a_gpu_is_an_error_in_its_own_words() {
    let library = match crate::collectives::nccl::library() {
        Ok(library) => library,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    if crate::collectives::cuda::device_count().is_ok() {
        return eprintln!("skipped: this machine has a GPU");
    }
    let world = WorldSize::new(1).unwrap();
    let host = Host::thread(Hub::new(world, LONG, false), Roll::new(world), Rank::ZERO);
    let error = NcclGroup::on_host(host, library).unwrap_err().to_string();
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
                let run = String::new();
                let meeting = Rendezvous {
                    rank,
                    world,
                    host: "localhost",
                    port,
                    run,
                    timeout: LONG,
                    debug: false,
                };
                let error = NcclGroup::world(Host::process(&meeting).unwrap(), 0).unwrap_err();
                let text = error.to_string();
                let missing =
                    text.contains("NCCL was not found") || text.contains("no CUDA device");
                assert!(missing, "{text}");
            });
        }
    });
}
