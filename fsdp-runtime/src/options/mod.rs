//! How a model is sharded: PyTorch's and Accelerate's options as types.

mod policies;
mod precision;

use std::fmt::Debug;

use burn::module::ParamId;
use burn::tensor::Device;

pub use self::policies::{
    ActivationCheckpointing, BackwardPrefetch, GradientAccumulation, OffloadPolicy,
    ReshardAfterForward, ShardingStrategy, WrapPolicy,
};
pub use self::precision::MixedPrecisionPolicy;
pub(crate) use self::precision::{Precision, computed};
use crate::backend::is_flex;
use crate::error::ShardError;
use crate::layout::Mesh;
use crate::module::UnitType;

/// The options of [`fully_shard`](crate::fully_shard).
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct FsdpOptions {
    pub(crate) strategy: ShardingStrategy,
    pub(crate) shard_size: Option<usize>,
    pub(crate) reshard_after_forward: Option<ReshardAfterForward>,
    pub(crate) wrap: WrapPolicy,
    pub(crate) slots: usize,
    pub(crate) forward_prefetch: bool,
    pub(crate) backward_prefetch: BackwardPrefetch,
    pub(crate) gradient_accumulation: GradientAccumulation,
    pub(crate) mixed_precision: MixedPrecisionPolicy,
    pub(crate) unit_precision: Vec<(UnitType, MixedPrecisionPolicy)>,
    pub(crate) offload: OffloadPolicy,
    pub(crate) activation_checkpointing: ActivationCheckpointing,
    pub(crate) offload_activations: bool,
    pub(crate) ignored: Vec<ParamId>,
    pub(crate) persist_below: usize,
    pub(crate) sync_module_states: bool,
    pub(crate) cpu_ram_efficient_loading: bool,
    pub(crate) deferred_init: bool,
    pub(crate) seed: Option<u64>,
}

impl Default for FsdpOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl FsdpOptions {
    /// `FULL_SHARD` in two buffers, with both prefetches, from rank 0's weights.
    pub const fn new() -> Self {
        Self {
            strategy: ShardingStrategy::FullShard,
            shard_size: None,
            reshard_after_forward: None,
            wrap: WrapPolicy::Annotated,
            slots: 2,
            forward_prefetch: true,
            backward_prefetch: BackwardPrefetch::Pre,
            gradient_accumulation: GradientAccumulation::ReduceEach,
            mixed_precision: MixedPrecisionPolicy::new(),
            unit_precision: Vec::new(),
            offload: OffloadPolicy::None,
            activation_checkpointing: ActivationCheckpointing::Annotated,
            offload_activations: false,
            ignored: Vec::new(),
            persist_below: 0,
            sync_module_states: true,
            cpu_ram_efficient_loading: true,
            deferred_init: false,
            seed: None,
        }
    }

    /// What is sharded between steps.
    pub const fn with_strategy(mut self, strategy: ShardingStrategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// How many ranks share one copy of the parameters under `HYBRID_SHARD` and
    /// `HYBRID_SHARD_ZERO2`; a divisor of the world size. By default those of one machine. The
    /// other strategies take no notice.
    pub const fn with_shard_size(mut self, ranks: usize) -> Self {
        self.shard_size = Some(ranks);
        self
    }

    /// What becomes of gathered parameters between forward and backward, where that is not the
    /// strategy's own: under `FULL_SHARD` and `HYBRID_SHARD` they go, under the others they stay.
    pub const fn with_reshard_after_forward(mut self, reshard: ReshardAfterForward) -> Self {
        self.reshard_after_forward = Some(reshard);
        self
    }

    /// Which of the annotated units are gathered on their own.
    pub const fn with_wrap(mut self, wrap: WrapPolicy) -> Self {
        self.wrap = wrap;
        self
    }

    /// How many buffers the units of one nesting level share; at least 1. Two hold the unit that
    /// computes and the one that is prefetched; with one, nothing is prefetched.
    pub const fn with_gather_buffers(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// Whether to gather a unit while the one before it computes, in forward.
    pub const fn with_forward_prefetch(mut self, prefetch: bool) -> Self {
        self.forward_prefetch = prefetch;
        self
    }

    /// When to gather a unit for its backward.
    pub const fn with_backward_prefetch(mut self, prefetch: BackwardPrefetch) -> Self {
        self.backward_prefetch = prefetch;
        self
    }

    /// What [`Fsdp::accumulate`](crate::Fsdp::accumulate) does with the gradients of a micro-batch.
    pub const fn with_gradient_accumulation(mut self, accumulation: GradientAccumulation) -> Self {
        self.gradient_accumulation = accumulation;
        self
    }

    /// In which types units compute and communicate.
    pub const fn with_mixed_precision(mut self, policy: MixedPrecisionPolicy) -> Self {
        self.mixed_precision = policy;
        self
    }

    /// In which types units of certain types compute and communicate, in place of what
    /// [`mixed_precision`](Self::with_mixed_precision) says: `unit_types![LmHead]`. A unit that the wrap
    /// policy makes part of another follows that one. Of two policies for one type the later counts.
    pub fn with_mixed_precision_for(
        mut self,
        units: &'static [UnitType],
        policy: MixedPrecisionPolicy,
    ) -> Self {
        self.unit_precision.extend(units.iter().map(|unit| (*unit, policy)));
        self
    }

    /// What rests in the host's memory.
    pub const fn with_offload(mut self, policy: OffloadPolicy) -> Self {
        self.offload = policy;
        self
    }

    /// Which units keep their inputs alone in forward, and run their forward again in backward, under
    /// the all-gather that the backward needs anyway.
    pub const fn with_activation_checkpointing(mut self, which: ActivationCheckpointing) -> Self {
        self.activation_checkpointing = which;
        self
    }

    /// Whether the inputs that checkpointed units keep rest in the host's memory until backward. On
    /// Flex, whose tensors lie there, it changes nothing; on other devices float inputs are copied,
    /// and integer and Boolean ones stay.
    pub const fn with_offload_activations(mut self, offload: bool) -> Self {
        self.offload_activations = offload;
        self
    }

    /// Parameters to leave alone, by their ids: they stay whole, each rank's own, and their
    /// gradients are not reduced.
    pub fn with_ignored_params(mut self, params: impl IntoIterator<Item = ParamId>) -> Self {
        self.ignored.extend(params);
        self
    }

    /// Matrices of fewer elements stay whole on every rank, as vectors always do.
    pub const fn with_persist_below(mut self, elements: usize) -> Self {
        self.persist_below = elements;
        self
    }

    /// Whether rank 0's weights and running statistics are broadcast; ignored parameters stay each rank's
    /// own. Otherwise every rank must have initialised the same weights, which is checked.
    pub const fn with_sync_module_states(mut self, sync: bool) -> Self {
        self.sync_module_states = sync;
        self
    }

    /// Whether one rank alone initialises a parameter that is not yet, where weights are broadcast:
    /// the other ranks never allocate more than their shards and what is on its way. That rank is
    /// rank 0; under a [`seed`](Self::seed) processes whose ranks have more than one thread share the
    /// parameters out, each of which must then be able to initialise any. On by default.
    /// Without [`sync_module_states`](Self::with_sync_module_states) every rank initialises all of them,
    /// one by one.
    ///
    /// The modules of `burn::nn` are built without initialising their parameters
    /// (`Initializer::init` returns a [lazy](burn::module::Param::uninitialized) one), and so is a
    /// model of them. `Param::from_tensor`, `Param::from_data` and a module that was trained or
    /// loaded hold their values in full on each rank until [`fully_shard`](crate::fully_shard)
    /// takes them.
    pub const fn with_cpu_ram_efficient_loading(mut self, efficient: bool) -> Self {
        self.cpu_ram_efficient_loading = efficient;
        self
    }

    /// Whether no rank initialises any parameter, because all are loaded next: shards are made
    /// from shapes alone, and what a parameter already holds is dropped. Until it is loaded, using
    /// it is the error [`ScheduleError::NotLoaded`](crate::ScheduleError::NotLoaded). PyTorch's
    /// start on the meta device.
    pub const fn with_deferred_init(mut self, deferred: bool) -> Self {
        self.deferred_init = deferred;
        self
    }

    /// Seeds what is drawn from here on: the values of parameters that are not initialised yet,
    /// each from a seed of its own, and the masks of [`nn::Dropout`](crate::nn::Dropout). Runs with
    /// one seed repeat exactly. Without, dropout has seed 0 and initialisation Burn's own state.
    pub const fn with_seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// The options that all ranks must have alike, a line each.
    pub(crate) fn fingerprint_lines(&self) -> Vec<String> {
        // The ids of ignored parameters are each process's own.
        let Self {
            strategy,
            shard_size,
            reshard_after_forward,
            wrap,
            slots,
            forward_prefetch,
            backward_prefetch,
            gradient_accumulation,
            mixed_precision,
            unit_precision,
            offload,
            activation_checkpointing,
            offload_activations,
            ignored: _,
            persist_below,
            sync_module_states,
            cpu_ram_efficient_loading,
            deferred_init,
            seed,
        } = self;
        let options: [(&str, &dyn Debug); 18] = [
            ("strategy", strategy),
            ("seed", seed),
            ("shard_size", shard_size),
            ("reshard_after_forward", reshard_after_forward),
            ("wrap", wrap),
            ("slots", slots),
            ("forward_prefetch", forward_prefetch),
            ("backward_prefetch", backward_prefetch),
            ("gradient_accumulation", gradient_accumulation),
            ("mixed_precision", mixed_precision),
            ("mixed_precision_for", unit_precision),
            ("offload", offload),
            ("activation_checkpointing", activation_checkpointing),
            ("offload_activations", offload_activations),
            ("persist_below", persist_below),
            ("sync_module_states", sync_module_states),
            ("cpu_ram_efficient_loading", cpu_ram_efficient_loading),
            ("deferred_init", deferred_init),
        ];
        options.iter().map(|(name, value)| format!("option {name}: {value:?}")).collect()
    }

    /// Every policy of mixed precision.
    pub(crate) fn policies(&self) -> impl Iterator<Item = &MixedPrecisionPolicy> {
        let of_units = self.unit_precision.iter().map(|(_, policy)| policy);
        std::iter::once(&self.mixed_precision).chain(of_units)
    }

    /// The policy for units of a type alone.
    fn own_policy(&self, unit: Option<UnitType>) -> Option<MixedPrecisionPolicy> {
        let own = |(of, _): &&(UnitType, MixedPrecisionPolicy)| Some(*of) == unit;
        self.unit_precision.iter().rev().find(own).map(|(_, policy)| *policy)
    }

    /// Whether units of a type have a policy of their own.
    pub(crate) fn has_own_policy(&self, unit: Option<UnitType>) -> bool {
        self.own_policy(unit).is_some()
    }

    /// In which types a unit computes and communicates.
    pub(crate) fn policy(&self, unit: Option<UnitType>) -> MixedPrecisionPolicy {
        self.own_policy(unit).unwrap_or(self.mixed_precision)
    }

    /// The device that computes: the model's, unless that is where parameters rest and the rank has
    /// another.
    pub(crate) fn compute_device(&self, model: &Device, rank: &Device) -> Device {
        let device = if self.offload == OffloadPolicy::None { model } else { rank };
        device.clone()
    }

    /// That a model on `model` can be offloaded from `device`, where it computes.
    pub(crate) fn check_offload(&self, model: &Device, device: &Device) -> Result<(), ShardError> {
        if self.offload == OffloadPolicy::None || model == device || is_flex(model) {
            return Ok(());
        }
        Err(ShardError::InvalidOption {
            option: "offload",
            value: format!("{:?} of a model on {model:?}", self.offload),
            expected: format!(
                "build the model on {device:?}, where this rank computes, or on Flex"
            ),
        })
    }

    pub(crate) fn check(&self) -> Result<(), ShardError> {
        if self.slots == 0 {
            return Err(ShardError::InvalidOption {
                option: "slots",
                value: "0".into(),
                expected: "use at least 1".into(),
            });
        }
        if self.offload != OffloadPolicy::None && cfg!(not(feature = "flex")) {
            return Err(ShardError::InvalidOption {
                option: "offload",
                value: format!("{:?}", self.offload),
                expected: "build with the feature `flex`, which steps on the host".into(),
            });
        }
        Ok(())
    }

    /// How `mesh` is grouped under the strategy; `local` ranks are on this machine.
    pub(crate) fn mesh(&self, mesh: Mesh, local: usize) -> Result<Mesh, ShardError> {
        if !self.strategy.is_hybrid() {
            return Ok(mesh);
        }
        if self.shard_size == Some(0) {
            return Err(ShardError::InvalidOption {
                option: "shard_size",
                value: "0".into(),
                expected: format!("use a divisor of the {} ranks", mesh.world),
            });
        }
        Ok(mesh.grouped(self.shard_size.unwrap_or(local))?)
    }

    /// What becomes of gathered parameters, in simplest terms.
    pub(crate) fn reshard(&self, mesh: Mesh) -> Result<ReshardAfterForward, ShardError> {
        let size = mesh.shard_size().size();
        match self.reshard_after_forward.unwrap_or(self.strategy.reshard_after_forward()) {
            ReshardAfterForward::To(1) => Ok(ReshardAfterForward::Never),
            ReshardAfterForward::To(to) if to == size => Ok(ReshardAfterForward::Always),
            ReshardAfterForward::To(to) if to == 0 || !size.is_multiple_of(to) => {
                Err(ShardError::InvalidOption {
                    option: "reshard_after_forward",
                    value: format!("To({to})"),
                    expected: format!("use a divisor of {size}, the ranks that share parameters"),
                })
            }
            reshard => Ok(reshard),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_to_reshard_to_divides_the_group() {
        use crate::layout::{Rank, WorldSize};
        let mesh = Mesh::new(Rank::ZERO, WorldSize::new(4).unwrap());
        let to = |to| {
            let reshard = ReshardAfterForward::To(to);
            FsdpOptions::new().with_reshard_after_forward(reshard).reshard(mesh)
        };
        assert_eq!(to(1), Ok(ReshardAfterForward::Never));
        assert_eq!(to(2), Ok(ReshardAfterForward::To(2)));
        assert_eq!(to(4), Ok(ReshardAfterForward::Always));
        for wrong in [0, 3, 8] {
            assert!(to(wrong).unwrap_err().to_string().contains("divisor of 4"));
        }
    }
}
