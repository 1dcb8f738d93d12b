//! What ranks on GPUs tell each other beside tensors: agreement, who is there, and failures.
//!
//! Threads of one process meet at a [`Hub`], as on the engine `local`. Processes do too: the hub is
//! rank 0's, and each other rank is stood for there by threads of rank 0's process, which say what
//! arrives over two TCP connections: one for values, on which a rank waits for the others, and one
//! for notices, which are answered at once ([`server`], [`client`]). So ranks that issue different
//! collectives, come late or do not come are found by the same code on both, and named.
//!
//! A connection that ends without a word means that its process has ended: the others learn it with
//! their next notice or value. Nothing here needs a GPU.

mod client;
mod error;
mod server;
#[cfg(test)]
mod tests;
mod wire;

use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use self::client::Remote;
pub use self::error::StoreError;
use self::server::Server;
use super::Op;
use super::group::Message;
use super::local::{Hub, LocalGroup};
use crate::error::CollectiveError;
use crate::layout::{Rank, WorldSize};

/// Where the processes of a launch meet.
#[derive(Debug)]
pub(crate) struct Rendezvous<'a> {
    pub(crate) rank: Rank,
    pub(crate) world: WorldSize,
    /// The machine of rank 0.
    pub(crate) host: &'a str,
    pub(crate) port: u16,
    /// A name of the run, so that ranks of different ones do not meet.
    pub(crate) run: String,
    pub(crate) timeout: Duration,
    pub(crate) debug: bool,
}

impl<'a> Rendezvous<'a> {
    fn at(&self) -> (String, u16) {
        (self.host.to_string(), self.port)
    }

    /// As rank 0.
    fn listen(&self) -> Result<TcpListener, StoreError> {
        let (host, port) = self.at();
        let unresolved = |error: io::Error| StoreError::Unresolved {
            host: host.clone(),
            reason: error.to_string(),
        };
        let addresses: Vec<_> =
            (self.host, self.port).to_socket_addrs().map_err(unresolved)?.collect();
        let listener = match TcpListener::bind(&*addresses) {
            // A name for this machine that only others know.
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)))
            }
            listener => listener,
        };
        listener.map_err(|error| StoreError::CannotListen { host, port, reason: error.to_string() })
    }
}

/// When each rank was last heard of, and with what.
#[derive(Debug)]
pub(crate) struct Roll {
    started: Instant,
    /// Milliseconds after the start.
    heard: Vec<AtomicU64>,
    last: Vec<Mutex<Option<String>>>,
}

impl Roll {
    pub(crate) fn new(world: WorldSize) -> Arc<Self> {
        let ranks = || world.ranks();
        Arc::new(Self {
            started: Instant::now(),
            heard: ranks().map(|_| AtomicU64::new(0)).collect(),
            last: ranks().map(|_| Mutex::default()).collect(),
        })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn heard(&self, rank: Rank) {
        self.heard[rank.index()].store(self.now(), Ordering::Relaxed);
    }

    fn came_to(&self, rank: Rank, op: &Op) {
        let mut last =
            self.last[rank.index()].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *last = Some(op.to_string());
    }

    fn last(&self, rank: Rank) -> Option<String> {
        self.last[rank.index()].lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    fn silent(&self, span: Duration) -> Vec<Rank> {
        let span = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let since = self.now().saturating_sub(span);
        let world = WorldSize::new(self.heard.len()).expect("a roll is of at least one rank");
        world
            .ranks()
            .filter(|rank| self.heard[rank.index()].load(Ordering::Relaxed) < since)
            .collect()
    }
}

/// A rank's end of a group, for all but tensors.
#[derive(Debug)]
pub(crate) enum Host {
    /// Of a thread, whose peers are threads too.
    Thread { group: LocalGroup, roll: Arc<Roll> },
    /// Of the process of rank 0.
    First { group: LocalGroup, roll: Arc<Roll>, server: Arc<Server> },
    /// Of another process.
    Other(Remote),
}

impl Host {
    /// The end of `rank`, a thread, in the group of all.
    pub(crate) fn thread(hub: Arc<Hub>, roll: Arc<Roll>, rank: Rank) -> Self {
        Self::Thread { group: LocalGroup::new(hub, rank), roll }
    }

    /// Meets the other processes. Rank 0 does not wait for them here.
    pub(crate) fn process(meeting: &Rendezvous<'_>) -> Result<Self, StoreError> {
        if meeting.rank != Rank::ZERO {
            return Remote::connect(meeting).map(Self::Other);
        }
        let hub = Hub::new(meeting.world, meeting.timeout, meeting.debug);
        let roll = Roll::new(meeting.world);
        let listener = meeting.listen()?;
        let server = Server::start(listener, hub.clone(), roll.clone(), meeting.run.clone());
        let server = server.map_err(|error| StoreError::NoThread { reason: error.to_string() })?;
        Ok(Self::First { group: LocalGroup::new(hub, Rank::ZERO), roll, server })
    }

    /// Its members, by their ranks in the world.
    pub(crate) fn members(&self) -> &[Rank] {
        match self {
            Self::Thread { group, .. } | Self::First { group, .. } => group.members(),
            Self::Other(remote) => &remote.members,
        }
    }

    /// This rank's position among the members.
    pub(crate) fn index(&self) -> usize {
        match self {
            Self::Thread { group, .. } | Self::First { group, .. } => group.index(),
            Self::Other(remote) => remote.index,
        }
    }

    /// This rank.
    pub(crate) fn rank(&self) -> Rank {
        self.members()[self.index()]
    }

    /// How long ranks wait for each other.
    pub(crate) fn timeout(&self) -> Duration {
        match self {
            Self::Thread { group, .. } | Self::First { group, .. } => group.hub().timeout(),
            Self::Other(remote) => remote.timeout(),
        }
    }

    /// What this rank knows to have ended the world.
    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        match self {
            Self::Thread { group, .. } | Self::First { group, .. } => group.failure(),
            Self::Other(remote) => remote.failure(),
        }
    }

    /// Ends the world with `failure`, unless it has ended already; what it ended with.
    pub(crate) fn fail(&self, failure: CollectiveError) -> CollectiveError {
        match self {
            Self::Thread { group, .. } | Self::First { group, .. } => group.fail(failure.clone()),
            Self::Other(remote) => remote.fail(failure.clone()),
        }
        self.failure().unwrap_or(failure)
    }

    /// Every member's value, in rank order.
    pub(crate) fn exchange<T: Message>(
        &self,
        op: &Op,
        value: T,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        if let Self::Thread { group, roll } = self {
            roll.heard(group.rank());
            return group.exchange(op, value);
        }
        let unreadable = |error: postcard::Error| {
            self.fail(CollectiveError::Transport {
                rank: self.rank(),
                op: op.name,
                unit: op.unit.to_string(),
                reason: format!("a value cannot be sent: {error}"),
            })
        };
        let bytes = postcard::to_stdvec(&value).map_err(unreadable)?;
        let own = Arc::new(value);
        let read = |(index, bytes): (usize, &[u8])| match index == self.index() {
            true => Ok(own.clone()),
            false => postcard::from_bytes(bytes).map(Arc::new).map_err(unreadable),
        };
        match self {
            Self::Thread { .. } => unreachable!("handled above"),
            Self::First { group, roll, .. } => {
                roll.heard(Rank::ZERO);
                let all = group.exchange(op, bytes)?;
                all.iter().map(|bytes| bytes.as_slice()).enumerate().map(read).collect()
            }
            Self::Other(remote) => {
                let all = remote.exchange(op, bytes)?;
                all.iter().map(Vec::as_slice).enumerate().map(read).collect()
            }
        }
    }

    /// The members that give the same `color`, as a group. Every member calls it.
    pub(crate) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        Ok(match self {
            Self::Thread { group, roll } => {
                Self::Thread { group: group.split(color)?, roll: roll.clone() }
            }
            Self::First { group, roll, server } => Self::First {
                group: group.split(color)?,
                roll: roll.clone(),
                server: server.clone(),
            },
            Self::Other(remote) => Self::Other(remote.split(color)?),
        })
    }

    /// Says that this rank goes on, and asks whether the world does: what has ended it, if anything
    /// has.
    pub(crate) fn here(&self) -> Option<CollectiveError> {
        match self {
            Self::Thread { group, roll } | Self::First { group, roll, .. } => {
                roll.heard(group.rank());
                group.failure()
            }
            Self::Other(remote) => remote.here(),
        }
    }

    /// The members that have said nothing for so long.
    pub(crate) fn silent(&self, span: Duration) -> Vec<Rank> {
        let silent = match self {
            Self::Thread { roll, .. } | Self::First { roll, .. } => roll.silent(span),
            Self::Other(remote) => remote.silent(span),
        };
        let others = |rank: &Rank| *rank != self.rank() && self.members().contains(rank);
        silent.into_iter().filter(others).collect()
    }

    /// Ends this rank's part. Rank 0 stays, for a few seconds at most, until the others have left.
    pub(crate) fn leave(&self) {
        match self {
            Self::Thread { .. } => {}
            Self::First { server, .. } => server.leave(),
            Self::Other(remote) => remote.leave(),
        }
    }
}
