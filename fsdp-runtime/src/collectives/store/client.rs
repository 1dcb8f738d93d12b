//! Another rank's end of the store.

use std::io;
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::wire::{
    Answer, GREETING, Hello, LARGEST_HELLO, Line, Notice, Reply, Request, Welcome, receive,
    receive_up_to, send,
};
use super::{Rendezvous, StoreError};
use crate::collectives::Op;
use crate::collectives::failure::Failure;
use crate::error::CollectiveError;
use crate::layout::{Rank, WorldSize};

/// How much longer than the other ranks' time-out a rank waits for rank 0's process.
const GRACE: Duration = Duration::from_secs(2);
/// Between two attempts to connect.
const RETRY: Duration = Duration::from_millis(50);
/// How long one attempt to connect may take, and an answer that needs no other rank.
const ATTEMPT: Duration = Duration::from_secs(5);

/// A rank's lines to rank 0.
#[derive(Debug)]
struct Lines {
    requests: Mutex<TcpStream>,
    notices: Mutex<TcpStream>,
    rank: Rank,
    world: WorldSize,
    timeout: Duration,
    failure: Mutex<Option<CollectiveError>>,
}

/// One group of ranks, as a rank other than the first is in it.
#[derive(Clone, Debug)]
pub(crate) struct Remote {
    lines: Arc<Lines>,
    id: u64,
    pub(super) members: Vec<Rank>,
    pub(super) index: usize,
}

impl Remote {
    /// Connects to rank 0, which may not be there yet.
    pub(super) fn connect(meeting: &Rendezvous<'_>) -> Result<Self, StoreError> {
        let deadline = Instant::now() + meeting.timeout;
        let requests = join(meeting, Line::Requests, deadline)?;
        let notices = join(meeting, Line::Notices, deadline)?;
        let lines = Lines {
            requests: Mutex::new(requests),
            notices: Mutex::new(notices),
            rank: meeting.rank,
            world: meeting.world,
            timeout: meeting.timeout,
            failure: Mutex::default(),
        };
        let members = meeting.world.ranks().collect();
        Ok(Self { lines: Arc::new(lines), id: 0, members, index: meeting.rank.index() })
    }

    /// This rank.
    pub(super) fn rank(&self) -> Rank {
        self.lines.rank
    }

    /// How long ranks wait for each other.
    pub(super) fn timeout(&self) -> Duration {
        self.lines.timeout
    }

    /// Every member's bytes, in rank order.
    pub(super) fn exchange(
        &self,
        op: &Op,
        value: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let request = Request::Exchange {
            group: self.id,
            name: op.name.into(),
            unit: op.unit.to_string(),
            size: op.size as u64,
            value,
        };
        match self.lines.request(op, &request)? {
            Reply::Values(values) if values.len() == self.members.len() => Ok(values),
            _ => Err(self.lines.unreadable(op)),
        }
    }

    /// The members that give the same color.
    pub(super) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        let op = Op::new("split", "the mesh");
        let request = Request::Split { group: self.id, color: color as u64 };
        let Reply::Group { id, members, index } = self.lines.request(&op, &request)? else {
            return Err(self.lines.unreadable(&op));
        };
        let member = |index: usize| self.lines.world.ranks().nth(index);
        let found: Option<Vec<Rank>> = members.into_iter().map(member).collect();
        match found {
            Some(members) if members.get(index) == Some(&self.rank()) => {
                Ok(Self { lines: self.lines.clone(), id, members, index })
            }
            _ => Err(self.lines.unreadable(&op)),
        }
    }

    /// What this rank knows to have ended the world.
    pub(super) fn failure(&self) -> Option<CollectiveError> {
        self.lines.lock_failure().clone()
    }

    /// Says that this rank goes on, and asks whether the world does.
    pub(super) fn here(&self) -> Option<CollectiveError> {
        if let Some(failure) = self.failure() {
            return Some(failure);
        }
        match self.lines.notice(&Notice::Here) {
            Ok(Answer::Ended(failure)) => {
                Some(self.lines.ended(failure.received(self.lines.world)))
            }
            // No answer in time is for the next exchange to judge.
            Ok(_) => None,
            Err(error) if is_time_out(&error) => None,
            Err(_) => Some(self.lines.lost_rank_0()),
        }
    }

    /// The ranks that have said nothing for so long.
    pub(super) fn silent(&self, span: Duration) -> Vec<Rank> {
        let millis = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        match self.lines.notice(&Notice::Silent(millis)) {
            Ok(Answer::Silent(ranks)) => {
                let world = self.lines.world;
                ranks.into_iter().filter_map(|rank| world.ranks().nth(rank)).collect()
            }
            _ => vec![Rank::ZERO],
        }
    }

    /// Ends the world, unless it has ended already.
    pub(super) fn fail(&self, failure: CollectiveError) {
        let sent = Failure::sent(&failure, self.rank());
        // The first to be told counts, and that is for rank 0 to say.
        let failure = match self.lines.notice(&Notice::Failed(sent)) {
            Ok(Answer::Ended(first)) => first.received(self.lines.world),
            _ => failure,
        };
        self.lines.ended(failure);
    }

    /// Hangs up.
    pub(super) fn leave(&self) {
        let notices = self.lines.lock_notices();
        let _ = send(&*notices, &Notice::Bye);
        let _ = notices.shutdown(Shutdown::Write);
        // A request that is under way ends with it.
        if let Ok(requests) = self.lines.requests.try_lock() {
            let _ = requests.shutdown(Shutdown::Both);
        }
    }
}

impl Lines {
    fn lock_failure(&self) -> MutexGuard<'_, Option<CollectiveError>> {
        self.failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn lock_notices(&self) -> MutexGuard<'_, TcpStream> {
        self.notices.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What has ended the world; the first counts.
    fn ended(&self, failure: CollectiveError) -> CollectiveError {
        self.lock_failure().get_or_insert(failure).clone()
    }

    fn request(&self, op: &Op, request: &Request) -> Result<Reply, CollectiveError> {
        let line = self.requests.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(failure) = &*self.lock_failure() {
            return Err(failure.clone());
        }
        let replied = line
            .set_read_timeout(Some(self.timeout.saturating_add(GRACE)))
            .and_then(|()| send(&*line, request))
            .and_then(|()| receive(&*line));
        match replied {
            Ok(Reply::Failed(failure)) => Err(self.ended(failure.received(self.world))),
            Ok(reply) => Ok(reply),
            Err(error) if is_time_out(&error) => Err(self.ended(CollectiveError::Timeout {
                op: op.name,
                unit: op.unit.to_string(),
                missing: vec![Rank::ZERO],
                waited: self.timeout,
            })),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(self.unreadable(op)),
            Err(_) => Err(self.lost_rank_0()),
        }
    }

    fn notice(&self, notice: &Notice) -> io::Result<Answer> {
        let line = self.lock_notices();
        line.set_read_timeout(Some(ATTEMPT.min(self.timeout)))?;
        send(&*line, notice)?;
        receive(&*line)
    }

    fn lost_rank_0(&self) -> CollectiveError {
        let reason = "its process ended, or cannot be reached".into();
        self.ended(CollectiveError::PeerFailed { rank: Rank::ZERO, reason })
    }

    fn unreadable(&self, op: &Op) -> CollectiveError {
        self.ended(CollectiveError::Transport {
            rank: self.rank,
            op: op.name,
            unit: op.unit.to_string(),
            reason: "what rank 0 has sent cannot be read".into(),
        })
    }
}

fn is_time_out(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Opens one line.
fn join(meeting: &Rendezvous<'_>, line: Line, deadline: Instant) -> Result<TcpStream, StoreError> {
    let (host, port) = meeting.at();
    let connected = connect(meeting, deadline)?;
    let hello = Hello {
        greeting: GREETING.into(),
        run: meeting.run.clone(),
        rank: meeting.rank.index(),
        world: meeting.world.size(),
        line,
    };
    let greeted = || -> io::Result<Welcome> {
        connected.set_nodelay(true)?;
        connected.set_read_timeout(Some(ATTEMPT))?;
        connected.set_write_timeout(Some(meeting.timeout))?;
        send(&connected, &hello)?;
        receive_up_to(&connected, LARGEST_HELLO)
    };
    match greeted() {
        Ok(Ok(())) => Ok(connected),
        Ok(Err(reason)) => Err(StoreError::Refused { host, port, rank: meeting.rank, reason }),
        Err(error) => Err(StoreError::Foreign { host, port, reason: error.to_string() }),
    }
}

fn connect(meeting: &Rendezvous<'_>, deadline: Instant) -> Result<TcpStream, StoreError> {
    let (host, port) = meeting.at();
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
            let left = deadline.saturating_duration_since(Instant::now());
            let wait = ATTEMPT.min(left).max(Duration::from_millis(1));
            match TcpStream::connect_timeout(&address, wait) {
                Ok(connected) => return Ok(connected),
                Err(error) => reason = error.to_string(),
            }
        }
        if Instant::now() >= deadline {
            return Err(StoreError::Unreachable { host, port, waited: meeting.timeout, reason });
        }
        std::thread::sleep(RETRY);
    }
}
