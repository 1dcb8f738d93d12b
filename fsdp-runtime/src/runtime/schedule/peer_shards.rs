//! The shards of ranks that share a device or host memory, as one exchange has given them.

use std::sync::Arc;

use crate::backend::{Float, ShardBackend};
use crate::collectives::group::Fenced;

/// Shards of a unit in each flat range, each with its offset in the range, in elements.
pub(super) type ShardsOfUnit<B> = Vec<Vec<(usize, Float<B>)>>;

/// What a rank gives to the others.
#[derive(Debug)]
pub(super) struct Given<B: ShardBackend> {
    /// Shards of each unit that the rank has read from the module.
    pub(super) shards: Vec<Option<ShardsOfUnit<B>>>,
    /// For each unit, whether an autodiff graph of the rank has views of the buffers that units take in
    /// turn, although the unit has common buffers.
    pub(super) views_ring: Vec<bool>,
}

/// What all ranks of the shard group have given, in rank order. While it lives, no optimizer writes the
/// shards in place.
pub(super) type GivenByAll<B> = Arc<Vec<Fenced<B, Given<B>>>>;

/// Shards of all ranks of the shard group.
pub(super) struct PeerShards<B: ShardBackend> {
    pub(super) ranks: GivenByAll<B>,
    /// Whether the module's parameters may have changed since the exchange.
    pub(super) stale: bool,
}

impl<B: ShardBackend> PeerShards<B> {
    /// Returns whether all ranks have given their shards of a unit. The answer is equal on all
    /// ranks.
    pub(super) fn has(&self, unit: usize) -> bool {
        !self.stale && self.ranks.iter().all(|rank| rank.0.shards[unit].is_some())
    }

    /// Returns whether a graph of some rank has views of the buffers that a unit with common buffers
    /// takes in turn. The answer is equal on all ranks.
    pub(super) fn views_ring(&self, unit: usize) -> bool {
        self.ranks.iter().any(|rank| rank.0.views_ring[unit])
    }

    /// Returns the shards of all ranks in one flat range of a unit.
    pub(super) fn of_range(
        &self,
        unit: usize,
        range: usize,
    ) -> impl Iterator<Item = &(usize, Float<B>)> {
        let of_unit = self.ranks.iter().filter_map(move |rank| rank.0.shards[unit].as_ref());
        of_unit.flat_map(move |ranges| &ranges[range])
    }
}
