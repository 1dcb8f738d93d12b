//! A process group of MPI processes: its members, its splits, and the exchange of host values.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::control::{CollectiveCall, ControlChannel};
use super::sys::{self, Comm, MpiError};
use crate::collectives::message::Message;
use crate::collectives::op::Op;
use crate::collectives::regions::ReusedBuffers;
use crate::collectives::split::members_of_color;
use crate::error::CollectiveError;
use crate::layout::{Rank, mix};

/// A process group of processes, as this process sees it.
#[derive(Debug)]
pub(crate) struct MpiGroup {
    pub(super) control: Arc<ControlChannel>,
    /// MPI communicator of the members, for data.
    pub(super) comm: Comm,
    /// Number of the group, equal on all members and unique in the launch.
    id: u64,
    pub(super) members: Vec<Rank>,
    /// Position of this rank among the members.
    pub(super) index: usize,
    /// Sequence number of the next collective.
    sequence: AtomicU64,
    /// Number of times that the group has been split.
    splits: AtomicU64,
    /// Receive buffers for parts of gradients; reused, so that a training step allocates none.
    pub(super) part_buffers: ReusedBuffers,
    /// Buffers in which replicated gradients are assembled.
    pub(super) replicated_buffers: ReusedBuffers,
    /// Host buffer that data for other devices than Flex is received in.
    pub(super) staging: Mutex<Vec<u8>>,
}

impl MpiGroup {
    /// Creates the process group of all processes. All of them call it.
    ///
    /// Processes wait for each other for at most `timeout`. With `debug`, they compare the sizes of
    /// collectives and log every collective.
    pub(crate) fn world(timeout: Duration, debug: bool) -> Result<Self, MpiError> {
        sys::initialise()?;
        let control = ControlChannel::new(timeout, debug)?;
        let comm = Comm::world()?;
        let members: Vec<Rank> = control.world().ranks().collect();
        let index = control.rank().index();
        Ok(Self::new(Arc::new(control), comm, 0, members, index))
    }

    fn new(
        control: Arc<ControlChannel>,
        comm: Comm,
        id: u64,
        members: Vec<Rank>,
        index: usize,
    ) -> Self {
        Self {
            control,
            comm,
            id,
            members,
            index,
            sequence: AtomicU64::new(0),
            splits: AtomicU64::new(0),
            part_buffers: ReusedBuffers::default(),
            replicated_buffers: ReusedBuffers::default(),
            staging: Mutex::default(),
        }
    }

    /// Returns the name of this process's machine.
    pub(crate) fn machine() -> String {
        sys::processor_name()
    }

    /// Returns the members, as ranks of the world.
    pub(crate) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// Returns the rank of this process in the world.
    pub(crate) fn rank(&self) -> Rank {
        self.members[self.index]
    }

    /// Returns the failure that has ended the run, as far as this rank knows of one.
    pub(in crate::collectives) fn failure(&self) -> Option<CollectiveError> {
        self.control.failure()
    }

    /// Ends the run of all ranks with `failure`, unless an earlier failure has ended it.
    pub(in crate::collectives) fn fail(&self, failure: CollectiveError) {
        self.control.fail(failure);
    }

    /// Returns the process group of the members that give the same `color`. All members call it.
    pub(in crate::collectives) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        let op = Op::new("split", "the mesh");
        let colors = self.exchange(&op, color)?;
        let (positions, index) = members_of_color(&colors, color, self.index);
        let comm = self.control.check(&op, self.comm.split(color, self.index))?;
        // Every member computes the same id, and no other group of the launch has it.
        let split = self.splits.fetch_add(1, Ordering::Relaxed);
        let id = [split, color as u64].into_iter().fold(self.id, |id, part| mix(id ^ mix(part)));
        let members = positions.iter().map(|&index| self.members[index]).collect();
        Ok(Self::new(self.control.clone(), comm, id, members, index))
    }

    /// Returns every member's value, in rank order. All members call it.
    pub(in crate::collectives) fn exchange<T: Message>(
        &self,
        op: &Op,
        value: T,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        let bytes = postcard::to_stdvec(&value).map_err(|error| self.cannot_send(op, &error))?;
        let payloads = self.rendezvous(op, bytes)?;
        self.decode(op, value, &payloads)
    }

    /// Returns every member's value, in rank order, on the member at position `to`, and `None` on the
    /// others, which receive no value. All members call it.
    pub(in crate::collectives) fn gather_values<T: Message>(
        &self,
        op: &Op,
        to: usize,
        value: T,
    ) -> Result<Option<Vec<Arc<T>>>, CollectiveError> {
        let bytes = postcard::to_stdvec(&value).map_err(|error| self.cannot_send(op, &error))?;
        let payloads = self.control.rendezvous(self.next_call(), op, Some(to), bytes)?;
        if self.index == to {
            return self.decode(op, value, &payloads).map(Some);
        }
        debug_assert!(
            payloads.iter().enumerate().all(|(from, sent)| from == self.index || sent.is_empty()),
            "a gather sends values to one member only"
        );
        Ok(None)
    }

    fn cannot_send(&self, op: &Op, error: &postcard::Error) -> CollectiveError {
        let reason = format!("a value cannot be sent: {error}");
        self.control.fail(self.control.transport_error(op, reason))
    }

    /// Returns the values that all members have sent, in rank order; `value` is this rank's own.
    fn decode<T: Message>(
        &self,
        op: &Op,
        value: T,
        payloads: &[Vec<u8>],
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        let failed = |error: postcard::Error| self.cannot_send(op, &error);
        let value = Arc::new(value);
        let decode = |(index, bytes): (usize, &Vec<u8>)| match index == self.index {
            true => Ok(value.clone()),
            false => postcard::from_bytes(bytes).map(Arc::new).map_err(failed),
        };
        payloads.iter().enumerate().map(decode).collect()
    }

    /// Waits until every member has issued the collective, and returns the members' payloads, in
    /// rank order.
    pub(super) fn rendezvous(
        &self,
        op: &Op,
        payload: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.control.rendezvous(self.next_call(), op, None, payload)
    }

    fn next_call(&self) -> CollectiveCall<'_> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        CollectiveCall { group: self.id, sequence, members: &self.members }
    }

    /// Returns the positions of the other members, starting after this one: with a different first
    /// peer on each rank, the ranks do not all send to one peer at once.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (index, size) = (self.index, self.members.len());
        (1..size).map(move |step| (index + step) % size)
    }
}
