//! What the processes of a launch tell each other beside tensors: notices and failures.
//!
//! Before a collective moves data, each member sends every other one a *notice*: which group,
//! the how-many-eth collective of it, the operation, the unit, and what else the operation needs
//! told. A rank goes on when it has all of them. So whoever does not come is known by rank, ranks
//! that issue different collectives learn it before any data moves, and the wait for a slow peer is
//! a sleeping one; when data moves, everybody is there. Notices are a few dozen bytes, sent eagerly.
//!
//! The first failure is sent to everybody and ends every collective from then on, under way or
//! later.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::sys::{Comm, MpiError, Request};
use crate::collectives::Op;
use crate::collectives::failure::Failure;
use crate::error::CollectiveError;
use crate::layout::{Rank, WorldSize};

/// This process's end of a launch.
#[derive(Debug)]
pub(super) struct Link {
    comm: Comm,
    rank: Rank,
    world: WorldSize,
    timeout: Duration,
    /// Whether sizes are compared too.
    debug: bool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Notices that have arrived, by group and sender.
    inbox: HashMap<(u64, usize), VecDeque<Notice>>,
    sending: Vec<Sending>,
    failure: Option<CollectiveError>,
}

/// A message on its way, and the bytes it is read from.
#[derive(Debug)]
struct Sending {
    to: usize,
    request: Request,
    _bytes: Arc<Vec<u8>>,
}

#[derive(Debug, Serialize, Deserialize)]
enum Head {
    Notice { group: u64, sequence: u64, name: String, unit: String, size: u64 },
    Failure(Failure),
}

#[derive(Debug)]
struct Notice {
    sequence: u64,
    name: String,
    unit: String,
    size: u64,
    payload: Vec<u8>,
}

/// One member's view of a group: which it is, who is in it, and the collective it is at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rendezvous<'a> {
    pub(super) group: u64,
    pub(super) sequence: u64,
    pub(super) members: &'a [Rank],
}

impl Link {
    /// A link between all processes. All of them call it.
    pub(super) fn new(timeout: Duration, debug: bool) -> Result<Self, MpiError> {
        let comm = Comm::world()?;
        let world = WorldSize::new(comm.size()).expect("a communicator has this process");
        let rank = world.ranks().nth(comm.rank()).expect("a rank is below the size");
        Ok(Self { comm, rank, world, timeout, debug, state: Mutex::default() })
    }

    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    pub(super) fn world(&self) -> WorldSize {
        self.world
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Waits until every member has come to the collective, and returns what each has told, in
    /// the order of the members.
    pub(super) fn meet(
        &self,
        meeting: Rendezvous<'_>,
        op: &Op,
        payload: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let others = || meeting.members.iter().filter(|&&member| member != self.rank);
        let head = Head::Notice {
            group: meeting.group,
            sequence: meeting.sequence,
            name: op.name.to_string(),
            unit: op.unit.to_string(),
            size: op.size as u64,
        };
        if self.debug {
            tracing::debug!(target: "fsdp", "#{} {op}, {} elements", meeting.sequence, op.size);
        }
        let message = Arc::new(encode(&head, &payload));
        {
            let mut state = self.lock();
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            for &member in others() {
                let sent = self.send(&mut state, member.index(), &message);
                self.checked(op, sent, &mut state)?;
            }
        }
        let mut waiting = Waiting::new(self, op);
        loop {
            let mut state = self.lock();
            self.poll(op, &mut state)?;
            let arrived = |member: &Rank| {
                let queue = state.inbox.get(&(meeting.group, member.index()));
                queue.is_some_and(|queue| !queue.is_empty())
                    && state.sending.iter().all(|sending| sending.to != member.index())
            };
            let missing: Vec<Rank> = others().filter(|&member| !arrived(member)).copied().collect();
            if missing.is_empty() {
                break;
            }
            drop(state);
            waiting.more(missing)?;
        }
        let mut told = Vec::with_capacity(meeting.members.len());
        for &member in meeting.members {
            if member == self.rank {
                told.push(payload.clone());
                continue;
            }
            let key = (meeting.group, member.index());
            let notice = self.lock().inbox.get_mut(&key).and_then(VecDeque::pop_front);
            let notice = notice.expect("it has arrived, and only this thread takes it");
            let same = notice.name == op.name
                && notice.unit == *op.unit
                && notice.sequence == meeting.sequence
                && (!self.debug || notice.size == op.size as u64);
            if !same {
                // The lower rank's word is what was expected, on both sides.
                let theirs = Op::describe(&notice.name, &notice.unit, notice.size, self.debug);
                let ours = Op::describe(op.name, &op.unit, op.size as u64, self.debug);
                let (rank, found, peer, expected) = if member < self.rank {
                    (self.rank, ours, member, theirs)
                } else {
                    (member, theirs, self.rank, ours)
                };
                return Err(self.fail(CollectiveError::Mismatch { rank, found, peer, expected }));
            }
            told.push(notice.payload);
        }
        Ok(told)
    }

    /// Waits until all `transfers` with members of a group are complete.
    pub(super) fn complete(
        &self,
        op: &Op,
        mut transfers: Vec<(Rank, Request)>,
    ) -> Result<(), CollectiveError> {
        let mut waiting = Waiting::new(self, op);
        while !transfers.is_empty() {
            let before = transfers.len();
            let mut failed = None;
            transfers.retain_mut(|(_, request)| match request.test() {
                Ok(done) => !done,
                Err(error) => {
                    failed.get_or_insert(error);
                    false
                }
            });
            let mut state = self.lock();
            self.checked(op, failed.map_or(Ok(()), Err), &mut state)?;
            self.poll(op, &mut state)?;
            drop(state);
            if transfers.len() < before {
                waiting.reset();
            } else {
                let mut missing: Vec<Rank> = transfers.iter().map(|(peer, _)| *peer).collect();
                missing.sort_unstable();
                missing.dedup();
                waiting.more(missing)?;
            }
        }
        Ok(())
    }

    /// Takes in what has arrived, and drops what was sent.
    fn poll(&self, op: &Op, state: &mut State) -> Result<(), CollectiveError> {
        loop {
            let taken = self.comm.take();
            let Some((from, message)) = self.checked(op, taken, state)? else { break };
            match postcard::take_from_bytes::<Head>(&message) {
                Ok((Head::Notice { group, sequence, name, unit, size }, payload)) => {
                    let payload = payload.to_vec();
                    let notice = Notice { sequence, name, unit, size, payload };
                    state.inbox.entry((group, from)).or_default().push_back(notice);
                }
                Ok((Head::Failure(failure), _)) => {
                    let failure = failure.received(self.world);
                    state.failure.get_or_insert(failure);
                }
                Err(error) => {
                    let reason = format!("a message of rank {from} cannot be read: {error}");
                    return Err(self.fail_locked(state, self.transport(op, reason)));
                }
            }
        }
        let mut failed = None;
        state.sending.retain_mut(|sending| match sending.request.test() {
            Ok(done) => !done,
            Err(error) => {
                failed.get_or_insert(error);
                false
            }
        });
        self.checked(op, failed.map_or(Ok(()), Err), state)?;
        match &state.failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    fn send(&self, state: &mut State, to: usize, bytes: &Arc<Vec<u8>>) -> Result<(), MpiError> {
        // SAFETY: the bytes are held, unchanged, until the request is complete, or for ever.
        let request = unsafe { self.comm.send(bytes.as_ptr(), bytes.len(), to, 0) }?;
        state.sending.push(Sending { to, request, _bytes: bytes.clone() });
        Ok(())
    }

    /// What has ended the world, if anything has.
    pub(super) fn failure(&self) -> Option<CollectiveError> {
        self.lock().failure.clone()
    }

    /// Ends the world with `failure`, unless it has ended already; returns what it ended with.
    pub(super) fn fail(&self, failure: CollectiveError) -> CollectiveError {
        self.fail_locked(&mut self.lock(), failure)
    }

    fn fail_locked(&self, state: &mut State, failure: CollectiveError) -> CollectiveError {
        if let Some(first) = &state.failure {
            return first.clone();
        }
        state.failure = Some(failure.clone());
        let message = Arc::new(encode(&Head::Failure(Failure::sent(&failure, self.rank)), &[]));
        for peer in self.world.ranks().filter(|&peer| peer != self.rank) {
            // One that cannot be told learns it from the time-out.
            let _ = self.send(state, peer.index(), &message);
        }
        failure
    }

    /// Turns a refused call into the failure of the world.
    fn checked<T>(
        &self,
        op: &Op,
        outcome: Result<T, MpiError>,
        state: &mut State,
    ) -> Result<T, CollectiveError> {
        outcome.map_err(|error| self.fail_locked(state, self.transport(op, error.to_string())))
    }

    /// As [`checked`](Self::checked), for calls made without the lock.
    pub(super) fn check<T>(
        &self,
        op: &Op,
        outcome: Result<T, MpiError>,
    ) -> Result<T, CollectiveError> {
        self.checked(op, outcome, &mut self.lock())
    }

    /// A failure of this rank's transport.
    pub(super) fn transport(&self, op: &Op, reason: String) -> CollectiveError {
        CollectiveError::Transport {
            rank: self.rank,
            op: op.name,
            unit: op.unit.to_string(),
            reason,
        }
    }
}

impl Drop for Link {
    /// A message that is still on its way goes on, and is read from its bytes.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        std::mem::forget(std::mem::take(&mut state.sending));
    }
}

fn encode(head: &Head, payload: &[u8]) -> Vec<u8> {
    let mut bytes = postcard::to_stdvec(head).expect("a vector takes all that is written");
    bytes.extend_from_slice(payload);
    bytes
}

/// A wait for peers: at first a short one that spins, then one that sleeps.
struct Waiting<'a> {
    link: &'a Link,
    op: &'a Op,
    started: Instant,
    polls: u32,
}

impl<'a> Waiting<'a> {
    /// Polls that yield; a sleep takes some 60 µs at least.
    const YIELDS: u32 = 100;

    fn new(link: &'a Link, op: &'a Op) -> Self {
        Self { link, op, started: Instant::now(), polls: 0 }
    }

    /// A peer has moved.
    fn reset(&mut self) {
        (self.started, self.polls) = (Instant::now(), 0);
    }

    /// Waits for the next poll.
    fn more(&mut self, missing: Vec<Rank>) -> Result<(), CollectiveError> {
        self.polls += 1;
        if self.polls < Self::YIELDS {
            std::thread::yield_now();
            return Ok(());
        }
        if self.started.elapsed() > self.link.timeout {
            return Err(self.link.fail(CollectiveError::Timeout {
                op: self.op.name,
                unit: self.op.unit.to_string(),
                missing,
                waited: self.link.timeout,
            }));
        }
        std::thread::sleep(Duration::from_micros(if self.polls < 1000 { 20 } else { 500 }));
        Ok(())
    }
}
