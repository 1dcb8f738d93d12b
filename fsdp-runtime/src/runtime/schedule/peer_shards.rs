//! The shards of ranks that share a device, as one exchange has given them.

use crate::backend::{Float, ShardBackend};
use crate::collectives::group::Fenced;

/// Shards of one rank: for each unit that it has read from the module, the shards in each flat
/// range, each with its offset in the range, in elements.
pub(super) type Given<B> = Vec<Option<Vec<Vec<(usize, Float<B>)>>>>;

/// Shards of all ranks of the shard group.
pub(super) struct PeerShards<B: ShardBackend> {
    /// Shards of each rank, in rank order.
    pub(super) ranks: Vec<Fenced<B, Given<B>>>,
    /// Whether the module's parameters may have changed since the exchange.
    pub(super) stale: bool,
}

impl<B: ShardBackend> PeerShards<B> {
    /// Returns whether all ranks have given their shards of a unit. The answer is equal on all
    /// ranks.
    pub(super) fn has(&self, unit: usize) -> bool {
        !self.stale && self.ranks.iter().all(|rank| rank.0[unit].is_some())
    }

    /// Returns the shards of all ranks in one flat range of a unit.
    pub(super) fn of_range(&self, unit: usize, range: usize) -> Vec<(usize, Float<B>)> {
        let of_unit = self.ranks.iter().filter_map(|rank| rank.0[unit].as_ref());
        of_unit.flat_map(|ranges| ranges[range].iter().cloned()).collect()
    }
}
