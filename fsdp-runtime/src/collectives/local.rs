//! The `local` engine: ranks are threads of one process, which exchange tensors by reference.
//!
//! Every collective is one *exchange*: a rank leaves its value at the round of its next sequence
//! number and waits until all have. What is exchanged is never written again, so no second
//! rendezvous is needed: a rank reads its peers' values for as long as it likes. Sums are taken in
//! rank order on every rank, so results do not depend on who came first.
//!
//! The first failure (a time-out, ranks that issue different operations, a rank that panicked or ended
//! before the others) is kept, and ends every exchange of all groups from then on, under way or later.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::{Op, ProcessGroup, Reduce, of_color};
use crate::backend::{Float, ShardBackend};
use crate::error::CollectiveError;
use crate::mesh::{Rank, WorldSize};
use crate::slot::Slot;
use crate::unit_layout::UnitLayout;

type AnyValue = Arc<dyn Any + Send + Sync>;

/// What the thread ranks of one process share.
#[derive(Debug)]
pub(crate) struct Hub {
    world: WorldSize,
    timeout: Duration,
    /// Whether sizes are compared too.
    debug: bool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// By group and sequence number.
    rounds: HashMap<(u64, u64), Round>,
    groups: u64,
    /// Ranks that exchange nothing any more.
    ended: Vec<Rank>,
    failure: Option<CollectiveError>,
}

#[derive(Debug)]
struct Round {
    op: Op,
    opened_by: Rank,
    values: Vec<Option<AnyValue>>,
    taken: usize,
}

impl Hub {
    /// A meeting place for `world` ranks that wait for each other no longer than `timeout`; `debug`
    /// compares sizes before each collective.
    pub(crate) fn new(world: WorldSize, timeout: Duration, debug: bool) -> Arc<Self> {
        Arc::new(Self { world, timeout, debug, state: Mutex::default(), changed: Condvar::new() })
    }

    /// The number of ranks.
    #[cfg(feature = "nccl")]
    pub(crate) fn world(&self) -> WorldSize {
        self.world
    }

    /// How long a rank waits for the others.
    #[cfg(feature = "nccl")]
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What has ended the group, if anything has.
    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        self.lock().failure.clone()
    }

    /// Ends the group with `failure`, unless it has ended already.
    pub(crate) fn fail(&self, failure: CollectiveError) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }
}

/// One rank's end of a group that meets at a [`Hub`].
#[derive(Debug)]
pub(crate) struct LocalGroup {
    hub: Arc<Hub>,
    id: u64,
    members: Vec<Rank>,
    /// This rank's position among the members.
    index: usize,
    sequence: AtomicU64,
}

impl LocalGroup {
    /// The end of `rank` in the group of all ranks.
    pub(crate) fn new(hub: Arc<Hub>, rank: Rank) -> Self {
        let members = hub.world.ranks().collect();
        Self { hub, id: 0, members, index: rank.index(), sequence: AtomicU64::new(0) }
    }

    /// The members that give the same `color`, as a group.
    pub(crate) fn split(&self, color: usize) -> Result<Self, CollectiveError> {
        let op = Op::new("split", "the mesh");
        let colors = self.exchange(&op, color)?;
        let (positions, index) = of_color(&colors, color, self.index);
        // The first member of each group numbers it.
        let first = positions[0];
        let id = (first == self.index).then(|| {
            let mut state = self.hub.lock();
            state.groups += 1;
            state.groups
        });
        let ids = self.exchange(&op, id)?;
        Ok(Self {
            hub: self.hub.clone(),
            id: ids[first].expect("its first member numbers a group"),
            members: positions.iter().map(|&index| self.members[index]).collect(),
            index,
            sequence: AtomicU64::new(0),
        })
    }

    /// Its members, by their ranks in the world.
    pub(crate) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// This rank's position among the members.
    #[cfg(feature = "nccl")]
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// The group's number at its hub.
    #[cfg(feature = "nccl")]
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Where its ranks meet.
    #[cfg(feature = "nccl")]
    pub(crate) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// What has ended the world, if anything has.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        self.hub.failure()
    }

    /// Ends the world with `failure`, unless it has ended already.
    pub(crate) fn fail(&self, failure: CollectiveError) {
        self.hub.fail(failure);
    }

    /// This rank exchanges nothing any more: who waits for it waits in vain.
    pub(crate) fn leave(&self) {
        self.hub.lock().ended.push(self.rank());
        self.hub.changed.notify_all();
    }

    /// This rank.
    pub(crate) fn rank(&self) -> Rank {
        self.members[self.index]
    }

    /// Every rank's value, in rank order.
    ///
    /// # Errors
    ///
    /// The group's first failure: here, if a rank issued another operation or does not come within
    /// the time-out.
    pub(crate) fn exchange<T: Any + Send + Sync>(
        &self,
        op: &Op,
        value: T,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        let hub = &*self.hub;
        let (size, rank) = (self.members.len(), self.rank());
        let sequence = (self.id, self.sequence.fetch_add(1, Ordering::Relaxed));
        let started = Instant::now();
        let mut state = hub.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let round = state.rounds.entry(sequence).or_insert_with(|| Round {
            op: op.clone(),
            opened_by: rank,
            values: vec![None; size],
            taken: 0,
        });
        if hub.debug {
            tracing::debug!(target: "fsdp", "#{} {op}, {} elements", sequence.1, op.size);
        }
        if !round.op.is(op, hub.debug) {
            let describe = |op: &Op| Op::describe(op.name, &op.unit, op.size as u64, hub.debug);
            let failure = CollectiveError::Mismatch {
                rank,
                found: describe(op),
                peer: round.opened_by,
                expected: describe(&round.op),
            };
            drop(state);
            hub.fail(failure.clone());
            return Err(failure);
        }
        round.values[self.index] = Some(Arc::new(value));
        hub.changed.notify_all();
        loop {
            let round = state.rounds.get_mut(&sequence).expect("a round lives until all took it");
            // One that is complete stays so, whatever a rank that took it already has found.
            if round.values.iter().all(Option::is_some) {
                round.taken += 1;
                let values: Vec<AnyValue> = if round.taken == size {
                    let round = state.rounds.remove(&sequence).expect("found above");
                    round.values.into_iter().flatten().collect()
                } else {
                    round.values.iter().flatten().cloned().collect()
                };
                drop(state);
                return Ok(values
                    .into_iter()
                    .map(|value| value.downcast().expect("one operation exchanges one type"))
                    .collect());
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let absent = state.rounds[&sequence].values.iter().zip(&self.members);
            let absent = absent.filter(|(value, _)| value.is_none()).map(|(_, rank)| *rank);
            let ended = absent.clone().any(|rank| state.ended.contains(&rank));
            let left = hub.timeout.checked_sub(started.elapsed());
            if let (false, Some(left)) = (ended, left) {
                (state, _) = hub
                    .changed
                    .wait_timeout(state, left)
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
                continue;
            }
            let (op, unit) = (op.name, op.unit.to_string());
            let failure = match ended {
                true => {
                    let ended = absent.filter(|rank| state.ended.contains(rank)).collect();
                    CollectiveError::Ended { op, unit, ended }
                }
                false => {
                    let (missing, waited) = (absent.collect(), hub.timeout);
                    CollectiveError::Timeout { op, unit, missing, waited }
                }
            };
            drop(state);
            hub.fail(failure.clone());
            return Err(failure);
        }
    }
}

impl<B: ShardBackend> ProcessGroup<B> for LocalGroup {
    fn all_gather(
        &self,
        op: &Op,
        _: &B::Device,
        fragments: Vec<(usize, Float<B>)>,
        _: usize,
        slot: &Arc<Slot<B>>,
    ) -> Result<(), CollectiveError> {
        let peers = self.exchange(op, fragments)?;
        slot.write_all(peers.iter().flat_map(|peer| peer.iter().cloned()).collect());
        Ok(())
    }

    fn all_gather_one(
        &self,
        op: &Op,
        _: &B::Device,
        fragment: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        Ok(self.exchange(op, fragment)?.iter().map(|peer| (**peer).clone()).collect())
    }

    fn gather(
        &self,
        op: &Op,
        _: &B::Device,
        to: usize,
        fragment: Option<Float<B>>,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let peers = self.exchange(op, fragment)?;
        let peers = if self.index == to { &*peers } else { &[] };
        Ok(peers.iter().map(|peer| (**peer).clone()).collect())
    }

    fn reduce_scatter(
        &self,
        op: &Op,
        _: &B::Device,
        gradients: Vec<Option<Float<B>>>,
        keep: &[Reduce],
        _: &UnitLayout,
        divisor: usize,
    ) -> Result<Vec<Option<Float<B>>>, CollectiveError> {
        let peers = self.exchange(op, gradients)?;
        let mean = |(index, keep): (usize, &Reduce)| {
            let parts: Vec<_> = peers.iter().filter_map(|peer| peer[index].clone()).collect();
            if parts.is_empty() || keep.range.is_empty() {
                return None;
            }
            Some(B::mean(&parts, keep.range.clone(), divisor, keep.shape.clone().into()))
        };
        Ok(keep.iter().enumerate().map(mean).collect())
    }

    fn broadcast(
        &self,
        op: &Op,
        _: &B::Device,
        tensor: Option<Float<B>>,
    ) -> Result<Float<B>, CollectiveError> {
        let peers = self.exchange(op, tensor)?;
        let mut given = peers.iter().filter_map(|tensor| tensor.as_ref().clone());
        let tensor = given.next().expect("a rank gives the tensor");
        assert!(given.next().is_none(), "one rank gives the tensor");
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(world: usize, timeout: Duration) -> Vec<LocalGroup> {
        let hub = Hub::new(WorldSize::new(world).unwrap(), timeout, false);
        hub.world.ranks().map(|rank| LocalGroup::new(hub.clone(), rank)).collect()
    }

    fn op(unit: &'static str) -> Op {
        Op::new("all_gather", unit)
    }

    fn on_all<T: Send>(groups: &[LocalGroup], f: impl Fn(&LocalGroup) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let ranks: Vec<_> = groups.iter().map(|group| scope.spawn(|| f(group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_gets_every_value_in_rank_order() {
        let groups = groups(5, Duration::from_secs(20));
        for _ in 0..50 {
            for values in on_all(&groups, |group| group.exchange(&op("a"), group.index).unwrap()) {
                assert_eq!(values.iter().map(|value| **value).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
            }
        }
        assert!(groups[0].hub.lock().rounds.is_empty(), "rounds are dropped once taken");
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_on_every_rank() {
        let groups = groups(3, Duration::from_millis(50));
        let errors =
            on_all(&groups[..2], |group| group.exchange(&op("encoder.0"), ()).unwrap_err());
        for error in
            errors.into_iter().chain([groups[2].exchange(&op("encoder.0"), ()).unwrap_err()])
        {
            let CollectiveError::Timeout { op, unit, missing, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(
                (op, unit.as_str(), missing),
                ("all_gather", "encoder.0", vec![groups[2].rank()])
            );
        }
    }

    #[test]
    fn parts_of_a_group_exchange_among_themselves() {
        let groups = groups(6, Duration::from_secs(20));
        let sums = on_all(&groups, |group| {
            let rows = group.split(group.index / 3).unwrap();
            let columns = group.split(group.index % 3).unwrap();
            let sum = |part: &LocalGroup| -> usize {
                let values = part.exchange(&op("a"), group.index).unwrap();
                values.iter().map(|value| **value).sum()
            };
            (sum(&rows), sum(&columns), rows.rank() == group.rank())
        });
        let expected =
            [(3, 3, true), (3, 5, true), (3, 7, true), (12, 3, true), (12, 5, true), (12, 7, true)];
        assert_eq!(sums, expected);
    }

    #[test]
    fn a_part_of_a_group_names_who_is_missing_by_rank_and_ends_all() {
        let groups = groups(4, Duration::from_millis(50));
        let errors = on_all(&groups, |group| {
            let part = group.split(group.index / 2).unwrap();
            match group.index {
                3 => None,
                index if index < 2 => {
                    std::thread::sleep(Duration::from_millis(200));
                    part.exchange(&op("a"), ()).err()
                }
                _ => part.exchange(&op("a"), ()).err(),
            }
        });
        let [first, second, third, None] = &errors[..] else { panic!("{errors:?}") };
        for error in [first, second, third] {
            let Some(CollectiveError::Timeout { missing, .. }) = error else { panic!("{error:?}") };
            assert_eq!(*missing, [groups[3].rank()]);
        }
    }

    #[test]
    fn different_operations_end_the_group() {
        let groups = groups(2, Duration::from_secs(20));
        let errors = on_all(&groups, |group| {
            let unit = if group.rank() == Rank::ZERO { "a" } else { "b" };
            group.exchange(&op(unit), ()).unwrap_err()
        });
        assert_eq!(errors[0], errors[1]);
        assert!(matches!(errors[0], CollectiveError::Mismatch { .. }));
    }
}
