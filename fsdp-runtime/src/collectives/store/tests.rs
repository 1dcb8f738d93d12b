//! Tests of the store with threads that connect over TCP on this machine, as processes do. The
//! checks that every engine must pass are in `conformance.rs`.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::error::StoreError;
use super::host_group::HostGroup;
use super::rendezvous::Rendezvous;
use crate::collectives::op::Op;
use crate::error::CollectiveError;
use crate::layout::{Rank, WorldSize};

const LONG: Duration = Duration::from_secs(20);

fn world(size: usize) -> WorldSize {
    WorldSize::new(size).unwrap()
}

/// Returns a port that was free just now.
fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

fn rendezvous(rank: usize, size: usize, port: u16, timeout: Duration) -> Rendezvous<'static> {
    let rank = world(size).ranks().nth(rank).unwrap();
    let (world, run) = (world(size), "a run".to_string());
    Rendezvous { rank, world, host: "127.0.0.1", port, run, timeout, debug: false }
}

fn op(unit: &'static str) -> Op {
    Op::new("all_gather", unit)
}

/// Runs `f` on each rank of a world, with a connection for each rank.
fn on_all<T: Send>(size: usize, timeout: Duration, f: impl Fn(HostGroup) -> T + Sync) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let run = |rank| f(HostGroup::process(&rendezvous(rank, size, port, timeout)).unwrap());
        let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn ranks_that_leave_after_the_last_exchange_are_no_failure() {
    let started = Instant::now();
    let failures = on_all(4, LONG, |host| {
        for round in 0..20 {
            let all = host.exchange(&op("a"), (round, host.index())).unwrap();
            assert_eq!(all.len(), 4);
            assert!(all.iter().enumerate().all(|(rank, value)| **value == (round, rank)));
            assert_eq!(host.heartbeat(), None);
        }
        host.leave();
        host.failure()
    });
    assert!(failures.iter().all(Option::is_none), "{failures:?}");
    assert!(started.elapsed() < Duration::from_secs(5), "rank 0 does not linger");
}

#[test]
fn a_gather_sends_values_to_one_rank_only() {
    for to in 0..3 {
        let received = on_all(3, LONG, |host| {
            let value = vec![host.index() as u8; 1000];
            let bytes = match &host {
                HostGroup::Client(client) => {
                    let parts = client.exchange(&op("raw"), Some(to), value.clone()).unwrap();
                    parts.iter().map(Vec::len).sum()
                }
                HostGroup::Server { group, .. } => {
                    group.exchange(&op("raw"), value.clone()).unwrap();
                    0
                }
                HostGroup::Thread { .. } => unreachable!("ranks are processes"),
            };
            let values = host.gather_values(&op("values"), to, value).unwrap();
            let values = values.map(|all| all.iter().map(|value| value[0]).collect::<Vec<_>>());
            host.leave();
            (bytes, values)
        });
        for (rank, (bytes, values)) in received.into_iter().enumerate() {
            assert_eq!(bytes, if rank == to && rank > 0 { 3000 } else { 0 }, "to {to}: {rank}");
            assert_eq!(values, (rank == to).then(|| vec![0, 1, 2]), "to {to}: {rank}");
        }
    }
}

#[test]
fn a_rank_whose_connection_closes_is_named_with_its_last_collective() {
    let errors = on_all(3, LONG, |host| {
        host.exchange(&op("encoder.0"), ()).unwrap();
        if host.index() == 2 {
            // Dropped without a farewell, as when a process is killed.
            return None;
        }
        let error = host.exchange(&op("encoder.1"), ()).unwrap_err();
        assert_eq!(host.heartbeat(), Some(error.clone()));
        Some(error)
    });
    let [first, second, None] = &errors[..] else { panic!("{errors:?}") };
    for error in [first, second] {
        let Some(CollectiveError::PeerFailed { rank, reason }) = error else { panic!("{error:?}") };
        assert_eq!(rank.index(), 2);
        assert!(reason.contains("after all_gather of encoder.0"), "{reason}");
    }
}

#[test]
fn a_failure_of_rank_0_reaches_all_ranks() {
    // The threads of rank 0's server outlive rank 0 in this test, so its hub reports the failure
    // that a closed connection would.
    let errors = on_all(3, LONG, |host| {
        host.exchange(&op("a"), ()).unwrap();
        if host.index() == 0 {
            host.fail(CollectiveError::PeerFailed { rank: host.rank(), reason: "diverged".into() });
            host.leave();
            return None;
        }
        let error = host.exchange(&op("b"), ()).err();
        host.leave();
        error
    });
    let [None, second, third] = &errors[..] else { panic!("{errors:?}") };
    for error in [second, third] {
        let Some(CollectiveError::PeerFailed { rank, reason }) = error else { panic!("{error:?}") };
        assert_eq!((*rank, reason.as_str()), (Rank::ZERO, "diverged"));
    }
}

#[test]
fn a_rank_that_is_never_started_is_named() {
    let port = free_port();
    let timeout = Duration::from_millis(300);
    let errors = std::thread::scope(|scope| {
        let run = |rank| {
            let host = HostGroup::process(&rendezvous(rank, 3, port, timeout)).unwrap();
            host.exchange(&op("the launch"), ()).unwrap_err()
        };
        let ranks: Vec<_> = [0, 2].map(|rank| scope.spawn(move || run(rank))).into();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    for error in errors {
        let CollectiveError::Timeout { missing, unit, .. } = error else { panic!("{error}") };
        assert_eq!(missing.iter().map(|rank| rank.index()).collect::<Vec<_>>(), [1]);
        assert_eq!(unit, "the launch");
    }
}

#[test]
fn silent_ranks_are_distinguished_from_active_ones() {
    let asked = std::sync::Barrier::new(3);
    let silent = on_all(3, LONG, |host| {
        host.exchange(&op("a"), ()).unwrap();
        let silent = (host.index() < 2).then(|| {
            for _ in 0..30 {
                assert_eq!(host.heartbeat(), None);
                std::thread::sleep(Duration::from_millis(20));
            }
            host.silent(Duration::from_millis(500))
        });
        asked.wait();
        host.exchange(&op("b"), ()).unwrap();
        host.leave();
        silent
    });
    let [Some(first), Some(second), None] = &silent[..] else { panic!("{silent:?}") };
    for silent in [first, second] {
        assert_eq!(silent.iter().map(|rank| rank.index()).collect::<Vec<_>>(), [2]);
    }
}

#[test]
fn a_port_that_is_taken_is_named() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = HostGroup::process(&rendezvous(0, 2, port, LONG)).unwrap_err();
    assert!(matches!(error, StoreError::CannotListen { port: at, .. } if at == port), "{error}");
    assert!(error.to_string().contains("MASTER_PORT"), "{error}");
}

#[test]
fn a_host_that_does_not_resolve_is_named() {
    for rank in [0, 1] {
        let rendezvous =
            Rendezvous { host: "no-such-host.invalid", ..rendezvous(rank, 2, 1, LONG) };
        let error = HostGroup::process(&rendezvous).unwrap_err();
        assert!(matches!(error, StoreError::Unresolved { .. }), "{error}");
        assert!(error.to_string().contains("no-such-host.invalid"), "{error}");
    }
}

#[test]
fn an_absent_rank_0_is_an_error_after_the_time_out() {
    let timeout = Duration::from_millis(300);
    let error = HostGroup::process(&rendezvous(1, 2, free_port(), timeout)).unwrap_err();
    assert!(
        matches!(error, StoreError::Unreachable { waited, .. } if waited == timeout),
        "{error}"
    );
}

#[test]
fn ranks_of_another_world_or_run_and_duplicate_ranks_are_refused() {
    let port = free_port();
    let _first = HostGroup::process(&rendezvous(0, 3, port, LONG)).unwrap();
    let _second = HostGroup::process(&rendezvous(1, 3, port, LONG)).unwrap();
    let other_run = Rendezvous { run: "another".into(), ..rendezvous(2, 3, port, LONG) };
    for (rendezvous, expected) in [
        (rendezvous(1, 3, port, LONG), "there is a rank 1 already"),
        (rendezvous(1, 2, port, LONG), "one of 3 ranks, this one of 2"),
        (other_run, "the run `a run`, this one to `another`"),
    ] {
        let error = HostGroup::process(&rendezvous).unwrap_err();
        let StoreError::Refused { reason, .. } = &error else { panic!("{error}") };
        assert!(reason.contains(expected), "{reason}");
    }
}

#[test]
fn connections_of_other_programs_are_ignored() {
    let port = free_port();
    let strangers = std::thread::spawn(move || {
        for bytes in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[255; 64]] {
            let mut connection = loop {
                match TcpStream::connect(("127.0.0.1", port)) {
                    Ok(connection) => break connection,
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            };
            connection.write_all(bytes).unwrap();
        }
    });
    std::thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                let host = HostGroup::process(&rendezvous(rank, 2, port, LONG)).unwrap();
                if rank == 0 {
                    std::thread::sleep(Duration::from_millis(100));
                }
                assert_eq!(host.exchange(&op("a"), rank).unwrap().len(), 2);
                host.leave();
                assert_eq!(host.failure(), None);
            });
        }
    });
    strangers.join().unwrap();
}
