//! Rank 0's side of the store: threads that act at the hub on behalf of the connected ranks.

use std::collections::HashMap;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::channel::Channel;
use super::greeting::{Unknown, Until};
use super::heartbeats::Heartbeats;
use super::secret::{RunSecret, Side, nonce};
use super::wire::{
    Answer, Challenge, GREETING, Hello, LARGEST_HELLO, Notice, Reply, Request, Response, Welcome,
    receive, receive_up_to, send,
};
use crate::collectives::failure::{FailureMessage, static_name};
use crate::collectives::hub::Hub;
use crate::collectives::local::LocalGroup;
use crate::collectives::op::Op;
use crate::error::{CollectiveError, IgnorePoison};
use crate::layout::Rank;

/// Time limit for the greeting of a new connection.
const HELLO: Duration = Duration::from_secs(10);
/// Number of connections that may be without a greeting at a time, at least.
const UNKNOWN: usize = 64;
/// Time between two checks of the server for new connections, at most.
const POLL: Duration = Duration::from_millis(10);
/// Time between two checks after a new connection: many may come at once, and the system holds few.
const BUSY_POLL: Duration = Duration::from_micros(50);
/// Time that rank 0 waits at its end for the other ranks to receive how the run has ended.
const LINGER: Duration = Duration::from_secs(5);

/// The store's server, in the process of rank 0.
#[derive(Debug)]
pub(crate) struct Server {
    hub: Arc<Hub>,
    heartbeats: Arc<Heartbeats>,
    /// Name of the run, and its secret.
    run: (String, RunSecret),
    unknown: Unknown,
    connections: Mutex<Connections>,
    changed: Condvar,
}

/// The admitted connections of the other ranks.
#[derive(Debug, Default)]
struct Connections {
    /// All connections that were admitted, open or closed.
    admitted: Vec<(Rank, Channel)>,
    /// Number of open connections.
    open: usize,
}

impl Server {
    /// Starts the thread that accepts connections. It closes the listener once every rank is
    /// connected.
    pub(super) fn start(
        listener: TcpListener,
        hub: Arc<Hub>,
        heartbeats: Arc<Heartbeats>,
        run: (String, RunSecret),
    ) -> io::Result<Arc<Self>> {
        listener.set_nonblocking(true)?;
        let (connections, changed) = (Mutex::default(), Condvar::new());
        let unknown = Unknown::new(UNKNOWN.max(4 * hub.world.size()));
        let server = Arc::new(Self { hub, heartbeats, run, unknown, connections, changed });
        let accepting = server.clone();
        std::thread::Builder::new()
            .name("fsdp-store".into())
            .spawn(move || accepting.accept(&listener))?;
        Ok(server)
    }

    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().ignore_poison()
    }

    /// Accepts connections until every rank has its two, or the run has failed.
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        let expected = 2 * (self.hub.world.size() - 1);
        let mut pause = BUSY_POLL;
        while self.lock().admitted.len() < expected && self.hub.failure().is_none() {
            let Ok((connection, _)) = listener.accept() else {
                std::thread::sleep(pause);
                pause = POLL.min(2 * pause);
                continue;
            };
            pause = BUSY_POLL;
            let Ok(number) = self.unknown.add(&connection) else { continue };
            let server = self.clone();
            let serve = move || {
                // A connection that does not introduce itself, or closes, is not a rank's.
                let _ = server.serve(&connection, number);
                server.unknown.remove(number);
            };
            if let Err(error) = std::thread::Builder::new().name("fsdp-store".into()).spawn(serve) {
                self.hub.fail(CollectiveError::PeerFailed {
                    rank: Rank::ZERO,
                    reason: format!("no thread can be started for another rank: {error}"),
                });
            }
        }
        self.unknown.close();
    }

    /// Greets a connection: both ends prove that they know the secret of the run. Returns the
    /// introduction of the rank, or `None` if it was refused.
    fn greet(&self, connection: &TcpStream) -> io::Result<Option<Hello>> {
        let deadline = Instant::now() + HELLO;
        connection.set_nonblocking(false)?;
        connection.set_nodelay(true)?;
        connection.set_write_timeout(Some(HELLO))?;
        let hello: Hello = receive_up_to(Until::new(connection, deadline), LARGEST_HELLO)?;
        if hello.greeting != GREETING {
            let reason =
                format!("rank 0 is a program with {GREETING}, this one has {}", hello.greeting);
            return send(connection, &Challenge::Refused(reason)).map(|()| None);
        }
        let (nonce, secret) = (nonce()?, &self.run.1);
        let greeting = hello.with(&nonce);
        let proof = secret.prove(Side::Server, &greeting)?;
        send(connection, &Challenge::Prove { nonce, proof })?;
        let response: Response = receive_up_to(Until::new(connection, deadline), LARGEST_HELLO)?;
        if !secret.verify(Side::Rank, &greeting, &response.proof)? {
            // A stranger learns nothing about the run.
            let reason = "it does not know the secret of this run".to_string();
            return send(connection, &Welcome::Err(reason)).map(|()| None);
        }
        connection.set_write_timeout(Some(self.hub.timeout))?;
        Ok(Some(hello))
    }

    /// Admits a connection and serves it until it is closed.
    fn serve(&self, connection: &TcpStream, number: u64) -> io::Result<()> {
        let Some(hello) = self.greet(connection)? else { return Ok(()) };
        // One that was closed in the meantime connects again.
        if !self.unknown.remove(number) {
            return Ok(());
        }
        let rank = match self.admit(&hello) {
            Ok(rank) => rank,
            Err(reason) => return send(connection, &Welcome::Err(reason)),
        };
        let welcomed =
            send(connection, &Welcome::Ok(())).and_then(|()| connection.set_read_timeout(None));
        match (hello.channel, welcomed) {
            (Channel::Requests, Ok(())) => self.serve_requests(connection, rank),
            (Channel::Notices, Ok(())) => self.serve_notices(connection, rank),
            (_, Err(_)) => self.fail_lost_rank(rank),
        }
        self.lock().open -= 1;
        self.changed.notify_all();
        Ok(())
    }

    /// Returns the rank of a connection, or why the connection is refused.
    fn admit(&self, hello: &Hello) -> Result<Rank, String> {
        let Hello { run, rank, world, channel, .. } = hello;
        let expected = self.hub.world;
        if *run != self.run.0 {
            return Err(format!("rank 0 belongs to the run `{}`, this one to `{run}`", self.run.0));
        }
        if *world != expected.size() {
            return Err(format!("rank 0 is one of {expected} ranks, this one of {world}"));
        }
        let rank = expected.rank(*rank).filter(|&rank| rank != Rank::ZERO);
        let rank = rank.ok_or_else(|| format!("there is a rank {} already", hello.rank))?;
        let mut connections = self.lock();
        if connections.admitted.contains(&(rank, *channel)) {
            return Err(format!("there is a rank {rank} already"));
        }
        connections.admitted.push((rank, *channel));
        connections.open += 1;
        Ok(rank)
    }

    /// Issues a rank's requests at the hub, until the rank's connection is closed.
    fn serve_requests(&self, connection: &TcpStream, rank: Rank) {
        let mut groups = HashMap::from([(0, LocalGroup::new(self.hub.clone(), rank))]);
        while let Ok(request) = receive::<Request>(connection) {
            self.heartbeats.record(rank);
            let answered = self.answer(&mut groups, request, rank);
            let reply = answered
                .unwrap_or_else(|failure| Reply::Failed(FailureMessage::new(&failure, Rank::ZERO)));
            if send(connection, &reply).is_err() {
                return self.fail_lost_rank(rank);
            }
        }
    }

    /// Issues one request at the hub, and waits for the other ranks.
    fn answer(
        &self,
        groups: &mut HashMap<u64, LocalGroup>,
        request: Request,
        rank: Rank,
    ) -> Result<Reply, CollectiveError> {
        let unknown = |group: u64| {
            let failure = CollectiveError::PeerFailed {
                rank,
                reason: format!("it has issued a collective in group {group}, which it is not in"),
            };
            self.hub.fail(failure.clone());
            failure
        };
        match request {
            Request::Exchange { group, to, name, unit, size, value } => {
                let op = Op::new(static_name(&name), unit).of(usize::try_from(size).unwrap_or(0));
                self.heartbeats.record_op(rank, &op);
                let group = groups.get(&group).ok_or_else(|| unknown(group))?;
                let values = group.exchange(&op, value)?;
                let receives = to.is_none_or(|to| to == group.index() as u64);
                let values = values.iter().filter(|_| receives);
                Ok(Reply::Values(values.map(|value| (**value).clone()).collect()))
            }
            Request::Split { group, color } => {
                let parent = groups.get(&group).ok_or_else(|| unknown(group))?;
                let part = parent.split(usize::try_from(color).unwrap_or(usize::MAX))?;
                let members = part.members().iter().map(|member| member.index()).collect();
                let reply = Reply::Group { id: part.id(), members, index: part.index() };
                groups.insert(part.id(), part);
                Ok(reply)
            }
        }
    }

    /// Answers a rank's notices. The run fails if the rank's connection closes without a farewell.
    fn serve_notices(&self, connection: &TcpStream, rank: Rank) {
        while let Ok(notice) = receive::<Notice>(connection) {
            self.heartbeats.record(rank);
            match notice {
                Notice::Heartbeat => {}
                Notice::Silent(millis) => {
                    let silent = self.heartbeats.silent(Duration::from_millis(millis));
                    let silent = silent.into_iter().map(Rank::index).collect();
                    if send(connection, &Answer::Silent(silent)).is_err() {
                        break;
                    }
                    continue;
                }
                Notice::Failed(failure) => self.hub.fail(failure.into_error(self.hub.world)),
                Notice::Bye => return,
            }
            let answer = self.hub.failure().map_or(Answer::Running, |failure| {
                Answer::Ended(FailureMessage::new(&failure, Rank::ZERO))
            });
            if send(connection, &answer).is_err() {
                break;
            }
        }
        self.fail_lost_rank(rank);
    }

    /// Ends the run because the connection to a rank is lost.
    fn fail_lost_rank(&self, rank: Rank) {
        let reason = match self.heartbeats.last_op(rank) {
            Some(last) => format!("its process ended, or cannot be reached, after {last}"),
            None => "its process ended, or cannot be reached".into(),
        };
        self.hub.fail(CollectiveError::PeerFailed { rank, reason });
    }

    /// Returns the number of connections that were admitted.
    #[cfg(test)]
    pub(super) fn admitted(&self) -> usize {
        self.lock().admitted.len()
    }

    /// Returns the number of connections that have not said who they are.
    #[cfg(test)]
    pub(super) fn unknown_connections(&self) -> usize {
        self.unknown.len()
    }

    /// Waits until every other rank has left, at most [`LINGER`].
    pub(super) fn leave(&self) {
        let until = Instant::now() + LINGER;
        let mut connections = self.lock();
        while connections.open > 0 {
            let remaining = until.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return;
            }
            (connections, _) = self.changed.wait_timeout(connections, remaining).ignore_poison();
        }
    }
}
