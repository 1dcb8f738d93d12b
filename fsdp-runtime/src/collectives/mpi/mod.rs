//! The `mpi` engine: ranks are processes, started by Open MPI's `mpirun`.
//!
//! MPI moves the data; sums are taken here, in rank order, by the same function as on the `local`
//! engine, so that both find the same bits and half-precision needs no MPI type. A reduction is
//! therefore an exchange of parts (each rank gets every rank's gradient of what it keeps) and a sum
//! of them, which moves as many bytes as any reduce-scatter. Data goes from tensors on Flex straight
//! into slot memory; on other devices it is staged through the host.
//!
//! Every collective first *meets* ([`link`]), then moves data in non-blocking sends and receives that
//! are polled, so that a peer which dies or stops is found by the time-out and named. [`sys`] is the
//! layer over the library; how a process becomes a rank, and how it ends, is in `launch/process.rs`.

mod link;
pub(crate) mod sys;

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use burn::backend::TensorMetadata;
use burn::tensor::{Shape, TensorData};

use self::link::{Link, Meeting};
use self::sys::{Comm, MpiError, Request};
use super::group::Message;
use super::{Op, ProcessGroup, Reduce};
use crate::backend::{Float, ShardBackend, numel};
use crate::error::CollectiveError;
use crate::layout::FlatLayout;
use crate::mesh::{Rank, WorldSize};
use crate::nn::dropout::mix;
use crate::slot::Slot;

/// Bytes of the largest single message: a C int counts them.
const PIECE: usize = 1 << 30;

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
    parts: Mutex<Scratch>,
    /// Where a replicated gradient is put together.
    whole: Mutex<Scratch>,
    /// Where a device's gather arrives.
    staging: Mutex<Vec<f32>>,
}

/// A slot of whatever backend.
type Scratch = Option<Box<dyn Any + Send>>;

/// Data on its way: what is sent, what is received, and with whom.
#[derive(Default)]
struct Transfers {
    requests: Vec<(Rank, Request)>,
    /// The first call that MPI refused.
    refused: Option<MpiError>,
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
            parts: Mutex::default(),
            whole: Mutex::default(),
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
        let same = |&index: &usize| *colors[index] == color;
        let positions: Vec<usize> = (0..self.members.len()).filter(same).collect();
        let comm = self.link.check(&op, self.comm.split(color, self.index))?;
        // Every member finds the same number, and no other group of the launch has it.
        let split = self.splits.fetch_add(1, Ordering::Relaxed);
        let id = [split, color as u64].into_iter().fold(self.id, |id, part| mix(id ^ mix(part)));
        let members = positions.iter().map(|&index| self.members[index]).collect();
        let index = positions.iter().position(|&index| index == self.index).expect("own color");
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
        let meeting = Meeting { group: self.id, sequence, members: &self.members };
        self.link.meet(meeting, op, payload)
    }

    /// The positions of the other members, the next one first, so that not all begin with one.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (index, size) = (self.index, self.members.len());
        (1..size).map(move |step| (index + step) % size)
    }

    /// Starts to send elements to a member.
    ///
    /// # Safety
    ///
    /// They must stay, unchanged, until the transfers have ended well, and for ever otherwise.
    unsafe fn send(&self, transfers: &mut Transfers, to: usize, tag: usize, elements: &[f32]) {
        for piece in bytemuck::cast_slice::<f32, u8>(elements).chunks(PIECE) {
            // SAFETY: the caller keeps the elements.
            let request = unsafe { self.comm.send(piece.as_ptr(), piece.len(), to, tag) };
            transfers.add(self.members[to], request);
        }
    }

    /// Starts to receive `numel` elements from a member.
    ///
    /// # Safety
    ///
    /// Their place must stay, untouched, until the transfers have ended well, and for ever
    /// otherwise.
    unsafe fn receive(
        &self,
        transfers: &mut Transfers,
        from: usize,
        tag: usize,
        at: NonNull<f32>,
        numel: usize,
    ) {
        let bytes = numel * size_of::<f32>();
        for start in (0..bytes).step_by(PIECE) {
            let len = PIECE.min(bytes - start);
            // SAFETY: the caller keeps the place, which has `bytes` bytes.
            let request = unsafe {
                let at = at.cast::<u8>().add(start).as_ptr();
                self.comm.receive(at, len, from, tag)
            };
            transfers.add(self.members[from], request);
        }
    }

    /// Waits for transfers. On an error they may go on: what they touch, `kept`, is never freed.
    fn complete<K>(&self, op: &Op, transfers: Transfers, kept: K) -> Result<K, CollectiveError> {
        let outcome = self.link.check(op, transfers.refused.map_or(Ok(()), Err));
        match outcome.and_then(|()| self.link.complete(op, transfers.requests)) {
            Ok(()) => Ok(kept),
            Err(error) => {
                std::mem::forget(kept);
                Err(error)
            }
        }
    }

    /// A buffer of at least `numel` elements that is kept from one collective to the next.
    fn scratch<B: ShardBackend>(
        &self,
        scratch: &Mutex<Scratch>,
        device: &B::Device,
        numel: usize,
    ) -> Arc<Slot<B>> {
        let mut scratch = lock(scratch);
        if let Some(slot) = scratch.as_ref().and_then(|slot| slot.downcast_ref::<Arc<Slot<B>>>())
            && slot.numel() >= numel
        {
            return slot.clone();
        }
        let slot = Arc::new(Slot::<B>::new(device, numel));
        *scratch = Some(Box::new(slot.clone()));
        slot
    }

    /// Receives, into `slot`, what `expected` says: from whom, under which tag and where; `send`
    /// starts what this rank sends meanwhile, from `kept`.
    fn land<B: ShardBackend, K>(
        &self,
        op: &Op,
        slot: &Arc<Slot<B>>,
        device: &B::Device,
        expected: &[Expected],
        kept: K,
        send: impl FnOnce(&K, &mut Transfers),
    ) -> Result<K, CollectiveError> {
        let mut transfers = Transfers::default();
        let Some(start) = slot.host_memory().filter(|_| !always_staged()) else {
            return self.land_staged(op, slot, device, expected, kept, send);
        };
        for Expected { from, tag, range } in expected {
            assert!(range.end <= slot.numel(), "what arrives stays within its slot");
            // SAFETY: the range lies within the slot, which nobody reads while it is filled;
            // `complete` keeps the slot.
            unsafe {
                self.receive(&mut transfers, *from, *tag, start.add(range.start), range.len());
            }
        }
        send(&kept, &mut transfers);
        let (kept, _) = self.complete(op, transfers, (kept, slot.clone()))?;
        Ok(kept)
    }

    /// As [`land`](Self::land), by way of the host.
    fn land_staged<B: ShardBackend, K>(
        &self,
        op: &Op,
        slot: &Arc<Slot<B>>,
        device: &B::Device,
        expected: &[Expected],
        kept: K,
        send: impl FnOnce(&K, &mut Transfers),
    ) -> Result<K, CollectiveError> {
        let mut transfers = Transfers::default();
        let mut staging = std::mem::take(&mut *lock(&self.staging));
        let total: usize = expected.iter().map(|expected| expected.range.len()).sum();
        if staging.len() < total {
            staging.resize(total, 0.0);
        }
        let start = NonNull::from(staging.as_mut_slice()).cast::<f32>();
        let mut at = 0;
        for Expected { from, tag, range } in expected {
            // SAFETY: the ranges lie one after the other in `staging`; `complete` keeps it.
            unsafe { self.receive(&mut transfers, *from, *tag, start.add(at), range.len()) };
            at += range.len();
        }
        send(&kept, &mut transfers);
        let (kept, staging) = self.complete(op, transfers, (kept, staging))?;
        let mut at = 0;
        for Expected { range, .. } in expected {
            let elements = staging[at..at + range.len()].to_vec();
            slot.write(range.start, from_host::<B>(device, elements, &[range.len()]));
            at += range.len();
        }
        *lock(&self.staging) = staging;
        Ok(kept)
    }

    /// What member `index` keeps of a gradient, in elements: its fragment, or, where all keep all,
    /// the part that it sums for everybody.
    fn part(&self, keep: &Reduce, layout: &FlatLayout, index: usize) -> Range<usize> {
        match keep.segment {
            Some(segment) => layout.fragment(segment, self.position(index)),
            None => {
                let len = keep.range.len().div_ceil(self.members.len());
                let start = (index * len).min(keep.range.len());
                start..(start + len).min(keep.range.len())
            }
        }
    }

    /// A member's position, as a rank of the group.
    fn position(&self, index: usize) -> Rank {
        let size = WorldSize::new(self.members.len()).expect("a group has this process");
        size.ranks().nth(index).expect("an index is below the size")
    }

    /// The sums of this rank's parts, over `divisor`; `None` where no rank has the gradient.
    fn sum_parts<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: Vec<Option<Float<B>>>,
        reduction: &Reduction<'_>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let Reduction { keep, layout, divisor, present } = reduction;
        let size = self.members.len();
        // Where each member's part of each gradient arrives.
        let mut lens = Vec::with_capacity(keep.len() * size);
        for keep in *keep {
            let len = self.part(keep, layout, self.index).len();
            lens.extend((0..size).map(|from| if from == self.index { 0 } else { len }));
        }
        let regions = FlatLayout::new(lens, WorldSize::ONE);
        let slot = self.scratch::<B>(&self.parts, device, regions.padded_len());
        let mut expected = Vec::new();
        for entry in 0..keep.len() {
            for from in self.others().filter(|&from| present[from][entry]) {
                let range = regions.segment(entry * size + from);
                expected.push(Expected { from, tag: entry, range });
            }
        }
        let sent: Vec<_> = gradients.iter().map(|gradient| gradient.clone().map(B::host)).collect();
        self.land(op, &slot, device, &expected, sent, |sent, transfers| {
            for (entry, elements) in sent.iter().enumerate() {
                let Some(elements) = elements else { continue };
                for to in self.others() {
                    let part = self.part(&keep[entry], layout, to);
                    // SAFETY: `land` keeps `sent`, and with it the elements' place in memory.
                    unsafe { self.send(transfers, to, entry, &elements.as_ref()[part]) };
                }
            }
        })?;
        let mean = |(entry, keep): (usize, &Reduce)| {
            let range = self.part(keep, layout, self.index);
            if range.is_empty() {
                return None;
            }
            let part = |from: usize| match from == self.index {
                true => {
                    let own = gradients[entry].clone()?;
                    Some(B::fragment(own, range.clone(), Shape::from([range.len()])))
                }
                false => present[from][entry]
                    .then(|| slot.view(regions.segment(entry * size + from).start, &[range.len()])),
            };
            let parts: Vec<_> = (0..size).filter_map(part).collect();
            let whole = size == 1 || keep.segment.is_some();
            let shape = if whole { keep.shape.clone() } else { vec![range.len()] };
            (!parts.is_empty()).then(|| B::mean(&parts, 0..range.len(), *divisor, shape.into()))
        };
        Ok(keep.iter().enumerate().map(mean).collect())
    }

    /// The gradients that every rank keeps whole, from the parts of them that each has summed.
    fn join_parts<B: ShardBackend>(
        &self,
        op: &Op,
        device: &B::Device,
        sums: &mut [Option<Float<B>>],
        reduction: &Reduction<'_>,
    ) -> Result<(), CollectiveError> {
        let Reduction { keep, layout, present, .. } = reduction;
        let whole = |&entry: &usize| {
            keep[entry].segment.is_none()
                && !keep[entry].range.is_empty()
                && present.iter().any(|present| present[entry])
        };
        let entries: Vec<usize> = (0..keep.len()).filter(whole).collect();
        if entries.is_empty() {
            return Ok(());
        }
        let regions =
            FlatLayout::new(entries.iter().map(|&entry| keep[entry].range.len()), WorldSize::ONE);
        let slot = self.scratch::<B>(&self.whole, device, regions.padded_len());
        let mut expected = Vec::new();
        let mut own = Vec::new();
        for (at, &entry) in entries.iter().enumerate() {
            let start = regions.segment(at).start;
            let place = |index| {
                let part = self.part(&keep[entry], layout, index);
                start + part.start..start + part.end
            };
            for from in self.others() {
                expected.push(Expected { from, tag: keep.len() + entry, range: place(from) });
            }
            if let Some(sum) = sums[entry].take() {
                slot.write(place(self.index).start, sum.clone());
                own.push((entry, B::host(sum)));
            }
        }
        self.land(op, &slot, device, &expected, own, |own, transfers| {
            for (entry, sum) in own {
                for to in self.others() {
                    // SAFETY: `land` keeps `own`, and with it the elements' place in memory.
                    unsafe { self.send(transfers, to, keep.len() + entry, sum.as_ref()) };
                }
            }
        })?;
        for (at, &entry) in entries.iter().enumerate() {
            let numel = keep[entry].range.len();
            let view = slot.view(regions.segment(at).start, &[numel]);
            sums[entry] = Some(B::fragment(view, 0..numel, keep[entry].shape.clone().into()));
        }
        Ok(())
    }
}

impl<B: ShardBackend> ProcessGroup<B> for MpiGroup {
    fn all_gather(
        &self,
        op: &Op,
        device: &B::Device,
        fragments: Vec<(usize, Float<B>)>,
        shard_len: usize,
        slot: &Arc<Slot<B>>,
    ) -> Result<(), CollectiveError> {
        for (offset, fragment) in fragments {
            slot.write(offset, fragment);
        }
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
        fragment: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let len = fragment.as_ref().map(numel::<B>);
        let lens = self.exchange(op, len)?;
        let regions = lens.iter().enumerate().map(|(from, len)| match from == self.index {
            true => 0,
            false => len.unwrap_or(0),
        });
        let regions = FlatLayout::new(regions, WorldSize::ONE);
        let slot = Arc::new(Slot::<B>::new(device, regions.padded_len()));
        let expected: Vec<_> = self
            .others()
            .map(|from| Expected { from, tag: 0, range: regions.segment(from) })
            .collect();
        let sent = fragment.clone().map(B::host);
        self.land(op, &slot, device, &expected, sent, |sent, transfers| {
            for to in self.others() {
                if let Some(sent) = sent {
                    // SAFETY: `land` keeps `sent`.
                    unsafe { self.send(transfers, to, 0, sent.as_ref()) };
                }
            }
        })?;
        let of = |(from, len): (usize, &Arc<Option<usize>>)| {
            if from == self.index {
                return fragment.clone();
            }
            let len = (**len)?;
            let view = slot.view(regions.segment(from).start, &[len]);
            Some(B::fragment(view, 0..len, Shape::from([len])))
        };
        Ok(lens.iter().enumerate().map(of).collect())
    }

    fn reduce_scatter(
        &self,
        op: &Op,
        device: &B::Device,
        gradients: Vec<Option<Float<B>>>,
        keep: &[Reduce],
        layout: &FlatLayout,
        divisor: usize,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let present: Vec<bool> = gradients.iter().map(Option::is_some).collect();
        let present = self.exchange(op, present)?;
        let reduction = Reduction { keep, layout, divisor, present };
        let mut sums = self.sum_parts::<B>(op, device, gradients, &reduction)?;
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
        let shape: Vec<usize> =
            tensor.as_ref().map_or(Vec::new(), |tensor| tensor.shape().iter().copied().collect());
        let shapes = self.exchange(op, shape)?;
        let shape = Shape::from((*shapes[0]).clone());
        let numel = shape.num_elements();
        let root = self.index == 0;
        let slot = Arc::new(Slot::<B>::new(device, if root { 0 } else { numel }));
        let expected: Vec<_> =
            (!root).then_some(Expected { from: 0, tag: 0, range: 0..numel }).into_iter().collect();
        let sent = tensor.clone().filter(|_| root).map(B::host);
        self.land(op, &slot, device, &expected, sent, |sent, transfers| {
            for to in self.others() {
                if let Some(sent) = sent {
                    // SAFETY: `land` keeps `sent`.
                    unsafe { self.send(transfers, to, 0, sent.as_ref()) };
                }
            }
        })?;
        match tensor.filter(|_| root) {
            Some(tensor) => Ok(tensor),
            None => {
                let view = slot.view(0, &[numel]);
                Ok(B::fragment(view, 0..numel, shape))
            }
        }
    }
}

impl Transfers {
    fn add(&mut self, peer: Rank, request: Result<Request, MpiError>) {
        match request {
            Ok(request) => self.requests.push((peer, request)),
            Err(error) => {
                self.refused.get_or_insert(error);
            }
        }
    }
}

/// Elements that a member sends, and where they go.
struct Expected {
    from: usize,
    tag: usize,
    range: Range<usize>,
}

/// What all ranks know of a reduction.
struct Reduction<'a> {
    keep: &'a [Reduce],
    layout: &'a FlatLayout,
    divisor: usize,
    /// Which member has which gradient.
    present: Vec<Arc<Vec<bool>>>,
}

/// Tests of what devices need, where there is none, stage on Flex too.
#[cfg(test)]
pub(crate) static ALWAYS_STAGED: std::sync::atomic::AtomicBool =
    std::sync::atomic::AtomicBool::new(false);

fn always_staged() -> bool {
    #[cfg(test)]
    return ALWAYS_STAGED.load(Ordering::Relaxed);
    #[cfg(not(test))]
    false
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn from_host<B: ShardBackend>(device: &B::Device, elements: Vec<f32>, shape: &[usize]) -> Float<B> {
    B::float_from_data(TensorData::new(elements, shape.to_vec()), device)
}
