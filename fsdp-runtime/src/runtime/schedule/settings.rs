//! Settings of a schedule, as given by the options and the mesh.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::decide::Timing;
use crate::backend::StorageDevice;
use crate::collectives::group::{AnyProcessGroup, MeshGroups};
use crate::layout::Mesh;
use crate::options::{ContextExchange, ShardingStrategy};
use crate::param_group::TableDtypes;

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
    /// How context parallel ranks exchange keys and values.
    pub(crate) context_exchange: ContextExchange,
    /// When collectives are issued.
    pub(crate) timing: Timing,
    /// Number by which sums of gradients are divided, if it is not the number of ranks.
    pub(crate) gradient_divide_factor: Option<f64>,
    /// Storage device of parameters, reduced gradients and optimizer state.
    pub(crate) storage: StorageDevice,
    /// Whether the device keeps the copies of offloaded shards that were sent to the all-gather in
    /// forward, for the all-gather in backward.
    pub(crate) keep_sent: bool,
    /// Whether the saved inputs of recomputed units are offloaded to the host.
    pub(crate) offload_activations: bool,
    /// Dtypes of tables in forwards.
    pub(crate) tables: Arc<TableDtypes>,
}
