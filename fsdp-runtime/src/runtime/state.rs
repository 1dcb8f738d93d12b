//! The state of one unit at run time, and of its calls between forward and backward.

use std::sync::{Arc, OnceLock};

use crate::backend::{Float, ShardBackend, StoredLeaf, StoredTensor, Tracked};
use crate::collectives::comm::Work;
use crate::module::{CallId, ParamIndex};
use crate::param_group::memory::Counted;
use crate::runtime::recompute::{KeptCall, KeptInput};

/// Where a unit's matrices are.
#[derive(Debug, Default)]
pub(crate) enum ShardState {
    /// In shards alone.
    #[default]
    Sharded,
    /// On their way into the unit's slots.
    Unsharding(Work<()>),
    /// In the unit's slots.
    Unsharded,
}

/// A shard read from the module.
#[derive(Debug)]
pub(crate) struct LocalShard<B: ShardBackend> {
    /// Its elements, in f32.
    pub(crate) value: StoredTensor<B>,
    /// Its autodiff leaf, where it has one.
    pub(crate) leaf: Option<StoredLeaf<B>>,
    /// What it is on the device, where it rests on the host: what it was sent as, where that is kept
    /// from forward to backward; whole, while its unit is unsharded.
    pub(crate) on_device: Arc<OnceLock<Float<B>>>,
}

impl<B: ShardBackend> LocalShard<B> {
    pub(crate) fn new(value: StoredTensor<B>, leaf: Option<StoredLeaf<B>>) -> Self {
        Self { value, leaf, on_device: Arc::default() }
    }
}

impl<B: ShardBackend> Clone for LocalShard<B> {
    fn clone(&self) -> Self {
        let Self { value, leaf, on_device } = self;
        Self { value: value.clone(), leaf: leaf.clone(), on_device: on_device.clone() }
    }
}

fn none<T>(len: usize) -> Vec<Option<T>> {
    std::iter::repeat_with(|| None).take(len).collect()
}

/// A unit at run time.
#[derive(Debug)]
pub(crate) struct UnitState<B: ShardBackend> {
    /// Where its matrices are.
    pub(crate) shard_state: ShardState,
    /// What the module held when it was last read; gathered from in forward and backward alike.
    pub(crate) shards: Vec<Option<LocalShard<B>>>,
    /// The forwards under way, outermost first.
    pub(crate) forwards: Vec<CallId>,
    /// How many of its calls are between `pre_backward` and `post_backward`.
    pub(crate) backwards: usize,
    /// Whether it was unsharded ahead of use and has not been used yet.
    pub(crate) prefetched: bool,
    /// Bytes of what was copied to the device with it.
    pub(crate) copied: usize,
    /// Reduced gradients, as they are handed to the optimizer.
    pub(crate) reduced: Vec<Option<StoredTensor<B>>>,
    /// Full gradients of earlier micro-batches, where they are held unsharded.
    pub(crate) held: Vec<Option<Float<B>>>,
    /// Whether this rank keeps a part of its gathered parameters, for the backward to gather from.
    pub(crate) kept_part: bool,
}

impl<B: ShardBackend> UnitState<B> {
    pub(crate) fn new(entries: usize) -> Self {
        Self {
            shard_state: ShardState::Sharded,
            shards: none(entries),
            forwards: Vec::new(),
            backwards: 0,
            prefetched: false,
            copied: 0,
            reduced: none(entries),
            held: none(entries),
            kept_part: false,
        }
    }

    /// Whether its buffers must not be given to another unit.
    pub(crate) fn in_use(&self) -> bool {
        !self.forwards.is_empty() || self.backwards > 0
    }
}

/// One forward of a unit, until its gradients are reduced.
#[derive(Debug)]
pub(crate) struct Call<B: ShardBackend> {
    /// The unit.
    pub(crate) unit: usize,
    /// Inputs that order its gathers; kept during forward only.
    pub(crate) ordering_inputs: Vec<Tracked<B>>,
    /// The id of the input recorded last, and of the output: ids are given in order of recording.
    pub(crate) span: (Option<u64>, Option<u64>),
    /// Gathers recorded whose gradient has not arrived.
    pub(crate) pending: usize,
    /// Full gradients that have arrived, an entry each.
    pub(crate) gradients: Vec<Option<Float<B>>>,
    /// Whether its `pre_backward` has run.
    pub(crate) entered: bool,
    /// Whether an output of it is tracked.
    pub(crate) tracked: bool,
    /// Whether it used a gathered parameter that has no gradient: ops that read it may run backward
    /// after the last gradient has arrived.
    pub(crate) reads_frozen: bool,
    /// Placement by the ops of its graph.
    pub(crate) alive: std::sync::Weak<()>,
    /// Kept until its forward ends.
    pub(crate) open: Option<Arc<()>>,
    /// The call whose recomputation it is part of.
    pub(crate) part_of: Option<CallId>,
    /// What its forward takes along to be run again, where it is checkpointed.
    pub(crate) checkpoint: Option<Checkpoint<B>>,
    /// The leaves that its tied places took theirs from, for the second run of its forward: another
    /// forward, without a graph, may have read the same parameters since.
    pub(crate) tied: Vec<(ParamIndex, StoredLeaf<B>)>,
}

/// A checkpointed forward under way.
#[derive(Debug)]
pub(crate) struct Checkpoint<B: ShardBackend> {
    /// Its inputs, in the order in which they were detached.
    pub(crate) inputs: Vec<KeptInput>,
    /// How many of them are stowed until backward.
    pub(crate) stowed: usize,
    /// Their bytes.
    pub(crate) bytes: usize,
    /// The tracked ones, or a leaf in their place.
    pub(crate) parents: Vec<Tracked<B>>,
    /// What is kept, once it has run.
    pub(crate) kept: Option<Arc<KeptCall<B>>>,
    /// The parent of its outputs, once there is one.
    pub(crate) parent: Option<Tracked<B>>,
}

impl<B: ShardBackend> Checkpoint<B> {
    pub(crate) fn new(parents: Vec<Tracked<B>>) -> Self {
        Self { inputs: Vec::new(), stowed: 0, bytes: 0, parents, kept: None, parent: None }
    }
}

impl<B: ShardBackend> Call<B> {
    /// A forward of `unit` that begins.
    pub(crate) fn new(unit: usize, entries: usize, ordering_inputs: Vec<Tracked<B>>) -> Self {
        let open = Arc::new(());
        Self {
            unit,
            span: (
                ordering_inputs.iter().map(|ordering_input| ordering_input.id().value).max(),
                None,
            ),
            ordering_inputs,
            pending: 0,
            gradients: none(entries),
            entered: false,
            tracked: false,
            reads_frozen: false,
            alive: Arc::downgrade(&open),
            open: Some(open),
            part_of: None,
            checkpoint: None,
            tied: Vec::new(),
        }
    }

    /// Whether a gradient has arrived.
    pub(crate) fn has_gradients(&self) -> bool {
        self.gradients.iter().any(Option::is_some)
    }
}

/// Adds gradients up, entry by entry, the earlier ones first.
pub(crate) fn add_up<T>(
    sums: &mut [Option<T>],
    gradients: impl IntoIterator<Item = Option<T>>,
    add: impl Fn(T, T) -> T,
) {
    for (sum, gradient) in sums.iter_mut().zip(gradients) {
        *sum = match (sum.take(), gradient) {
            (Some(sum), Some(gradient)) => Some(add(sum, gradient)),
            (sum, gradient) => sum.or(gradient),
        };
    }
}

/// What a reduction leaves of each parameter, and what counts it until it is at rest.
pub(crate) type Reduced<B> = (Vec<Option<StoredTensor<B>>>, Option<Counted>);

/// A reduction under way: its unit, and the bytes of full gradients that it ends.
#[derive(Debug)]
pub(crate) struct Reduction<B: ShardBackend> {
    pub(crate) unit: usize,
    pub(crate) bytes: usize,
    pub(crate) work: Work<Reduced<B>>,
}
