//! Tests of the store with threads that connect over TCP on this machine, as processes do. The
//! checks that every engine must pass are in `conformance.rs`.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::channel::Channel;
use super::error::StoreError;
use super::greeting::Until;
use super::host_group::HostGroup;
use super::rendezvous::Rendezvous;
use super::secret::{RunSecret, Side};
use super::server::Server;
use super::wire::{
    Challenge, GREETING, Hello, LARGEST_HELLO, Response, Welcome, receive, receive_up_to, send,
};
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
    let (secret, listen) = (RunSecret::new("a secret"), None);
    Rendezvous { rank, world, host: "127.0.0.1", port, run, secret, listen, timeout, debug: false }
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
fn a_port_that_does_not_answer_is_an_error_after_the_time_out() {
    let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = silent.local_addr().unwrap().port();
    let timeout = Duration::from_millis(300);
    let started = Instant::now();
    let error = HostGroup::process(&rendezvous(1, 2, port, timeout)).unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("does not answer"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
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
    let (rank_0, port) = listening();
    for bytes in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[255; 64]] {
        connect(port).write_all(bytes).unwrap();
    }
    assert_meets(&rank_0, port);
    rank_0.leave();
    assert_eq!(rank_0.failure(), None);
}

/// Connects to a port of this machine.
fn connect(port: u16) -> TcpStream {
    TcpStream::connect(("127.0.0.1", port)).unwrap()
}

/// Returns rank 0 of a world of two, and its port. The port was free just now.
fn listening() -> (HostGroup, u16) {
    let port = free_port();
    (HostGroup::process(&rendezvous(0, 2, port, LONG)).unwrap(), port)
}

/// Asserts that rank 1 can still join, and that the two ranks exchange values.
fn assert_meets(rank_0: &HostGroup, port: u16) {
    let rank_1 = HostGroup::process(&rendezvous(1, 2, port, LONG)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(rank_0.exchange(&op("a"), 0).unwrap().len(), 2));
        assert_eq!(*rank_1.exchange(&op("a"), 1).unwrap()[0], 0);
    });
    assert_eq!(rank_0.failure(), None);
    rank_1.leave();
}

/// Returns the server of rank 0.
fn server(rank_0: &HostGroup) -> &Server {
    let HostGroup::Server { server, .. } = rank_0 else { panic!("rank 0 serves") };
    server
}

/// Returns the introduction of rank 1.
fn hello(channel: Channel) -> Hello {
    let (greeting, nonce) = (GREETING.into(), [3; 32]);
    Hello { greeting, nonce, run: "a run".into(), rank: 1, world: 2, channel }
}

#[test]
fn a_rank_and_rank_0_with_other_secrets_refuse_each_other() {
    for secret in ["another", "", "a secret "] {
        let (rank_0, port) = listening();
        let secret = RunSecret::new(secret);
        let stranger = Rendezvous { secret, ..rendezvous(1, 2, port, LONG) };
        let error = HostGroup::process(&stranger).unwrap_err();
        assert!(matches!(error, StoreError::Secret { port: at, .. } if at == port), "{error}");
        assert!(error.to_string().contains("FSDP_RUN_SECRET"), "{error}");
        assert_eq!(server(&rank_0).admitted(), 0);
        assert_meets(&rank_0, port);
    }
}

#[test]
fn a_stranger_who_knows_all_but_the_secret_is_refused_and_told_nothing() {
    let (rank_0, port) = listening();
    for channel in [Channel::Requests, Channel::Notices] {
        let connection = connect(port);
        send(&connection, &hello(channel)).unwrap();
        let Challenge::Prove { proof, .. } = receive(&connection).unwrap() else { panic!() };
        // The proof of rank 0 is none of a rank.
        send(&connection, &Response { proof }).unwrap();
        let refused = receive::<Welcome>(&connection).unwrap().unwrap_err();
        assert_eq!(refused, "it does not know the secret of this run");
    }
    let connection = connect(port);
    send(&connection, &Hello { greeting: "fsdp-runtime 0.0.1".into(), ..hello(Channel::Requests) })
        .unwrap();
    let Challenge::Refused(reason) = receive(&connection).unwrap() else { panic!() };
    assert!(reason.contains("fsdp-runtime 0.0.1"), "{reason}");
    assert_eq!(server(&rank_0).admitted(), 0);
    assert_meets(&rank_0, port);
}

#[test]
fn a_greeting_that_was_recorded_is_not_admitted_again() {
    let (rank_0, port) = listening();
    // A rank greets, and what it sends is recorded.
    let secret = RunSecret::new("a secret");
    let hello = hello(Channel::Requests);
    let mut recorded = Vec::new();
    send(&mut recorded, &hello).unwrap();
    let connection = connect(port);
    connection.try_clone().unwrap().write_all(&recorded).unwrap();
    let Challenge::Prove { nonce, .. } = receive(&connection).unwrap() else { panic!() };
    let proof = secret.prove(Side::Rank, &hello.with(&nonce)).unwrap();
    // The rank is cut off before its answer arrives; a stranger sends it on another connection.
    drop(connection);
    let mut response = Vec::new();
    send(&mut response, &Response { proof }).unwrap();
    for _ in 0..20 {
        let mut replay = connect(port);
        replay.write_all(&recorded).unwrap();
        let Challenge::Prove { nonce: other, .. } = receive(&replay).unwrap() else { panic!() };
        assert_ne!(other, nonce);
        replay.write_all(&response).unwrap();
        receive::<Welcome>(&replay).unwrap().unwrap_err();
    }
    assert_eq!(server(&rank_0).admitted(), 0);
    assert_meets(&rank_0, port);
}

#[test]
fn a_program_at_the_port_that_does_not_know_the_secret_is_found_out() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (connection, _) = listener.accept().unwrap();
            let hello: Hello = receive(&connection).unwrap();
            let proof = RunSecret::new("a guess").prove(Side::Server, &hello.with(&[9; 32]));
            send(&connection, &Challenge::Prove { nonce: [9; 32], proof: proof.unwrap() }).unwrap();
            // The rank has not proven anything.
            receive::<Response>(&connection).unwrap_err();
        });
        let error = HostGroup::process(&rendezvous(1, 2, port, LONG)).unwrap_err();
        assert!(matches!(error, StoreError::Secret { .. }), "{error}");
    });
}

/// Returns the number in a variable, or `default`.
fn number(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |number| number.parse().unwrap())
}

/// Returns the resident memory of this process in bytes, where the system has it.
fn resident_memory() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

/// Returns the bytes that a stranger sends: those of no greeting, or of one that was changed or
/// recorded. `recorded` is what a rank has sent on another connection.
fn stranger_bytes(at: usize, recorded: &[u8], random: &mut rand::rngs::StdRng) -> Vec<u8> {
    use rand::Rng as _;
    let mut bytes = recorded.to_vec();
    match at % 3 {
        0 => {
            bytes = vec![0; random.random_range(0..200)];
            random.fill(&mut bytes[..]);
        }
        1 => {
            for _ in 0..random.random_range(1..3) {
                let at = random.random_range(0..bytes.len());
                bytes[at] = random.random();
            }
        }
        _ => {}
    }
    bytes
}

/// Runs in a process of its own, whose memory no other test changes.
#[test]
fn strangers_are_not_admitted_and_ranks_meet_soon_after() {
    let name = "collectives::store::tests::strangers_as_a_process";
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{text}");
}

/// `GREETINGS` is the number of greetings, 2000 by default, and `STRANGERS` that of idle
/// connections, 300 by default, for which the usual limit of open files is enough.
#[test]
#[ignore = "a process that `strangers_are_not_admitted_and_ranks_meet_soon_after` starts"]
fn strangers_as_a_process() {
    use rand::SeedableRng as _;
    let (rank_0, port) = listening();
    let mut random = rand::rngs::StdRng::seed_from_u64(1);
    // The greeting of a rank on another connection, whose nonce of rank 0 was another.
    let hello = hello(Channel::Requests);
    let proof = RunSecret::new("a secret").prove(Side::Rank, &hello.with(&[7; 32])).unwrap();
    let mut recorded = Vec::new();
    send(&mut recorded, &hello).unwrap();
    send(&mut recorded, &Response { proof }).unwrap();

    let (greetings, mut before) = (number("GREETINGS", 2000), None);
    for at in 0..greetings {
        // The allocator and the stacks of threads have their sizes after some connections.
        if at == greetings / 10 {
            before = resident_memory();
        }
        let bytes = stranger_bytes(at, &recorded, &mut random);
        // The connection may be closed before all of it is written.
        let _ = connect(port).write_all(&bytes);
    }
    let idle: Vec<_> = (0..number("STRANGERS", 300)).map(|_| connect(port)).collect();
    // One of them is slow, and says a little now and then.
    (&idle[idle.len() - 1]).write_all(&[40, 0]).unwrap();
    assert_eq!(server(&rank_0).admitted(), 0);
    let meeting = Instant::now();
    assert_meets(&rank_0, port);
    let met = meeting.elapsed();
    assert!(server(&rank_0).unknown_connections() <= 64);
    assert!(met < Duration::from_secs(5), "ranks meet {met:?} later");
    let growth = resident_memory().zip(before).map(|(after, before)| after.saturating_sub(before));
    println!("{greetings} greetings, {} idle: met after {met:?}, grown by {growth:?}", idle.len());
    // As much as the stacks of 64 threads, and no more with more greetings.
    assert!(growth.is_none_or(|growth| growth < 8 << 20), "grown by {growth:?} bytes");
    rank_0.leave();
}

#[test]
fn a_greeting_ends_at_its_deadline_however_slowly_it_arrives() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (connection, _) = listener.accept().unwrap();
    let ended = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A length of 200 bytes, and a byte now and then.
            slow.write_all(&[200, 0, 0, 0]).unwrap();
            while !ended.load(std::sync::atomic::Ordering::SeqCst) {
                let _ = slow.write_all(&[0]);
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let until = Until::new(&connection, Instant::now() + Duration::from_millis(200));
        let error = receive_up_to::<Hello>(until, LARGEST_HELLO).unwrap_err();
        ended.store(true, std::sync::atomic::Ordering::SeqCst);
        let expected = [std::io::ErrorKind::TimedOut, std::io::ErrorKind::WouldBlock];
        assert!(expected.contains(&error.kind()), "{error}");
    });
}

#[test]
fn rank_0_listens_at_its_address_alone() {
    let (rank_0, port) = listening();
    // Another address of this machine.
    if cfg!(target_os = "linux") {
        TcpStream::connect(("127.0.0.2", port)).unwrap_err();
    }
    assert_meets(&rank_0, port);
    // An address for documentation, which no machine has.
    let elsewhere = Rendezvous { host: "192.0.2.1", ..rendezvous(0, 2, free_port(), LONG) };
    let error = HostGroup::process(&elsewhere).unwrap_err();
    assert!(matches!(&error, StoreError::CannotListen { .. }), "{error}");
    assert!(error.to_string().contains("FSDP_LISTEN"), "{error}");
    let listen = Some("127.0.0.1".into());
    HostGroup::process(&Rendezvous { listen, port: free_port(), ..elsewhere }).unwrap();
}
