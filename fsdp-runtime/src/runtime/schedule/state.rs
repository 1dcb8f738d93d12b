//! The mutable state of a schedule.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::buffers::GatherBuffers;
use super::decide::{ForwardOrder, Timing};
use super::peer_shards::PeerShards;
use super::reduction::Reduction;
use super::settings::Settings;
use super::step_loss::StepLoss;
use super::unit_call::UnitCall;
use super::unit_state::UnitState;
use crate::backend::{ModelBackend, Raw, ShardBackend};
use crate::collectives::group::AnyProcessGroup;
use crate::module::{CallId, ParamIndex};
use crate::options::{GradientAccumulation, ReshardAfterForward};
use crate::param_group::{Unit, UnitControl};

/// The mutable state of a schedule.
pub(super) struct State<B: ModelBackend> {
    pub(super) units: Vec<UnitState<B>>,
    pub(super) buffers: GatherBuffers<Raw<B>>,
    /// When each unit is gathered and resharded.
    pub(super) controls: Vec<UnitControl>,
    /// Process groups of the ranks that keep parts of gathered parameters for each other, by size.
    pub(super) blocks: BTreeMap<usize, Arc<AnyProcessGroup>>,
    /// Whether the module's parameters may have changed since the last forward, so that units that
    /// stayed gathered after a backward have old values.
    pub(super) params_changed: bool,
    /// Mark of the operations that wrote the shards, from the first all-gather of a pass until the
    /// module's parameters may change.
    pub(super) shards_written: Option<<Raw<B> as ShardBackend>::Fence>,
    /// Shards of the ranks that share this rank's device, or common buffers with it, from the first
    /// all-gather of a pass on.
    pub(super) peers: Option<PeerShards<Raw<B>>>,
    /// Calls whose forward runs, or whose gradients have not been reduced yet.
    pub(super) calls: BTreeMap<CallId, UnitCall<B>>,
    /// Id of the next call.
    pub(super) next_call: u64,
    /// Number of running hooked forwards.
    pub(super) open_forwards: usize,
    pub(super) order: ForwardOrder,
    /// Calls that run backward.
    pub(super) running: Vec<RunningBackward>,
    pub(super) recompute: RecomputeState,
    pub(super) gradients: GradientState<B>,
    /// Parameters without values, because they are to be loaded.
    pub(super) unloaded: BTreeSet<ParamIndex>,
}

impl<B: ModelBackend> State<B> {
    /// Says that the module's parameters may change from now on.
    pub(super) fn shards_may_change(&mut self) {
        self.shards_written = None;
        if let Some(peers) = &mut self.peers {
            peers.stale = true;
        }
    }

    /// Returns the process group that gathers the parts of a unit that its ranks keep after forward,
    /// under `ReshardAfterForward::To`.
    pub(super) fn block(&self, unit: usize) -> Option<&Arc<AnyProcessGroup>> {
        match self.controls[unit].reshard {
            ReshardAfterForward::To(size) => self.blocks.get(&size),
            _ => None,
        }
    }

    /// Creates the state of a model that has not run yet.
    pub(super) fn new(
        units: &[Unit],
        buffers: GatherBuffers<Raw<B>>,
        controls: Vec<UnitControl>,
        settings: &Settings,
    ) -> Self {
        Self {
            units: units.iter().map(|unit| UnitState::new(unit.params.len())).collect(),
            buffers,
            controls,
            blocks: settings.blocks.clone(),
            params_changed: false,
            shards_written: None,
            peers: None,
            calls: BTreeMap::new(),
            next_call: 0,
            open_forwards: 0,
            order: ForwardOrder::new(units),
            running: Vec::new(),
            recompute: RecomputeState { first_run: None, second_run: None },
            gradients: GradientState {
                reductions: VecDeque::new(),
                accumulating: false,
                continuing: false,
                loss: None,
                reduced_bytes: 0,
                divide_factor: settings.gradient_divide_factor,
                accumulation: settings.timing.accumulation,
            },
            unloaded: BTreeSet::new(),
        }
    }
}

/// Running forwards of recomputed units.
pub(super) struct RecomputeState {
    /// Call whose first forward runs. No graph is recorded until it ends.
    pub(super) first_run: Option<CallId>,
    /// Call whose forward is recomputed, or whose backward runs after that.
    pub(super) second_run: Option<CallId>,
}

/// The gradients of the present step.
pub(super) struct GradientState<B: ModelBackend> {
    /// Running reductions, in issue order.
    pub(super) reductions: VecDeque<Reduction<Raw<B>>>,
    /// Whether another backward pass of the same step follows the present one.
    pub(super) accumulating: bool,
    /// Whether the backward pass that has begun follows an accumulated one of the same step. It may
    /// have begun before its forward.
    pub(super) continuing: bool,
    /// What the losses of the step are; `None` before the first one.
    pub(super) loss: Option<StepLoss>,
    /// Bytes of reduced gradients, which are counted until the next forward.
    pub(super) reduced_bytes: usize,
    /// Number by which sums of gradients are divided, if it is not the number of ranks.
    pub(super) divide_factor: Option<f64>,
    /// Form in which the gradients of micro-batches are accumulated.
    pub(super) accumulation: GradientAccumulation,
}

impl<B: ModelBackend> GradientState<B> {
    /// Returns whether the gradients of micro-batches are accumulated before they are reduced.
    pub(super) fn holds_unsharded(&self) -> bool {
        Timing::holds_unsharded(self.accumulation)
    }

    /// Returns the number by which the sums of gradients of the present step are divided, if it is not
    /// the number of ranks. Gradients of sums are divided by their weights, whatever the setting is.
    pub(super) fn divide_factor(&self) -> Option<f64> {
        self.divide_factor.filter(|_| !matches!(self.loss, Some(StepLoss::Sum(_))))
    }
}

/// A call between `pre_backward` and the depth of its inputs.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunningBackward {
    pub(super) call: CallId,
    pub(super) unit: usize,
    /// Depth of the inputs: all operations of the call are deeper.
    pub(super) inputs: usize,
    /// Whether the unit must stay gathered until the pass has reached the depth of the inputs, even
    /// if all gradients have arrived.
    pub(super) reads_frozen: bool,
}
