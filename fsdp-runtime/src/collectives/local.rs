//! The `local` engine: ranks are threads of one process, which exchange tensors by reference.
//!
//! Every collective is one *exchange*; a reduction of large replicated gradients is two, of gradients and of
//! means. The n-th exchange of a process group is its n-th *round*:
//! each member puts its value into the round and waits until all members have done so. Exchanged
//! values are never modified afterwards, so a rank may read its peers' values for as long as it
//! likes, without a second rendezvous. Every rank sums in rank order, so results do not depend on
//! timing.
//!
//! The hub keeps the first failure: a time-out, ranks that issue different operations, or a rank
//! that panicked or ended before the others. This failure ends all running and later exchanges of
//! all process groups.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use fsdp_kernels::RankMean;

pub(crate) use super::hub::Hub;
use super::hub::{Round, RoundKey, State};
use super::late::late_ranks;
use super::op::Op;
use super::process_group::{ProcessGroup, Reduce, ReduceScatter, before, means_of};
use super::split::members_of_color;
use crate::backend::gather_buffer::GatherBuffer;
use crate::backend::{Float, ShardBackend, cast, numel};
use crate::error::{CollectiveError, IgnorePoison};
use crate::layout::Rank;

/// A process group of thread ranks, as one of them sees it.
#[derive(Debug)]
pub(crate) struct LocalGroup {
    hub: Arc<Hub>,
    /// Number of the group at its hub; 0 for the group of all ranks.
    id: u64,
    members: Vec<Rank>,
    /// Position of the calling rank among the members.
    index: usize,
    /// Sequence number of the next exchange.
    sequence: AtomicU64,
    /// Tensors of other ranks that this rank has read since the last exchange.
    read: Mutex<Option<Box<dyn Any + Send>>>,
}

impl LocalGroup {
    /// Creates the process group of all ranks, as `rank` sees it.
    pub(crate) fn new(hub: Arc<Hub>, rank: Rank) -> Self {
        let members = hub.world.ranks().collect();
        Self {
            hub,
            id: 0,
            members,
            index: rank.index(),
            sequence: AtomicU64::new(0),
            read: Mutex::default(),
        }
    }

    /// Returns the process group of the members that give the same `color`. All members call it.
    pub(super) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        let op = Op::new("split", "the mesh");
        let colors = self.exchange(&op, color)?;
        let (positions, index) = members_of_color(&colors, color, self.index);
        // The first member of each new group chooses the group's id.
        let first = positions[0];
        let id = (first == self.index).then(|| {
            let mut state = self.hub.lock();
            state.groups += 1;
            state.groups
        });
        let ids = self.exchange(&op, id)?;
        Ok(Self {
            hub: self.hub.clone(),
            id: ids[first].expect("the first member of a group chooses its id"),
            members: positions.iter().map(|&index| self.members[index]).collect(),
            index,
            sequence: AtomicU64::new(0),
            read: Mutex::default(),
        })
    }

    /// Returns the members, as ranks of the world.
    pub(super) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// Returns the position of the calling rank among the members.
    #[cfg(any(test, feature = "nccl"))]
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// Returns the group's number at its hub.
    #[cfg(any(test, feature = "nccl"))]
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Returns the hub through which the members exchange values.
    #[cfg(any(test, feature = "nccl"))]
    pub(super) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// Returns the failure that has ended the run, if there is one.
    #[cfg(any(test, feature = "mpi", feature = "nccl"))]
    pub(super) fn failure(&self) -> Option<CollectiveError> {
        self.hub.failure()
    }

    /// Ends the run of all ranks with `failure`, unless an earlier failure has ended it.
    pub(super) fn fail(&self, failure: CollectiveError) {
        self.hub.fail(failure);
    }

    /// Announces that this rank takes part in no further exchange, so that ranks which wait for it
    /// fail at once.
    pub(super) fn leave(&self) {
        self.hub.lock().ended.push(self.rank());
        self.hub.changed.notify_all();
    }

    /// Returns the calling rank, as a rank of the world.
    pub(super) fn rank(&self) -> Rank {
        self.members[self.index]
    }

    /// Returns every member's value, in rank order.
    ///
    /// # Errors
    ///
    /// Returns the first failure of the run. It arises here if a member issues another operation,
    /// has ended its run, or does not join within the time-out.
    pub(super) fn exchange<T: Any + Send + Sync>(
        &self,
        op: &Op,
        value: T,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        let hub = &*self.hub;
        let key = (self.id, self.sequence.fetch_add(1, Ordering::Relaxed));
        let started = Instant::now();
        let mut state = hub.lock();
        let round = self.join_round(&mut state, key, op)?;
        round.values[self.index] = Some(Arc::new(value));
        hub.changed.notify_all();
        let values = loop {
            // A complete round succeeds even if a member that has already taken it has failed
            // since.
            if let Some(values) = state.take_values(key) {
                break values;
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let remaining = self.remaining_wait(&mut state, key, op, started)?;
            state.waiting.insert(self.rank());
            (state, _) = hub.changed.wait_timeout(state, remaining).ignore_poison();
            state.waiting.remove(&self.rank());
        };
        drop(state);
        Ok(values
            .into_iter()
            .map(|value| value.downcast().expect("one operation exchanges one type"))
            .collect())
    }

    /// Returns every member's value, in rank order, on the member at position `to`, and `None` on the
    /// others.
    pub(super) fn gather_values<T: Any + Send + Sync>(
        &self,
        op: &Op,
        to: usize,
        value: T,
    ) -> Result<Option<Vec<Arc<T>>>, CollectiveError> {
        let values = self.exchange(op, value)?;
        Ok((self.index == to).then_some(values))
    }

    /// Returns every member's tensors, in rank order, and orders later operations of the calling
    /// thread after all that the members have issued.
    pub(super) fn exchange_on_device<B: ShardBackend, T: Any + Send + Sync>(
        &self,
        op: &Op,
        device: &B::Device,
        tensors: T,
    ) -> Result<Vec<Fenced<B, T>>, CollectiveError> {
        let peers = self.exchange(op, (tensors, B::fence(device)))?;
        for peer in &peers {
            B::wait_for(&peer.1);
        }
        // The exchange has ordered this rank's later work after the members' reads of its tensors,
        // and the members' later work after this rank's reads.
        drop(self.read.lock().ignore_poison().take());
        Ok(peers)
    }

    /// Keeps the members' tensors, which this rank reads on a device.
    ///
    /// An owner may update a shard in its memory only when no other rank refers to it. This rank's
    /// reads may not have run yet; the next exchange tells the owner about them.
    fn keep_until_next_exchange<B: ShardBackend, T: Send + Sync + 'static>(
        &self,
        peers: Vec<Fenced<B, T>>,
    ) {
        if !B::IN_HOST_MEMORY {
            *self.read.lock().ignore_poison() = Some(Box::new(peers));
        }
    }

    /// Returns a round to join, which is opened if this rank is the first to join.
    fn join_round<'a>(
        &self,
        state: &'a mut State,
        key: RoundKey,
        op: &Op,
    ) -> Result<&'a mut Round, CollectiveError> {
        let debug = self.hub.debug;
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let round = state.rounds.entry(key).or_insert_with(|| Round {
            op: op.clone(),
            opened_by: self.rank(),
            values: vec![None; self.members.len()],
            taken: 0,
        });
        if debug {
            tracing::debug!(target: "fsdp", "#{} {op}, {} elements", key.1, op.size);
        }
        if !round.op.matches(op, debug) {
            let describe = |op: &Op| Op::describe(op.name, &op.unit, op.size as u64, debug);
            let failure = CollectiveError::Mismatch {
                rank: self.rank(),
                found: describe(op),
                peer: round.opened_by,
                expected: describe(&round.op),
            };
            state.failure = Some(failure.clone());
            self.hub.changed.notify_all();
            return Err(failure);
        }
        Ok(round)
    }

    /// Returns how much longer to wait for the absent members of a round.
    ///
    /// # Errors
    ///
    /// Ends the run if an absent member has ended its run, or if the time-out has passed.
    fn remaining_wait(
        &self,
        state: &mut State,
        key: RoundKey,
        op: &Op,
        started: Instant,
    ) -> Result<Duration, CollectiveError> {
        let hub = &*self.hub;
        let absent = state.rounds[&key].values.iter().zip(&self.members);
        let absent = absent.filter(|(value, _)| value.is_none()).map(|(_, rank)| *rank);
        let ended = absent.clone().any(|rank| state.ended.contains(&rank));
        let remaining = hub.timeout.checked_sub(started.elapsed());
        if let (false, Some(remaining)) = (ended, remaining) {
            return Ok(remaining);
        }
        let (op, unit) = (op.name, op.unit.to_string());
        let failure = match ended {
            true => {
                let ended = absent.filter(|rank| state.ended.contains(rank)).collect();
                CollectiveError::Ended { op, unit, ended }
            }
            false => {
                let missing = late_ranks(absent.collect(), |rank| state.waiting.contains(&rank));
                CollectiveError::Timeout { op, unit, missing, waited: hub.timeout }
            }
        };
        state.failure = Some(failure.clone());
        hub.changed.notify_all();
        Err(failure)
    }
}

/// Returns a tensor that the rank's own thread may read at any time: a copy of another rank's
/// tensor, which that rank may update. In host memory a rank updates no tensor that another one
/// refers to.
fn own<B: ShardBackend>(tensor: Float<B>) -> Float<B> {
    if B::IN_HOST_MEMORY {
        return tensor;
    }
    let (shape, numel) = (tensor.shape(), numel::<B>(&tensor));
    B::copy_range(tensor, 0..numel, shape)
}

/// Returns for each gradient the position of the one member that reduces it for all members, which read its result in
/// host memory; `None` where each member reduces what it keeps. All members get the same positions.
fn reducers(keep: &[Reduce], members: usize) -> Vec<Option<usize>> {
    /// Elements of a gradient whose reduction by every member takes longer than a second exchange.
    const LARGE: usize = 1 << 14;
    let mut entries: Vec<usize> = (0..keep.len()).collect();
    let numel = |entry: usize| keep[entry].range.len();
    entries.retain(|&entry| keep[entry].segment.is_none() && numel(entry) >= LARGE && members > 1);
    // The largest first, each to the member with the fewest elements so far.
    entries.sort_by_key(|&entry| std::cmp::Reverse(numel(entry)));
    let mut elements = vec![0; members];
    let mut reducers = vec![None; keep.len()];
    for entry in entries {
        let fewest = (0..members).min_by_key(|&index| elements[index]);
        reducers[entry] = fewest;
        elements[fewest.expect("a group has members")] += numel(entry);
    }
    reducers
}

/// Returns the gradients of several ranks in one dtype. On a device the dtypes may differ: a rank
/// that has accumulated several micro-batches has their sum in f32.
fn in_one_dtype<B: ShardBackend>(parts: Vec<(Float<B>, usize)>) -> Vec<(Float<B>, usize)> {
    let dtype = parts[0].0.dtype();
    if parts.iter().all(|(part, _)| part.dtype() == dtype) {
        return parts;
    }
    parts.into_iter().map(|(part, start)| (cast::<B>(part, DType::F32), start)).collect()
}

/// Tensors of a member, and the mark of all that its communication thread has issued before.
pub(crate) type Fenced<B, T> = Arc<(T, <B as ShardBackend>::Fence)>;

impl<B: ShardBackend> ProcessGroup<B> for LocalGroup {
    fn all_gather(
        &self,
        op: &Op,
        device: &B::Device,
        shards: Vec<(usize, Float<B>)>,
        _: usize,
        buffer: &Arc<GatherBuffer<B>>,
    ) -> Result<(), CollectiveError> {
        let peers = self.exchange_on_device::<B, _>(op, device, shards)?;
        buffer.write_all(peers.iter().flat_map(|peer| peer.0.iter().cloned()).collect());
        self.keep_until_next_exchange::<B, _>(peers);
        Ok(())
    }

    fn all_gather_one(
        &self,
        op: &Op,
        device: &B::Device,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let peers = self.exchange_on_device::<B, _>(op, device, shard)?;
        let parts = peers.iter().map(|peer| peer.0.clone().map(own::<B>)).collect();
        self.keep_until_next_exchange::<B, _>(peers);
        Ok(parts)
    }

    fn gather(
        &self,
        op: &Op,
        device: &B::Device,
        to: usize,
        shard: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let peers = self.exchange_on_device::<B, _>(op, device, shard)?;
        let sent = if self.index == to { &*peers } else { &[] };
        let parts = sent.iter().map(|peer| peer.0.clone().map(own::<B>)).collect();
        self.keep_until_next_exchange::<B, _>(peers);
        Ok(parts)
    }

    fn reduce_scatter(
        &self,
        op: &Op,
        device: &B::Device,
        request: ReduceScatter<'_, B>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let ReduceScatter { gradients, keep, divisor, .. } = request;
        let peers = self.exchange_on_device::<B, _>(op, device, gradients)?;
        let size = if B::IN_HOST_MEMORY { self.members.len() } else { 1 };
        let reducers = reducers(keep, size);
        let mean = |(entry, keep): (usize, &Reduce)| {
            let part =
                |peer: &Fenced<B, Vec<Option<_>>>| Some((peer.0[entry].clone()?, keep.range.start));
            let parts: Vec<_> = peers.iter().filter_map(part).collect();
            let is_of_other = reducers[entry].is_some_and(|index| index != self.index);
            if parts.is_empty() || keep.range.is_empty() || is_of_other {
                return None;
            }
            let parts = in_one_dtype::<B>(parts);
            Some((entry, RankMean { parts, divisor, shape: keep.shape.clone().into() }))
        };
        let mut reduced = vec![None; keep.len()];
        for (entry, mean) in means_of::<B>(keep.iter().enumerate().filter_map(mean)) {
            reduced[entry] = Some(mean);
        }
        if reducers.iter().any(Option::is_some) {
            let is_for_all = |entry: usize| reducers[entry] == Some(self.index);
            let for_all = reduced.iter().enumerate().filter(|(entry, _)| is_for_all(*entry));
            let for_all: Vec<_> = for_all.map(|(entry, mean)| (entry, mean.clone())).collect();
            for peer in self.exchange(op, for_all)? {
                for (entry, mean) in peer.iter() {
                    reduced[*entry] = mean.clone();
                }
            }
        }
        Ok(reduced)
    }

    fn broadcast(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Option<Float<B>>,
    ) -> Result<Float<B>, CollectiveError> {
        let peers = self.exchange_on_device::<B, _>(op, device, tensor)?;
        let mut given = peers.iter().filter_map(|peer| peer.0.clone());
        let tensor = given.next().expect("a rank passes the tensor to broadcast");
        assert!(given.next().is_none(), "only one rank passes the tensor to broadcast");
        Ok(tensor)
    }

    fn rotate(
        &self,
        op: &Op,
        device: &B::Device,
        tensor: Float<B>,
    ) -> Result<Float<B>, CollectiveError> {
        let peers = self.exchange_on_device::<B, _>(op, device, tensor)?;
        let before = peers[before(self.index, peers.len())].0.clone();
        let received = own::<B>(before);
        self.keep_until_next_exchange::<B, _>(peers);
        Ok(received)
    }
}

#[cfg(test)]
mod tests;
