//! The client of the store, on every rank but rank 0: a process group over two connections to rank
//! 0.

use std::io;
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::channel::Channel;
use super::error::StoreError;
use super::greeting::Until;
use super::rendezvous::Rendezvous;
use super::secret::{Side, nonce};
use super::wire::{
    Answer, Challenge, GREETING, Hello, LARGEST_HELLO, Notice, Reply, Request, Response, Welcome,
    receive, receive_up_to, send,
};
use crate::collectives::failure::FailureMessage;
use crate::collectives::op::Op;
use crate::error::{CollectiveError, IgnorePoison};
use crate::layout::{Rank, WorldSize};

/// Time that a rank waits for a reply beyond the time-out: rank 0 reports time-outs of other
/// ranks.
const GRACE: Duration = Duration::from_secs(2);
/// Pause between two attempts to connect.
const RETRY: Duration = Duration::from_millis(50);
/// Number of times that a rank connects again after its connection was closed during the greeting.
const REGREETINGS: u32 = 10;
/// Time limit of an answer in the greeting: longer than rank 0 waits for an answer, so that rank 0
/// closes the connection first.
const ANSWER: Duration = Duration::from_secs(15);
/// Time limit of one attempt to connect, and of an answer that needs no other rank.
const ATTEMPT: Duration = Duration::from_secs(5);

/// A rank's two connections to rank 0.
#[derive(Debug)]
struct Connections {
    requests: Mutex<TcpStream>,
    notices: Mutex<TcpStream>,
    rank: Rank,
    world: WorldSize,
    timeout: Duration,
    /// First failure of the run that this rank knows of.
    failure: Mutex<Option<CollectiveError>>,
}

/// A process group for host values, as a rank other than rank 0 sees it.
#[derive(Clone, Debug)]
pub(crate) struct ClientGroup {
    connections: Arc<Connections>,
    /// Number of the group at rank 0's hub.
    id: u64,
    members: Vec<Rank>,
    /// Position of the calling rank among the members.
    index: usize,
}

impl ClientGroup {
    /// Connects to rank 0, and waits until it listens.
    pub(super) fn connect(rendezvous: &Rendezvous<'_>) -> Result<Self, StoreError> {
        let deadline = Instant::now() + rendezvous.timeout;
        let requests = open_channel(rendezvous, Channel::Requests, deadline)?;
        let notices = open_channel(rendezvous, Channel::Notices, deadline)?;
        let connections = Connections {
            requests: Mutex::new(requests),
            notices: Mutex::new(notices),
            rank: rendezvous.rank,
            world: rendezvous.world,
            timeout: rendezvous.timeout,
            failure: Mutex::default(),
        };
        Ok(Self {
            connections: Arc::new(connections),
            id: 0,
            members: rendezvous.world.ranks().collect(),
            index: rendezvous.rank.index(),
        })
    }

    /// Returns the members, as ranks of the world.
    pub(super) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// Returns the position of the calling rank among the members.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// Returns how long ranks wait for each other.
    pub(super) fn timeout(&self) -> Duration {
        self.connections.timeout
    }

    /// Returns every member's bytes, in rank order. All members call it. With `to`, only the member
    /// at that position receives them, and the others get an empty list.
    pub(super) fn exchange(
        &self,
        op: &Op,
        to: Option<usize>,
        value: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let receives = to.is_none_or(|to| to == self.index);
        let expected = if receives { self.members.len() } else { 0 };
        let request = Request::Exchange {
            group: self.id,
            to: to.map(|to| to as u64),
            name: op.name.into(),
            unit: op.unit.to_string(),
            size: op.size as u64,
            value,
        };
        match self.connections.request(op, &request)? {
            Reply::Values(values) if values.len() == expected => Ok(values),
            _ => Err(self.connections.fail_invalid_reply(op)),
        }
    }

    /// Returns the group of the members that give the same `color`. All members call it.
    pub(super) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        let op = Op::new("split", "the mesh");
        let request = Request::Split { group: self.id, color: color as u64 };
        let Reply::Group { id, members, index } = self.connections.request(&op, &request)? else {
            return Err(self.connections.fail_invalid_reply(&op));
        };
        let member = |index: usize| self.connections.world.rank(index);
        let found: Option<Vec<Rank>> = members.into_iter().map(member).collect();
        match found {
            Some(members) if members.get(index) == Some(&self.connections.rank) => {
                Ok(Self { connections: self.connections.clone(), id, members, index })
            }
            _ => Err(self.connections.fail_invalid_reply(&op)),
        }
    }

    /// Returns the failure that has ended the run, as far as this rank knows of one.
    pub(super) fn failure(&self) -> Option<CollectiveError> {
        self.connections.lock_failure().clone()
    }

    /// Tells rank 0 that this rank is alive, and returns the failure that has ended the run, if
    /// there is one.
    pub(super) fn heartbeat(&self) -> Option<CollectiveError> {
        if let Some(failure) = self.failure() {
            return Some(failure);
        }
        match self.connections.notice(&Notice::Heartbeat) {
            Ok(Answer::Ended(failure)) => {
                let failure = failure.into_error(self.connections.world);
                Some(self.connections.record_failure(failure))
            }
            // A late answer is no failure yet: the next exchange has the full time-out.
            Ok(_) => None,
            Err(error) if is_time_out(&error) => None,
            Err(_) => Some(self.connections.fail_lost_rank_0(None)),
        }
    }

    /// Returns the ranks that were not heard of during the last `span`; rank 0 if it does not
    /// answer.
    pub(super) fn silent(&self, span: Duration) -> Vec<Rank> {
        let millis = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        match self.connections.notice(&Notice::Silent(millis)) {
            Ok(Answer::Silent(ranks)) => {
                let world = self.connections.world;
                ranks.into_iter().filter_map(|rank| world.rank(rank)).collect()
            }
            _ => vec![Rank::ZERO],
        }
    }

    /// Ends the run of all ranks with `failure`, unless an earlier failure has ended it.
    pub(super) fn fail(&self, failure: CollectiveError) {
        let message = FailureMessage::new(&failure, self.connections.rank);
        // Rank 0 decides which failure was the first.
        let failure = match self.connections.notice(&Notice::Failed(message)) {
            Ok(Answer::Ended(first)) => first.into_error(self.connections.world),
            _ => failure,
        };
        self.connections.record_failure(failure);
    }

    /// Says farewell, and closes the connections.
    pub(super) fn leave(&self) {
        let notices = self.connections.lock_notices();
        let _ = send(&*notices, &Notice::Bye);
        let _ = notices.shutdown(Shutdown::Write);
        // A request that waits for its reply holds the lock, and is left to end by itself.
        if let Ok(requests) = self.connections.requests.try_lock() {
            let _ = requests.shutdown(Shutdown::Both);
        }
    }
}

impl Connections {
    fn lock_failure(&self) -> MutexGuard<'_, Option<CollectiveError>> {
        self.failure.lock().ignore_poison()
    }

    fn lock_notices(&self) -> MutexGuard<'_, TcpStream> {
        self.notices.lock().ignore_poison()
    }

    /// Records a failure that has ended the run; returns the first recorded one.
    fn record_failure(&self, failure: CollectiveError) -> CollectiveError {
        self.lock_failure().get_or_insert(failure).clone()
    }

    /// Sends a request, and waits for the reply.
    fn request(&self, op: &Op, request: &Request) -> Result<Reply, CollectiveError> {
        let connection = self.requests.lock().ignore_poison();
        if let Some(failure) = &*self.lock_failure() {
            return Err(failure.clone());
        }
        let replied = connection
            .set_read_timeout(Some(self.timeout.saturating_add(GRACE)))
            .and_then(|()| send(&*connection, request))
            .and_then(|()| receive(&*connection));
        match replied {
            Ok(Reply::Failed(failure)) => Err(self.record_failure(failure.into_error(self.world))),
            Ok(reply) => Ok(reply),
            Err(error) if is_time_out(&error) => {
                Err(self.record_failure(CollectiveError::Timeout {
                    op: op.name,
                    unit: op.unit.to_string(),
                    missing: vec![Rank::ZERO],
                    waited: self.timeout,
                }))
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(self.fail_invalid_reply(op))
            }
            Err(_) => Err(self.fail_lost_rank_0(Some(op))),
        }
    }

    /// Sends a notice, and waits for the answer, at most [`ATTEMPT`].
    fn notice(&self, notice: &Notice) -> io::Result<Answer> {
        let connection = self.lock_notices();
        connection.set_read_timeout(Some(ATTEMPT.min(self.timeout)))?;
        send(&*connection, notice)?;
        receive(&*connection)
    }

    /// Records that the connection to rank 0 is lost, during `op` if one waits.
    fn fail_lost_rank_0(&self, op: Option<&Op>) -> CollectiveError {
        let reason = match op {
            Some(op) => format!("its process ended, or cannot be reached, in {op}"),
            None => "its process ended, or cannot be reached".into(),
        };
        self.record_failure(CollectiveError::PeerFailed { rank: Rank::ZERO, reason })
    }

    /// Records that a reply of rank 0 is not one to the request.
    fn fail_invalid_reply(&self, op: &Op) -> CollectiveError {
        self.record_failure(CollectiveError::Transport {
            rank: self.rank,
            op: op.name,
            unit: op.unit.to_string(),
            reason: "the reply of rank 0 cannot be read".into(),
        })
    }
}

fn is_time_out(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Connects to rank 0, and introduces this rank on the connection. Connects again if the connection
/// is closed during the greeting, as rank 0 does with the oldest of too many connections, and if the
/// greeting gets no answer, as where the network fails for a moment.
fn open_channel(
    rendezvous: &Rendezvous<'_>,
    channel: Channel,
    deadline: Instant,
) -> Result<TcpStream, StoreError> {
    let (host, port) = rendezvous.address();
    let mut attempts = 0;
    loop {
        let connection = connect(rendezvous, deadline)?;
        match greet(&connection, rendezvous, channel, deadline) {
            Ok(Greeted::Admitted) => return Ok(connection),
            Ok(Greeted::Refused(reason)) => {
                return Err(StoreError::Refused { host, port, rank: rendezvous.rank, reason });
            }
            Ok(Greeted::WrongSecret) => return Err(StoreError::Secret { host, port }),
            Err(error)
                if is_closed(&error) && attempts < REGREETINGS && Instant::now() < deadline =>
            {
                attempts += 1;
                std::thread::sleep(RETRY * attempts);
            }
            Err(error) if is_time_out(&error) && Instant::now() < deadline => {}
            Err(error) if is_time_out(&error) => {
                let waited = rendezvous.timeout;
                let reason = "what listens there does not answer".into();
                return Err(StoreError::Unreachable { host, port, waited, reason });
            }
            Err(error) => {
                return Err(StoreError::Foreign { host, port, reason: error.to_string() });
            }
        }
    }
}

/// The outcome of a greeting.
enum Greeted {
    Admitted,
    Refused(String),
    /// Rank 0 does not know the secret of this rank's run.
    WrongSecret,
}

/// Introduces this rank on a new connection: both ends prove that they know the secret of the run.
fn greet(
    connection: &TcpStream,
    rendezvous: &Rendezvous<'_>,
    channel: Channel,
    deadline: Instant,
) -> io::Result<Greeted> {
    let until = || Until::new(connection, deadline.min(Instant::now() + ANSWER));
    connection.set_nodelay(true)?;
    connection.set_write_timeout(Some(rendezvous.timeout))?;
    let hello = Hello {
        greeting: GREETING.into(),
        nonce: nonce()?,
        run: rendezvous.run.clone(),
        rank: rendezvous.rank.index(),
        world: rendezvous.world.size(),
        channel,
    };
    send(connection, &hello)?;
    let (nonce, proof) = match receive_up_to(until(), LARGEST_HELLO)? {
        Challenge::Prove { nonce, proof } => (nonce, proof),
        Challenge::Refused(reason) => return Ok(Greeted::Refused(reason)),
    };
    let (greeting, secret) = (hello.with(&nonce), &rendezvous.secret);
    if !secret.verify(Side::Server, &greeting, &proof)? {
        return Ok(Greeted::WrongSecret);
    }
    send(connection, &Response { proof: secret.prove(Side::Rank, &greeting)? })?;
    Ok(match receive_up_to::<Welcome>(until(), LARGEST_HELLO)? {
        Ok(()) => Greeted::Admitted,
        Err(reason) => Greeted::Refused(reason),
    })
}

/// Returns whether an error says that the other end has closed the connection.
fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

/// Opens a connection to rank 0, retrying until the deadline.
fn connect(rendezvous: &Rendezvous<'_>, deadline: Instant) -> Result<TcpStream, StoreError> {
    let (host, port) = rendezvous.address();
    loop {
        let addresses: Vec<_> = (host.as_str(), port)
            .to_socket_addrs()
            .map_err(|error| StoreError::Unresolved {
                host: host.clone(),
                reason: error.to_string(),
            })?
            .collect();
        let mut reason = "it has no address".to_string();
        for address in addresses {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let wait = ATTEMPT.min(remaining).max(Duration::from_millis(1));
            match TcpStream::connect_timeout(&address, wait) {
                Ok(connection) => return Ok(connection),
                Err(error) => reason = error.to_string(),
            }
        }
        if Instant::now() >= deadline {
            let waited = rendezvous.timeout;
            return Err(StoreError::Unreachable { host, port, waited, reason });
        }
        std::thread::sleep(RETRY);
    }
}
