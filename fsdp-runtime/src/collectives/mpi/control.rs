//! Control messages between the processes of a launch: announcements of collectives, and failures.
//!
//! Before a collective moves data, its members hold a rendezvous: each sends an *announcement* to
//! every other member. It has the process group, the collective's sequence number in that group,
//! the operation, the unit, and a payload. A rank continues when it has received all announcements.
//! This gives three guarantees. A member that does not come is known by rank. Members that issue
//! different collectives find out before any data moves. And once data moves, all members are
//! ready, so that only the rendezvous waits for slow peers, and it sleeps while it does. An
//! announcement has a few dozen bytes, which MPI sends eagerly.
//!
//! A member may itself wait for another rank, in an earlier collective or in another process group. A
//! rank that waits for long therefore tells the others, so that a time-out names the rank that keeps
//! all of them waiting.
//!
//! The first failure is sent to all ranks. It ends all running and later collectives.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::sys::{Comm, MpiError, Request};
use super::wait::Wait;
use crate::collectives::failure::FailureMessage;
use crate::collectives::late::late_ranks;
use crate::collectives::op::Op;
use crate::error::{CollectiveError, IgnorePoison};
use crate::layout::{Rank, WorldSize};

/// This process's channel for control messages to and from all processes of a launch.
#[derive(Debug)]
pub(super) struct ControlChannel {
    comm: Comm,
    rank: Rank,
    world: WorldSize,
    timeout: Duration,
    /// Whether ranks compare the sizes of collectives, and log every collective.
    debug: bool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Announcements that were received and not used yet, by process group and sender.
    inbox: HashMap<(u64, usize), VecDeque<Announcement>>,
    sending: Vec<Sending>,
    /// Time of the last message of each rank that it waits for others.
    waiting: HashMap<Rank, Instant>,
    /// First failure of the run, as far as this rank knows of one.
    failure: Option<CollectiveError>,
}

/// A message that is being sent.
#[derive(Debug)]
struct Sending {
    to: usize,
    request: Request,
    /// The message, which MPI reads until the request is complete.
    bytes: Arc<Vec<u8>>,
}

/// The serialised start of a control message. An announcement's payload follows it.
#[derive(Debug, Serialize, Deserialize)]
enum Header {
    Announcement {
        group: u64,
        sequence: u64,
        name: String,
        unit: String,
        size: u64,
    },
    /// The sender waits in a collective.
    Waiting,
    Failure(FailureMessage),
}

/// A received announcement of a collective.
#[derive(Debug)]
struct Announcement {
    sequence: u64,
    name: String,
    unit: String,
    size: u64,
    payload: Vec<u8>,
}

/// One collective of a process group, to hold a rendezvous for.
#[derive(Clone, Copy, Debug)]
pub(super) struct CollectiveCall<'a> {
    /// Number of the process group.
    pub(super) group: u64,
    /// Sequence number of the collective in its process group.
    pub(super) sequence: u64,
    pub(super) members: &'a [Rank],
}

impl ControlChannel {
    /// Opens a channel between all processes. All of them call it.
    pub(super) fn new(timeout: Duration, debug: bool) -> Result<Self, MpiError> {
        let comm = Comm::world()?;
        let world = WorldSize::new(comm.size()).expect("a communicator has this process");
        let rank = world.ranks().nth(comm.rank()).expect("a rank is below the size");
        Ok(Self { comm, rank, world, timeout, debug, state: Mutex::default() })
    }

    /// Returns the rank of this process.
    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns the number of ranks.
    pub(super) fn world(&self) -> WorldSize {
        self.world
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    /// Waits until every member has announced the collective, and returns the members' payloads, in
    /// the order of `call.members`. With `to`, only the member at that position receives payloads,
    /// and the others get empty ones.
    pub(super) fn rendezvous(
        &self,
        call: CollectiveCall<'_>,
        op: &Op,
        to: Option<usize>,
        payload: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.announce(call, op, to, &payload)?;
        self.wait_for_announcements(call, op)?;
        let mut payloads = Vec::with_capacity(call.members.len());
        for &member in call.members {
            payloads.push(match member == self.rank {
                true => payload.clone(),
                false => self.take_announcement(call, op, member)?,
            });
        }
        Ok(payloads)
    }

    /// Returns the members of a collective but this rank.
    fn others<'a>(&self, call: CollectiveCall<'a>) -> impl Iterator<Item = Rank> + use<'a> {
        let own = self.rank;
        call.members.iter().copied().filter(move |&member| member != own)
    }

    /// Sends this rank's announcement to all other members, with the payload to that at position
    /// `to`, or to all.
    fn announce(
        &self,
        call: CollectiveCall<'_>,
        op: &Op,
        to: Option<usize>,
        payload: &[u8],
    ) -> Result<(), CollectiveError> {
        let header = Header::Announcement {
            group: call.group,
            sequence: call.sequence,
            name: op.name.to_string(),
            unit: op.unit.to_string(),
            size: op.size as u64,
        };
        if self.debug {
            tracing::debug!(target: "fsdp", "#{} {op}, {} elements", call.sequence, op.size);
        }
        let message = Arc::new(encode(&header, payload));
        let without = to.map(|_| Arc::new(encode(&header, &[])));
        let receiver = to.map(|to| call.members[to]);
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        for member in self.others(call) {
            let message = match &without {
                Some(without) if receiver != Some(member) => without,
                _ => &message,
            };
            let sent = self.send(&mut state, member.index(), message);
            self.check_locked(op, sent, &mut state)?;
        }
        Ok(())
    }

    /// Waits until an announcement of every other member has arrived, and this rank's own are sent.
    fn wait_for_announcements(
        &self,
        call: CollectiveCall<'_>,
        op: &Op,
    ) -> Result<(), CollectiveError> {
        let mut wait = Wait::new(self.timeout);
        loop {
            let mut state = self.lock();
            self.poll(op, &mut state)?;
            let is_ready = |member: &Rank| {
                let queue = state.inbox.get(&(call.group, member.index()));
                queue.is_some_and(|queue| !queue.is_empty())
                    && state.sending.iter().all(|sending| sending.to != member.index())
            };
            let missing: Vec<Rank> = self.others(call).filter(|member| !is_ready(member)).collect();
            if missing.is_empty() {
                return Ok(());
            }
            drop(state);
            self.pause(&mut wait, op, missing)?;
        }
    }

    /// Takes a member's announcement from the inbox, and returns its payload.
    ///
    /// # Errors
    ///
    /// Ends the run if the member has announced another collective than this rank.
    fn take_announcement(
        &self,
        call: CollectiveCall<'_>,
        op: &Op,
        member: Rank,
    ) -> Result<Vec<u8>, CollectiveError> {
        let key = (call.group, member.index());
        let announcement = self.lock().inbox.get_mut(&key).and_then(VecDeque::pop_front);
        let announcement = announcement.expect("it has arrived, and only this thread takes it");
        let matches = announcement.name == op.name
            && announcement.unit == *op.unit
            && announcement.sequence == call.sequence
            && (!self.debug || announcement.size == op.size as u64);
        if matches {
            return Ok(announcement.payload);
        }
        let Announcement { name, unit, size, .. } = announcement;
        let theirs = Op::describe(&name, &unit, size, self.debug);
        let ours = Op::describe(op.name, &op.unit, op.size as u64, self.debug);
        // Both sides report the collective of the lower rank as the expected one.
        let (rank, found, peer, expected) = if member < self.rank {
            (self.rank, ours, member, theirs)
        } else {
            (member, theirs, self.rank, ours)
        };
        Err(self.fail(CollectiveError::Mismatch { rank, found, peer, expected }))
    }

    /// Waits until all `transfers` with other ranks are complete.
    pub(super) fn complete(
        &self,
        op: &Op,
        mut transfers: Vec<(Rank, Request)>,
    ) -> Result<(), CollectiveError> {
        let mut wait = Wait::new(self.timeout);
        while !transfers.is_empty() {
            let before = transfers.len();
            let tested = drop_completed(&mut transfers, |(_, request)| request);
            let mut state = self.lock();
            self.check_locked(op, tested, &mut state)?;
            self.poll(op, &mut state)?;
            drop(state);
            if transfers.len() < before {
                wait.restart();
            } else {
                let mut missing: Vec<Rank> = transfers.iter().map(|(peer, _)| *peer).collect();
                missing.sort_unstable();
                missing.dedup();
                self.pause(&mut wait, op, missing)?;
            }
        }
        Ok(())
    }

    /// Waits until the next poll for messages of the `missing` ranks.
    ///
    /// # Errors
    ///
    /// Ends the run after the time-out.
    fn pause(&self, wait: &mut Wait, op: &Op, missing: Vec<Rank>) -> Result<(), CollectiveError> {
        if wait.pause() {
            return if wait.takes_long() { self.say_waiting(op) } else { Ok(()) };
        }
        let waiting = std::mem::take(&mut self.lock().waiting);
        let waits = |rank| waiting.get(&rank).is_some_and(|said| said.elapsed() < self.timeout / 2);
        let missing = late_ranks(missing, waits);
        Err(self.fail(CollectiveError::Timeout {
            op: op.name,
            unit: op.unit.to_string(),
            missing,
            waited: self.timeout,
        }))
    }

    /// Tells all other ranks that this rank waits.
    fn say_waiting(&self, op: &Op) -> Result<(), CollectiveError> {
        let message = Arc::new(encode(&Header::Waiting, &[]));
        let mut state = self.lock();
        for peer in self.world.ranks().filter(|&peer| peer != self.rank) {
            // A message that is still being sent says it already.
            let is_sent =
                |sending: &Sending| sending.to == peer.index() && sending.bytes == message;
            if state.sending.iter().any(is_sent) {
                continue;
            }
            let sent = self.send(&mut state, peer.index(), &message);
            self.check_locked(op, sent, &mut state)?;
        }
        Ok(())
    }

    /// Receives the control messages that have arrived, and frees those that were sent.
    ///
    /// # Errors
    ///
    /// Returns the failure that has ended the run, if there is one.
    fn poll(&self, op: &Op, state: &mut State) -> Result<(), CollectiveError> {
        loop {
            let received = self.comm.receive_any();
            let Some((from, message)) = self.check_locked(op, received, state)? else { break };
            match postcard::take_from_bytes::<Header>(&message) {
                Ok((Header::Announcement { group, sequence, name, unit, size }, payload)) => {
                    let payload = payload.to_vec();
                    let announcement = Announcement { sequence, name, unit, size, payload };
                    state.inbox.entry((group, from)).or_default().push_back(announcement);
                }
                Ok((Header::Waiting, _)) => {
                    if let Some(from) = self.world.rank(from) {
                        state.waiting.insert(from, Instant::now());
                    }
                }
                Ok((Header::Failure(failure), _)) => {
                    let failure = failure.into_error(self.world);
                    state.failure.get_or_insert(failure);
                }
                Err(error) => {
                    let reason = format!("a message of rank {from} cannot be read: {error}");
                    return Err(self.fail_locked(state, self.transport_error(op, reason)));
                }
            }
        }
        let tested = drop_completed(&mut state.sending, |sending| &mut sending.request);
        self.check_locked(op, tested, state)?;
        match &state.failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    fn send(&self, state: &mut State, to: usize, bytes: &Arc<Vec<u8>>) -> Result<(), MpiError> {
        // SAFETY: `state.sending` keeps the bytes, unchanged, until the request is complete; `drop`
        // leaks those of requests that are not.
        let request = unsafe { self.comm.send(bytes.as_ptr(), bytes.len(), to, 0) }?;
        state.sending.push(Sending { to, request, bytes: bytes.clone() });
        Ok(())
    }

    /// Returns the failure that has ended the run, as far as this rank knows of one.
    pub(super) fn failure(&self) -> Option<CollectiveError> {
        self.lock().failure.clone()
    }

    /// Ends the run of all ranks with `failure`, unless an earlier failure has ended it; returns
    /// the failure that it ended with.
    pub(super) fn fail(&self, failure: CollectiveError) -> CollectiveError {
        self.fail_locked(&mut self.lock(), failure)
    }

    fn fail_locked(&self, state: &mut State, failure: CollectiveError) -> CollectiveError {
        if let Some(first) = &state.failure {
            return first.clone();
        }
        state.failure = Some(failure.clone());
        let header = Header::Failure(FailureMessage::new(&failure, self.rank));
        let message = Arc::new(encode(&header, &[]));
        for peer in self.world.ranks().filter(|&peer| peer != self.rank) {
            // A peer that cannot be reached finds out by its time-out.
            let _ = self.send(state, peer.index(), &message);
        }
        failure
    }

    /// Ends the run if MPI has refused a call.
    fn check_locked<T>(
        &self,
        op: &Op,
        outcome: Result<T, MpiError>,
        state: &mut State,
    ) -> Result<T, CollectiveError> {
        outcome
            .map_err(|error| self.fail_locked(state, self.transport_error(op, error.to_string())))
    }

    /// Ends the run if MPI has refused a call; for callers that do not hold the lock.
    pub(super) fn check<T>(
        &self,
        op: &Op,
        outcome: Result<T, MpiError>,
    ) -> Result<T, CollectiveError> {
        self.check_locked(op, outcome, &mut self.lock())
    }

    /// Returns an error of this rank's transport.
    pub(super) fn transport_error(&self, op: &Op, reason: String) -> CollectiveError {
        CollectiveError::Transport {
            rank: self.rank,
            op: op.name,
            unit: op.unit.to_string(),
            reason,
        }
    }
}

impl Drop for ControlChannel {
    /// Leaks the messages that are still being sent: MPI reads their bytes until they are sent.
    fn drop(&mut self) {
        let state = self.state.get_mut().ignore_poison();
        std::mem::forget(std::mem::take(&mut state.sending));
    }
}

/// Removes the items whose requests are complete. Returns the first error, if MPI has refused a
/// test; an item whose test fails is removed too.
fn drop_completed<T>(
    items: &mut Vec<T>,
    request: impl Fn(&mut T) -> &mut Request,
) -> Result<(), MpiError> {
    let mut failed = None;
    items.retain_mut(|item| match request(item).test() {
        Ok(done) => !done,
        Err(error) => {
            failed.get_or_insert(error);
            false
        }
    });
    failed.map_or(Ok(()), Err)
}

fn encode(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = postcard::to_stdvec(header).expect("serialising to a vector does not fail");
    bytes.extend_from_slice(payload);
    bytes
}
