//! The state of one unit at run time.

use std::sync::{Arc, OnceLock};

use super::open_group::OpenGroup;
use crate::backend::{Float, ModelBackend, Raw, RawFloat, ShardBackend, StoredLeaf, StoredTensor};
use crate::collectives::device_work::DeviceWork;
use crate::module::CallId;

/// Whether a unit's matrices are gathered.
#[derive(Debug, Default)]
pub(super) enum ShardState<B: ShardBackend> {
    /// Only the shards exist.
    #[default]
    Sharded,
    /// An all-gather into the unit's gather buffers is running.
    Unsharding(DeviceWork<B, ()>),
    /// The unit's gather buffers hold the matrices.
    Unsharded,
}

/// A shard or a replicated parameter that was read from the module.
#[derive(Debug)]
pub(super) struct LocalShard<B: ModelBackend> {
    /// Elements, in f32.
    pub(super) value: StoredTensor<B>,
    /// Buffer of the elements, from the first all-gather on.
    pub(super) buffer: Arc<OnceLock<StoredTensor<Raw<B>>>>,
    /// Autodiff leaf, if the parameter is trainable.
    pub(super) leaf: Option<StoredLeaf<B>>,
    /// Copy on the device of a tensor that is offloaded to the host. For a shard it is the copy
    /// that was sent to the all-gather, kept from forward to backward. For a replicated parameter
    /// it is the full parameter, kept while the unit is unsharded.
    pub(super) on_device: Arc<OnceLock<RawFloat<B>>>,
    /// A replicated parameter in the dtype that computes, while a forward of its unit runs.
    pub(super) cast: Option<Float<B>>,
}

impl<B: ModelBackend> LocalShard<B> {
    pub(super) fn new(value: StoredTensor<B>, leaf: Option<StoredLeaf<B>>) -> Self {
        Self { value, leaf, buffer: Arc::default(), on_device: Arc::default(), cast: None }
    }

    /// Returns the buffer of a shard that has been lowered.
    pub(super) fn buffer(&self) -> &StoredTensor<Raw<B>> {
        self.buffer.get().expect("`lower_shards` has lowered the shards of the unit")
    }
}

impl<B: ModelBackend> Clone for LocalShard<B> {
    fn clone(&self) -> Self {
        Self {
            value: self.value.clone(),
            buffer: self.buffer.clone(),
            leaf: self.leaf.clone(),
            on_device: self.on_device.clone(),
            cast: self.cast.clone(),
        }
    }
}

/// The state of one unit at run time. Each vector has one element for each parameter of the unit.
#[derive(Debug)]
pub(super) struct UnitState<B: ModelBackend> {
    /// Whether the unit is gathered.
    pub(super) shard_state: ShardState<Raw<B>>,
    /// Shards as they were last read from the module. Forward and backward gather from them.
    pub(super) shards: Vec<Option<LocalShard<B>>>,
    /// Running forwards, outermost first.
    pub(super) forwards: Vec<CallId>,
    /// The call of a unit of several fields, some of which have not run yet.
    pub(super) open_group: Option<OpenGroup>,
    /// Number of calls between `pre_backward` and `post_backward`.
    pub(super) backwards: usize,
    /// Whether the unit was prefetched and has not been used yet.
    pub(super) prefetched: bool,
    /// Bytes of offloaded replicated parameters that were copied to the device with the unit.
    pub(super) copied_bytes: usize,
    /// Reduced gradients, ready for the optimizer.
    pub(super) reduced: Vec<Option<StoredTensor<Raw<B>>>>,
    /// Full gradients that have not been reduced yet. Under `GradientAccumulation::HoldUnsharded`
    /// they are sums over micro-batches.
    pub(super) unsharded_gradients: Vec<Option<Float<B>>>,
    /// Sums of gradients over the shard group and micro-batches, which the last micro-batch adds up
    /// over the replicas, under `GradientAccumulation::ReduceInGroup`.
    pub(super) partial: Vec<Option<StoredTensor<Raw<B>>>>,
    /// Whether there are such sums on the ranks of the shard group. This rank may have none, if its
    /// shards are empty.
    pub(super) has_partial: bool,
    /// Autodiff leaves of the parameters when the unit stayed gathered after a backward, by their
    /// ids. Other leaves belong to other values.
    pub(super) kept_leaves: Option<Vec<Option<u64>>>,
    /// Whether this rank keeps a part of the gathered parameters for backward, under
    /// `ReshardAfterForward::To`.
    pub(super) has_kept_part: bool,
    /// Number of guards that keep the unit gathered.
    pub(super) guards: usize,
}

impl<B: ModelBackend> UnitState<B> {
    /// Creates the state of a unit with `entries` parameters.
    pub(super) fn new(entries: usize) -> Self {
        Self {
            shard_state: ShardState::Sharded,
            shards: none(entries),
            forwards: Vec::new(),
            open_group: None,
            backwards: 0,
            prefetched: false,
            copied_bytes: 0,
            reduced: none(entries),
            unsharded_gradients: none(entries),
            partial: none(entries),
            has_partial: false,
            kept_leaves: None,
            has_kept_part: false,
            guards: 0,
        }
    }

    /// Returns the ids of the parameters' autodiff leaves.
    pub(super) fn leaves(&self) -> Vec<Option<u64>> {
        let id = |shard: &LocalShard<B>| shard.leaf.as_ref().map(|leaf| leaf.node().id().value);
        self.shards.iter().map(|shard| id(shard.as_ref()?)).collect()
    }

    /// Returns whether the unit runs forward or backward, or has a module that has yet to run, so
    /// that no other unit may take its gather buffers.
    pub(super) fn in_use(&self) -> bool {
        !self.forwards.is_empty() || self.open_group.is_some() || self.backwards > 0
    }
}

/// Returns a vector of `len` times `None`.
pub(super) fn none<T>(len: usize) -> Vec<Option<T>> {
    std::iter::repeat_with(|| None).take(len).collect()
}
