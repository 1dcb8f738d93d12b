//! The `mpi` engine: ranks are processes, started by Open MPI's `mpirun`.
//!
//! MPI moves the data; sums are taken here, in rank order, by the same function as on the `local`
//! engine, so that both find the same bits and half-precision needs no MPI type. A reduction is
//! therefore an exchange of parts (each rank gets every rank's gradient of what it keeps) and a sum
//! of them, which moves as many bytes as any reduce-scatter. Data goes from tensors on Flex straight
//! into slot memory; on other devices it is staged through the host.
//!
//! Every collective first *meets* ([`link`]), then moves data in non-blocking sends and receives that
//! are polled ([`transfer`]), so that a peer which dies or stops is found by the time-out and named.
//! [`sys`] is the layer over the library; how a process becomes a rank, and how it ends, is in
//! `launch/process.rs`.

mod link;
mod reduce;
pub(crate) mod sys;
mod transfer;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use burn::backend::TensorMetadata;

use self::link::{Link, Rendezvous};
use self::sys::{Comm, MpiError};
#[cfg(test)]
pub(crate) use self::transfer::ALWAYS_STAGED;
use self::transfer::Expected;
use super::group::Message;
use super::regions::{Arrivals, Reduction, Scratch, root_of};
use super::{Op, ProcessGroup, Reduce, of_color};
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend, numel};
use crate::error::CollectiveError;
use crate::layout::Rank;
use crate::layout::UnitLayout;
use crate::layout::mix;

/// This process's end of a group.
#[derive(Debug)]
pub(crate) struct MpiGroup {
    link: Arc<Link>,
    comm: Comm,
    id: u64,
    members: Vec<Rank>,
    /// This rank's position among the members.
    index: usize,
    sequence: AtomicU64,
    splits: AtomicU64,
    /// Where parts arrive before they are summed: kept, so that training allocates nothing.
    parts: Scratch,
    /// Where a replicated gradient is put together.
    whole: Scratch,
    /// Where a device's gather arrives.
    staging: Mutex<Vec<u8>>,
}

impl MpiGroup {
    /// The group of all processes, which wait for each other no longer than `timeout`. All of them
    /// call it; `debug` compares sizes before each collective.
    pub(crate) fn world(timeout: Duration, debug: bool) -> Result<Self, MpiError> {
        sys::initialise()?;
        let link = Link::new(timeout, debug)?;
        let comm = Comm::world()?;
        let members: Vec<Rank> = link.world().ranks().collect();
        let index = link.rank().index();
        Ok(Self::new(Arc::new(link), comm, 0, members, index))
    }

    fn new(link: Arc<Link>, comm: Comm, id: u64, members: Vec<Rank>, index: usize) -> Self {
        Self {
            link,
            comm,
            id,
            members,
            index,
            sequence: AtomicU64::new(0),
            splits: AtomicU64::new(0),
            parts: Scratch::default(),
            whole: Scratch::default(),
            staging: Mutex::default(),
        }
    }

    /// The name of this process's machine.
    pub(crate) fn machine() -> String {
        sys::processor_name()
    }

    /// Its members, by their ranks in the world.
    pub(crate) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// This rank.
    pub(crate) fn rank(&self) -> Rank {
        self.members[self.index]
    }

    /// What has ended the world, if anything has.
    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        self.link.failure()
    }

    /// Ends the world with `failure`, unless it has ended already.
    pub(crate) fn fail(&self, failure: CollectiveError) {
        self.link.fail(failure);
    }

    /// The members that give the same `color`, as a group.
    pub(crate) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        let op = Op::new("split", "the mesh");
        let colors = self.exchange(&op, color)?;
        let (positions, index) = of_color(&colors, color, self.index);
        let comm = self.link.check(&op, self.comm.split(color, self.index))?;
        // Every member finds the same number, and no other group of the launch has it.
        let split = self.splits.fetch_add(1, Ordering::Relaxed);
        let id = [split, color as u64].into_iter().fold(self.id, |id, part| mix(id ^ mix(part)));
        let members = positions.iter().map(|&index| self.members[index]).collect();
        Ok(Self::new(self.link.clone(), comm, id, members, index))
    }

    /// Every member's value, in rank order.
    pub(crate) fn exchange<T: Message>(
        &self,
        op: &Op,
        value: T,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        let unreadable = |error: postcard::Error| {
            self.link.fail(self.link.transport(op, format!("a value cannot be sent: {error}")))
        };
        let bytes = postcard::to_stdvec(&value).map_err(unreadable)?;
        let told = self.meet(op, bytes)?;
        let value = Arc::new(value);
        let read = |(index, bytes): (usize, &Vec<u8>)| match index == self.index {
            true => Ok(value.clone()),
            false => postcard::from_bytes(bytes).map(Arc::new).map_err(unreadable),
        };
        told.iter().enumerate().map(read).collect()
    }

    fn meet(&self, op: &Op, payload: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let meeting = Rendezvous { group: self.id, sequence, members: &self.members };
        self.link.meet(meeting, op, payload)
    }

    /// One tensor of each member, of these lengths, in rank order; `own` is this one's.
    fn land_each<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        lens: Vec<Option<usize>>,
        own: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let arrivals = Arrivals::<B>::new(device, lens, |member| member != self.index);
        let expected = |(from, range)| Expected { from, tag: 0, range };
        let expected: Vec<_> = arrivals.regions().map(expected).collect();
        let sent = own.clone().map(B::host);
        self.land(op, &arrivals.slot, device, &expected, sent, |sent, transfers| {
            for to in self.others() {
                if let Some(sent) = sent {
                    // SAFETY: `land` keeps `sent`.
                    unsafe { self.send(transfers, to, 0, sent.as_ref()) };
                }
            }
        })?;
        Ok(arrivals.into_tensors(self.index, own))
    }

    /// The positions of the other members, the next one first, so that not all begin with one.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (index, size) = (self.index, self.members.len());
        (1..size).map(move |step| (index + step) % size)
    }
}

impl<B: ShardBackend> ProcessGroup<B> for MpiGroup {
    fn all_gather(
        &self,
        op: &Op,
        device: &B::Device,
        shards: Vec<(usize, Float<B>)>,
        shard_len: usize,
        slot: &Arc<GatherBuffer<B>>,
    ) -> Result<(), CollectiveError> {
        slot.write_all(shards);
        self.meet(op, Vec::new())?;
        let shard = |index: usize| index * shard_len..(index + 1) * shard_len;
        let expected: Vec<_> =
            self.others().map(|from| Expected { from, tag: 0, range: shard(from) }).collect();
        let own = B::host(slot.view(shard(self.index).start, &[shard_len]));
        self.land(op, slot, device, &expected, own, |own, transfers| {
            for to in self.others() {
                // SAFETY: `land` keeps `own`, a view of this rank's part of the slot, or a copy.
                unsafe { self.send(transfers, to, 0, own.as_ref()) };
            }
        })?;
        Ok(())
    }

    fn all_gather_one(
        &self,
        op: &Op,
        device: &B::Device,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let lens = self.exchange(op, shard.as_ref().map(numel::<B>))?;
        self.land_each::<B>(op, device, lens.iter().map(|len| **len).collect(), shard)
    }

    fn reduce_scatter(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: Vec<Option<Float<B>>>,
        keep: &[Reduce],
        layout: &UnitLayout,
        divisor: usize,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let present: Vec<bool> = gradients.iter().map(Option::is_some).collect();
        let present = self.exchange(op, present)?;
        let reduction = Reduction { keep, layout, divisor, present };
        let mut sums = self.sum_parts::<B>(op, device, &gradients, &reduction)?;
        drop(gradients);
        if self.members.len() > 1 {
            self.join_parts::<B>(op, device, &mut sums, &reduction)?;
        }
        Ok(sums)
    }

    fn broadcast(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Option<Float<B>>,
    ) -> Result<Float<B>, CollectiveError> {
        let shapes = self.exchange(op, tensor.as_ref().map(|tensor| tensor.shape().to_vec()))?;
        let (root, shape, lens) = root_of(&shapes);
        let full = self.land_each::<B>(op, device, lens, tensor)?.swap_remove(root);
        Ok(B::float_reshape(full.expect("a rank gives the tensor"), shape))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
