//! A process group whose ranks exchange host values, but no tensors.

use std::sync::Arc;
use std::time::Duration;

use super::client::ClientGroup;
use super::error::StoreError;
use super::heartbeats::Heartbeats;
use super::rendezvous::Rendezvous;
use super::server::Server;
use crate::collectives::hub::Hub;
use crate::collectives::local::LocalGroup;
use crate::collectives::message::Message;
use crate::collectives::op::Op;
use crate::error::CollectiveError;
use crate::layout::Rank;

/// A process group for host values, as one rank sees it.
#[derive(Debug)]
pub(crate) enum HostGroup {
    /// The group of a rank in a run whose ranks are all threads.
    Thread { group: LocalGroup, heartbeats: Arc<Heartbeats> },
    /// The group of the process of rank 0, which serves the others.
    Server { group: LocalGroup, heartbeats: Arc<Heartbeats>, server: Arc<Server> },
    /// The group of another process, which is connected to rank 0.
    Client(ClientGroup),
}

impl HostGroup {
    /// Creates the group of all ranks for `rank`, which is a thread.
    pub(crate) fn thread(hub: Arc<Hub>, heartbeats: Arc<Heartbeats>, rank: Rank) -> Self {
        Self::Thread { group: LocalGroup::new(hub, rank), heartbeats }
    }

    /// Joins the group of all ranks, which are processes. Rank 0 listens, and does not wait for the
    /// others here; the others wait until they are connected to rank 0.
    pub(crate) fn process(rendezvous: &Rendezvous<'_>) -> Result<Self, StoreError> {
        if rendezvous.rank != Rank::ZERO {
            return ClientGroup::connect(rendezvous).map(Self::Client);
        }
        let hub = Hub::new(rendezvous.world, rendezvous.timeout, rendezvous.debug);
        let heartbeats = Heartbeats::new(rendezvous.world);
        let listener = rendezvous.listen()?;
        let run = (rendezvous.run.clone(), rendezvous.secret.clone());
        let server = Server::start(listener, hub.clone(), heartbeats.clone(), run);
        let server = server.map_err(|error| StoreError::NoThread { reason: error.to_string() })?;
        Ok(Self::Server { group: LocalGroup::new(hub, Rank::ZERO), heartbeats, server })
    }

    /// Returns whether all ranks are threads of one process.
    pub(in crate::collectives) fn is_of_threads(&self) -> bool {
        matches!(self, Self::Thread { .. })
    }

    /// Returns the members, as ranks of the world.
    pub(crate) fn members(&self) -> &[Rank] {
        match self {
            Self::Thread { group, .. } | Self::Server { group, .. } => group.members(),
            Self::Client(client) => client.members(),
        }
    }

    /// Returns the position of the calling rank among the members.
    pub(in crate::collectives) fn index(&self) -> usize {
        match self {
            Self::Thread { group, .. } | Self::Server { group, .. } => group.index(),
            Self::Client(client) => client.index(),
        }
    }

    /// Returns the calling rank, as a rank of the world.
    pub(crate) fn rank(&self) -> Rank {
        self.members()[self.index()]
    }

    /// Returns how long ranks wait for each other.
    pub(in crate::collectives) fn timeout(&self) -> Duration {
        match self {
            Self::Thread { group, .. } | Self::Server { group, .. } => group.hub().timeout,
            Self::Client(client) => client.timeout(),
        }
    }

    /// Returns the failure that has ended the run, as far as this rank knows of one.
    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        match self {
            Self::Thread { group, .. } | Self::Server { group, .. } => group.failure(),
            Self::Client(client) => client.failure(),
        }
    }

    /// Ends the run of all ranks with `failure`, unless an earlier failure has ended it; returns
    /// the failure that it ended with.
    pub(in crate::collectives) fn fail(&self, failure: CollectiveError) -> CollectiveError {
        match self {
            Self::Thread { group, .. } | Self::Server { group, .. } => group.fail(failure.clone()),
            Self::Client(client) => client.fail(failure.clone()),
        }
        self.failure().unwrap_or(failure)
    }

    /// Returns every member's value, in rank order. All members call it.
    pub(crate) fn exchange<T: Message>(
        &self,
        op: &Op,
        value: T,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        let all = self.exchange_to(op, None, value)?;
        Ok(all.expect("every member receives the values of an exchange"))
    }

    /// Returns every member's value, in rank order, on the member at position `to`, and `None` on the
    /// others, which receive no value. All members call it.
    pub(in crate::collectives) fn gather_values<T: Message>(
        &self,
        op: &Op,
        to: usize,
        value: T,
    ) -> Result<Option<Vec<Arc<T>>>, CollectiveError> {
        self.exchange_to(op, Some(to), value)
    }

    /// Exchanges values; with `to`, only the member at that position receives them.
    fn exchange_to<T: Message>(
        &self,
        op: &Op,
        to: Option<usize>,
        value: T,
    ) -> Result<Option<Vec<Arc<T>>>, CollectiveError> {
        let receives = to.is_none_or(|to| to == self.index());
        if let Self::Thread { group, heartbeats } = self {
            heartbeats.record(group.rank());
            return Ok(Some(group.exchange(op, value)?).filter(|_| receives));
        }
        let failed = |error: postcard::Error| {
            self.fail(CollectiveError::Transport {
                rank: self.rank(),
                op: op.name,
                unit: op.unit.to_string(),
                reason: format!("a value cannot be sent: {error}"),
            })
        };
        let bytes = postcard::to_stdvec(&value).map_err(failed)?;
        let own = Arc::new(value);
        let decode = |(index, bytes): (usize, &[u8])| match index == self.index() {
            true => Ok(own.clone()),
            false => postcard::from_bytes(bytes).map(Arc::new).map_err(failed),
        };
        let decoded: Result<Vec<_>, _> = match self {
            Self::Thread { .. } => unreachable!("handled above"),
            Self::Server { group, heartbeats, .. } => {
                heartbeats.record(Rank::ZERO);
                let all = group.exchange(op, bytes)?;
                let all = all.iter().filter(|_| receives).map(|bytes| bytes.as_slice());
                all.enumerate().map(decode).collect()
            }
            Self::Client(client) => {
                let all = client.exchange(op, to, bytes)?;
                all.iter().map(Vec::as_slice).enumerate().map(decode).collect()
            }
        };
        Ok(Some(decoded?).filter(|_| receives))
    }

    /// Returns the group of the members that give the same `color`. All members call it.
    pub(in crate::collectives) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        Ok(match self {
            Self::Thread { group, heartbeats } => {
                Self::Thread { group: group.split(color)?, heartbeats: heartbeats.clone() }
            }
            Self::Server { group, heartbeats, server } => Self::Server {
                group: group.split(color)?,
                heartbeats: heartbeats.clone(),
                server: server.clone(),
            },
            Self::Client(client) => Self::Client(client.split(color)?),
        })
    }

    /// Tells the other ranks that this rank is alive, and returns the failure that has ended the
    /// run, if there is one.
    pub(in crate::collectives) fn heartbeat(&self) -> Option<CollectiveError> {
        match self {
            Self::Thread { group, heartbeats } | Self::Server { group, heartbeats, .. } => {
                heartbeats.record(group.rank());
                group.failure()
            }
            Self::Client(client) => client.heartbeat(),
        }
    }

    /// Returns the other members that were not heard of during the last `span`.
    pub(in crate::collectives) fn silent(&self, span: Duration) -> Vec<Rank> {
        let silent = match self {
            Self::Thread { heartbeats, .. } | Self::Server { heartbeats, .. } => {
                heartbeats.silent(span)
            }
            Self::Client(client) => client.silent(span),
        };
        let is_other = |rank: &Rank| *rank != self.rank() && self.members().contains(rank);
        silent.into_iter().filter(is_other).collect()
    }

    /// Ends this rank's participation. Rank 0 waits, for a few seconds at most, until the other
    /// processes have left.
    pub(crate) fn leave(&self) {
        match self {
            Self::Thread { .. } => {}
            Self::Server { server, .. } => server.leave(),
            Self::Client(client) => client.leave(),
        }
    }
}
