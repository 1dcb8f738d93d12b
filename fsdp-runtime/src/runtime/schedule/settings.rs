//! Settings of a schedule, as given by the options and the mesh.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backend::StorageDevice;
use crate::collectives::group::{AnyProcessGroup, MeshGroups};
use crate::layout::Mesh;
use crate::options::{BackwardPrefetch, GradientAccumulation, ShardingStrategy};

/// Settings of a schedule, made from the options of `fully_shard` when a model is sharded.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Sharding strategy of the model.
    pub(crate) strategy: ShardingStrategy,
    /// Position of this rank in the mesh.
    pub(crate) mesh: Mesh,
    /// Process groups of this rank.
    pub(crate) groups: MeshGroups,
    /// Process groups of the ranks that keep parts of gathered parameters for each other, by their
    /// size: those that `ReshardAfterForward::To` of some unit needs.
    pub(crate) blocks: BTreeMap<usize, Arc<AnyProcessGroup>>,
    /// Number of gather buffers of one dtype that the units of an inner nesting level share, before
    /// lists of units to prefetch are regarded.
    pub(crate) gather_buffers: usize,
    /// Whether forward prefetches the next units.
    pub(crate) forward_prefetch: bool,
    /// Time at which backward prefetches the previous units.
    pub(crate) backward_prefetch: BackwardPrefetch,
    /// Number of units that are prefetched while one computes.
    pub(crate) units_ahead: usize,
    /// Number of units whose gradients may be in reduction at a time, at least 1.
    pub(crate) reductions_in_flight: usize,
    /// Form in which the gradients of micro-batches are accumulated.
    pub(crate) accumulation: GradientAccumulation,
    /// Number by which sums of gradients are divided, if it is not the number of ranks.
    pub(crate) gradient_divide_factor: Option<f64>,
    /// Storage device of parameters, reduced gradients and optimizer state.
    pub(crate) storage: StorageDevice,
    /// Whether the device keeps the copies of offloaded shards that were sent to the all-gather in
    /// forward, for the all-gather in backward.
    pub(crate) keep_sent: bool,
    /// Whether the saved inputs of recomputed units are offloaded to the host.
    pub(crate) offload_activations: bool,
}

/// The pass that an all-gather is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    Backward,
}

/// Time at which a unit that is being gathered is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// The unit is needed at once.
    Now,
    /// The unit is needed later: this is a prefetch.
    Ahead,
}
