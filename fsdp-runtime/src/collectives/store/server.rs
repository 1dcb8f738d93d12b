//! Rank 0's end of the store: every other rank's messages are said at its hub, by threads that stand
//! for that rank.

use std::collections::HashMap;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::Roll;
use super::wire::{
    Answer, GREETING, Hello, LARGEST_HELLO, Line, Notice, Reply, Request, Welcome, receive,
    receive_up_to, send,
};
use crate::collectives::Op;
use crate::collectives::failure::{Failure, known};
use crate::collectives::local::{Hub, LocalGroup};
use crate::error::CollectiveError;
use crate::layout::Rank;

/// How long a connection may take to say who it is.
const HELLO: Duration = Duration::from_secs(10);
/// How often the server looks whether the run has ended, while ranks are still to come.
const POLL: Duration = Duration::from_millis(10);
/// How long rank 0 stays for the others to hear how the run has ended.
const LINGER: Duration = Duration::from_secs(5);

/// The store, in the process of rank 0.
#[derive(Debug)]
pub(crate) struct Server {
    hub: Arc<Hub>,
    roll: Arc<Roll>,
    run: String,
    lines: Mutex<Lines>,
    changed: Condvar,
}

/// Which lines there have been, and how many there are.
#[derive(Debug, Default)]
struct Lines {
    joined: Vec<(Rank, Line)>,
    open: usize,
}

impl Server {
    /// Lets the other ranks in, as they come. The listener is closed when all are there.
    pub(super) fn start(
        listener: TcpListener,
        hub: Arc<Hub>,
        roll: Arc<Roll>,
        run: String,
    ) -> io::Result<Arc<Self>> {
        listener.set_nonblocking(true)?;
        let server =
            Arc::new(Self { hub, roll, run, lines: Mutex::default(), changed: Condvar::new() });
        let accepting = server.clone();
        std::thread::Builder::new()
            .name("fsdp-store".into())
            .spawn(move || accepting.accept(&listener))?;
        Ok(server)
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        let expected = 2 * (self.hub.world().size() - 1);
        while self.lock().joined.len() < expected && self.hub.failure().is_none() {
            let Ok((line, _)) = listener.accept() else {
                std::thread::sleep(POLL);
                continue;
            };
            let server = self.clone();
            let serve = move || {
                // One that does not say who it is, or hangs up, is no rank.
                let _ = server.serve(&line);
            };
            if let Err(error) = std::thread::Builder::new().name("fsdp-store".into()).spawn(serve) {
                self.hub.fail(CollectiveError::PeerFailed {
                    rank: Rank::ZERO,
                    reason: format!("no thread can be started for another rank: {error}"),
                });
            }
        }
    }

    fn serve(&self, line: &TcpStream) -> io::Result<()> {
        line.set_nonblocking(false)?;
        line.set_nodelay(true)?;
        line.set_read_timeout(Some(HELLO))?;
        line.set_write_timeout(Some(self.hub.timeout()))?;
        let hello: Hello = receive_up_to(line, LARGEST_HELLO)?;
        let rank = match self.admit(&hello) {
            Ok(rank) => rank,
            Err(reason) => return send(line, &Welcome::Err(reason)),
        };
        let served = send(line, &Welcome::Ok(())).and_then(|()| line.set_read_timeout(None));
        match (hello.line, served) {
            (Line::Requests, Ok(())) => self.requests(line, rank),
            (Line::Notices, Ok(())) => self.notices(line, rank),
            (_, Err(_)) => self.lost(rank),
        }
        self.lock().open -= 1;
        self.changed.notify_all();
        Ok(())
    }

    /// The rank of a connection, or why it is not let in.
    fn admit(&self, hello: &Hello) -> Result<Rank, String> {
        let Hello { greeting, run, rank, world, line } = hello;
        let expected = self.hub.world();
        if greeting != GREETING {
            return Err(format!("rank 0 is a program with {GREETING}, this one has {greeting}"));
        }
        if *run != self.run {
            return Err(format!("rank 0 belongs to the run `{}`, this one to `{run}`", self.run));
        }
        if *world != expected.size() {
            return Err(format!("rank 0 is one of {expected} ranks, this one of {world}"));
        }
        let rank = expected.ranks().nth(*rank).filter(|&rank| rank != Rank::ZERO);
        let rank = rank.ok_or_else(|| format!("there is a rank {} already", hello.rank))?;
        let mut lines = self.lock();
        if lines.joined.contains(&(rank, *line)) {
            return Err(format!("there is a rank {rank} already"));
        }
        lines.joined.push((rank, *line));
        lines.open += 1;
        Ok(rank)
    }

    /// Stands for a rank at the hub, until its line is closed.
    fn requests(&self, line: &TcpStream, rank: Rank) {
        let mut groups = HashMap::from([(0, LocalGroup::new(self.hub.clone(), rank))]);
        while let Ok(request) = receive::<Request>(line) {
            self.roll.heard(rank);
            let answered = self.answer(&mut groups, request, rank);
            let reply = answered
                .unwrap_or_else(|failure| Reply::Failed(Failure::sent(&failure, Rank::ZERO)));
            if send(line, &reply).is_err() {
                return self.lost(rank);
            }
        }
    }

    fn answer(
        &self,
        groups: &mut HashMap<u64, LocalGroup>,
        request: Request,
        rank: Rank,
    ) -> Result<Reply, CollectiveError> {
        let unknown = |group: u64| {
            let failure = CollectiveError::PeerFailed {
                rank,
                reason: format!("it speaks in group {group}, which it is not in"),
            };
            self.hub.fail(failure.clone());
            failure
        };
        match request {
            Request::Exchange { group, name, unit, size, value } => {
                let op = Op::new(known(&name), unit).of(usize::try_from(size).unwrap_or(0));
                self.roll.came_to(rank, &op);
                let group = groups.get(&group).ok_or_else(|| unknown(group))?;
                let values = group.exchange(&op, value)?;
                Ok(Reply::Values(values.iter().map(|value| (**value).clone()).collect()))
            }
            Request::Split { group, color } => {
                let part = groups.get(&group).ok_or_else(|| unknown(group))?;
                let part = part.split(usize::try_from(color).unwrap_or(usize::MAX))?;
                let members = part.members().iter().map(|member| member.index()).collect();
                let reply = Reply::Group { id: part.id(), members, index: part.index() };
                groups.insert(part.id(), part);
                Ok(reply)
            }
        }
    }

    /// Answers a rank's notices. One whose line ends without a word has ended the run.
    fn notices(&self, line: &TcpStream, rank: Rank) {
        while let Ok(notice) = receive::<Notice>(line) {
            self.roll.heard(rank);
            match notice {
                Notice::Here => {}
                Notice::Silent(millis) => {
                    let silent = self.roll.silent(Duration::from_millis(millis));
                    let silent = silent.into_iter().map(Rank::index).collect();
                    if send(line, &Answer::Silent(silent)).is_err() {
                        break;
                    }
                    continue;
                }
                Notice::Failed(failure) => self.hub.fail(failure.received(self.hub.world())),
                Notice::Bye => return,
            }
            let answer = self.hub.failure().map_or(Answer::Going, |failure| {
                Answer::Ended(Failure::sent(&failure, Rank::ZERO))
            });
            if send(line, &answer).is_err() {
                break;
            }
        }
        self.lost(rank);
    }

    /// A rank's line is gone.
    fn lost(&self, rank: Rank) {
        let reason = match self.roll.last(rank) {
            Some(last) => format!("its process ended, or cannot be reached, after {last}"),
            None => "its process ended, or cannot be reached".into(),
        };
        self.hub.fail(CollectiveError::PeerFailed { rank, reason });
    }

    /// Stays until every other rank has left, for a few seconds at most.
    pub(super) fn leave(&self) {
        let until = Instant::now() + LINGER;
        let mut lines = self.lock();
        while lines.open > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            (lines, _) = self
                .changed
                .wait_timeout(lines, left)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }
}
