//! The hub of thread ranks: shared state through which they exchange values and learn of failures.

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::op::Op;
use crate::error::{CollectiveError, IgnorePoison};
use crate::layout::{Rank, WorldSize};

/// A value of any type that thread ranks exchange by reference.
pub(super) type AnyValue = Arc<dyn Any + Send + Sync>;
/// Identifies a round: the id of the process group, and the round's sequence number in it.
pub(super) type RoundKey = (u64, u64);

/// Shared state of the thread ranks of one process, through which they exchange values.
#[derive(Debug)]
pub(crate) struct Hub {
    pub(super) world: WorldSize,
    pub(super) timeout: Duration,
    /// Whether ranks compare the sizes of collectives, and log every collective.
    pub(super) debug: bool,
    state: Mutex<State>,
    pub(super) changed: Condvar,
}

/// State of the exchanges between thread ranks.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) rounds: HashMap<RoundKey, Round>,
    /// Id of the process group that was created last; 0 is the id of the world.
    pub(super) groups: u64,
    /// Ranks that wait for others in an exchange.
    pub(super) waiting: BTreeSet<Rank>,
    /// Ranks that take part in no further exchange.
    pub(super) ended: Vec<Rank>,
    /// First failure of the run.
    pub(super) failure: Option<CollectiveError>,
}

/// One exchange that not all members have completed.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) op: Op,
    /// First rank to join the round, which decides `op`.
    pub(super) opened_by: Rank,
    /// Values of the members, in rank order; `None` for a member that has not joined.
    pub(super) values: Vec<Option<AnyValue>>,
    /// Number of members that have taken the values.
    pub(super) taken: usize,
}

impl State {
    /// Returns the values of a complete round, in rank order; `None` while a member is absent.
    ///
    /// Each member calls this once with success. The last one removes the round.
    pub(super) fn take_values(&mut self, key: RoundKey) -> Option<Vec<AnyValue>> {
        let round =
            self.rounds.get_mut(&key).expect("a round exists until every member has taken it");
        if round.values.iter().any(Option::is_none) {
            return None;
        }
        round.taken += 1;
        if round.taken < round.values.len() {
            return Some(round.values.iter().flatten().cloned().collect());
        }
        let round = self.rounds.remove(&key).expect("found above");
        Some(round.values.into_iter().flatten().collect())
    }
}

impl Hub {
    /// Creates the hub of `world` ranks.
    ///
    /// Ranks wait for each other for at most `timeout`. With `debug`, ranks compare the sizes of
    /// collectives and log every collective.
    pub(crate) fn new(world: WorldSize, timeout: Duration, debug: bool) -> Arc<Self> {
        Arc::new(Self { world, timeout, debug, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Locks the shared state.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    /// Returns the failure that has ended the run, if there is one.
    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        self.lock().failure.clone()
    }

    /// Ends the run of all ranks with `failure`, unless an earlier failure has ended it.
    pub(crate) fn fail(&self, failure: CollectiveError) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }
}
