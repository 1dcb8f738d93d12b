//! Record of the last message of each rank, so that a time-out can name the ranks that are gone.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::collectives::op::Op;
use crate::error::IgnorePoison;
use crate::layout::{Rank, WorldSize};

/// Record of the last message and the last collective of each rank.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    started: Instant,
    /// Time of each rank's last message, in milliseconds after `started`.
    last_heard: Vec<AtomicU64>,
    /// Last collective of each rank, for ranks in other processes.
    last_op: Vec<Mutex<Option<String>>>,
}

impl Heartbeats {
    /// Creates the record of `world` ranks, all heard of just now.
    pub(crate) fn new(world: WorldSize) -> Arc<Self> {
        let ranks = || world.ranks();
        Arc::new(Self {
            started: Instant::now(),
            last_heard: ranks().map(|_| AtomicU64::new(0)).collect(),
            last_op: ranks().map(|_| Mutex::default()).collect(),
        })
    }

    /// Returns the milliseconds since the start.
    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Records a sign of life of a rank.
    pub(super) fn record(&self, rank: Rank) {
        self.last_heard[rank.index()].store(self.now(), Ordering::Relaxed);
    }

    /// Records the collective that a rank has issued.
    pub(super) fn record_op(&self, rank: Rank, op: &Op) {
        let mut last = self.last_op[rank.index()].lock().ignore_poison();
        *last = Some(op.to_string());
    }

    /// Returns the last collective that a rank has issued.
    pub(super) fn last_op(&self, rank: Rank) -> Option<String> {
        self.last_op[rank.index()].lock().ignore_poison().clone()
    }

    /// Returns the ranks that were not heard of during the last `span`.
    pub(super) fn silent(&self, span: Duration) -> Vec<Rank> {
        let span = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let since = self.now().saturating_sub(span);
        let world = WorldSize::new(self.last_heard.len()).expect("a world has at least one rank");
        world
            .ranks()
            .filter(|rank| self.last_heard[rank.index()].load(Ordering::Relaxed) < since)
            .collect()
    }
}
