//! One forward of a unit, from `pre_forward` to the reduction of its gradients.

use std::sync::{Arc, Weak};

use super::super::recompute::{SavedCall, SavedInput};
use super::peer_shards::GivenByAll;
use super::unit_state::none;
use crate::backend::{Float, ModelBackend, Raw, StoredLeaf, Tracked};
use crate::module::{CallId, ParamIndex};

/// One forward of a unit, until the gradients are reduced.
#[derive(Debug)]
pub(super) struct UnitCall<B: ModelBackend> {
    /// Index of the unit.
    pub(super) unit: usize,
    /// Tracked inputs that the gathers of the call are ordered after. Empty once the forward ended.
    pub(super) ordering_inputs: Vec<Tracked<B>>,
    /// Id of the last input to be recorded. Burn assigns ids in the order of recording.
    pub(super) last_input: Option<u64>,
    /// Id of the first output to be recorded.
    pub(super) first_output: Option<u64>,
    /// Number of recorded gathers whose gradient has not arrived.
    pub(super) pending: usize,
    /// Full gradients that have arrived, one for each parameter of the unit.
    pub(super) gradients: Vec<Option<Float<B>>>,
    /// Whether `pre_backward` has run.
    pub(super) entered: bool,
    /// Whether an output of the call is tracked.
    pub(super) tracked: bool,
    /// Whether the call used a gathered parameter without a gradient. An operation that reads such
    /// a parameter may run backward after the last gradient of the call has arrived.
    pub(super) reads_frozen: bool,
    /// Whether the call read a parameter of a unit with common buffers in the buffers that units take
    /// in turn.
    pub(super) views_ring: bool,
    /// The shards behind the common buffers of which the call has views.
    pub(super) peers: Option<GivenByAll<Raw<B>>>,
    /// Tells whether the graph of the call exists: the operations of the graph hold the value.
    pub(super) alive: Weak<()>,
    /// The value behind `alive`, which the call holds itself until the forward ends.
    pub(super) open: Option<Arc<()>>,
    /// Call whose recomputation this call is part of.
    pub(super) part_of: Option<CallId>,
    /// State of the first run, if the call is recomputed in backward.
    pub(super) recomputed: Option<RecomputedForward<B>>,
    /// Leaves of the tied parameters in the first run, for the recomputation. A forward without a
    /// graph may have read the same parameters in between.
    pub(super) tied_leaves: Vec<(ParamIndex, StoredLeaf<B>)>,
}

impl<B: ModelBackend> UnitCall<B> {
    /// Creates a call of `unit`, which has `entries` parameters.
    pub(super) fn new(unit: usize, entries: usize, ordering_inputs: Vec<Tracked<B>>) -> Self {
        let open = Arc::new(());
        Self {
            unit,
            last_input: ordering_inputs.iter().map(|input| input.id().value).max(),
            first_output: None,
            ordering_inputs,
            pending: 0,
            gradients: none(entries),
            entered: false,
            tracked: false,
            reads_frozen: false,
            views_ring: false,
            peers: None,
            alive: Arc::downgrade(&open),
            open: Some(open),
            part_of: None,
            recomputed: None,
            tied_leaves: Vec::new(),
        }
    }

    /// Returns whether a gradient has arrived.
    pub(super) fn has_gradients(&self) -> bool {
        self.gradients.iter().any(Option::is_some)
    }

    /// Returns whether the graph of the call still exists.
    pub(super) fn has_graph(&self) -> bool {
        self.alive.strong_count() > 0
    }
}

/// The first run of a forward that is recomputed in backward.
#[derive(Debug)]
pub(super) struct RecomputedForward<B: ModelBackend> {
    /// Inputs, in the order in which they were detached.
    pub(super) inputs: Vec<SavedInput>,
    /// Number of inputs that were considered for offload to the host.
    pub(super) offloaded: usize,
    /// Bytes of the inputs.
    pub(super) bytes: usize,
    /// Tracked inputs, or a leaf in their place.
    pub(super) parents: Vec<Tracked<B>>,
    /// Data that the call saves for backward, once the forward has run.
    pub(super) saved: Option<Arc<SavedCall<B>>>,
    /// Parent of the outputs, once one was recorded.
    pub(super) parent: Option<Tracked<B>>,
}

impl<B: ModelBackend> RecomputedForward<B> {
    pub(super) fn new(parents: Vec<Tracked<B>>) -> Self {
        Self { inputs: Vec::new(), offloaded: 0, bytes: 0, parents, saved: None, parent: None }
    }
}
