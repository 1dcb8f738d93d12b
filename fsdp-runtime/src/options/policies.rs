//! What each option can be.

use std::fmt;
use std::str::FromStr;

use crate::backend::StorageDevice;
use crate::error::ShardError;
use crate::module::UnitType;

/// What is sharded between steps, by PyTorch's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ShardingStrategy {
    /// Parameters, gradients and optimizer state (ZeRO stage 3); resharded after forward.
    #[default]
    FullShard,
    /// Gradients and optimizer state (ZeRO stage 2): parameters are sharded between steps, and stay
    /// unsharded from forward to backward.
    ShardGradOp,
    /// Nothing: every rank holds the whole model, gradients are all-reduced (PyTorch's DDP).
    NoShard,
    /// [`FullShard`](Self::FullShard) within groups of ranks; gradients are all-reduced across them.
    HybridShard,
    /// [`ShardGradOp`](Self::ShardGradOp) within groups of ranks; gradients are all-reduced across
    /// them.
    HybridShardZero2,
}

impl ShardingStrategy {
    /// Every strategy, with its name in Accelerate's configuration files, in the order of its
    /// numbers there: `FULL_SHARD` is 1.
    pub const ALL: [(Self, &'static str); 5] = [
        (Self::FullShard, "FULL_SHARD"),
        (Self::ShardGradOp, "SHARD_GRAD_OP"),
        (Self::NoShard, "NO_SHARD"),
        (Self::HybridShard, "HYBRID_SHARD"),
        (Self::HybridShardZero2, "HYBRID_SHARD_ZERO2"),
    ];

    /// Its number in Accelerate's configuration files, 1 to 5.
    pub const fn number(self) -> usize {
        self as usize + 1
    }

    /// Whether ranks form groups that each hold the whole model.
    pub const fn is_hybrid(self) -> bool {
        matches!(self, Self::HybridShard | Self::HybridShardZero2)
    }

    /// Whether parameters are sharded between steps.
    pub const fn shards(self) -> bool {
        !matches!(self, Self::NoShard)
    }

    pub(super) const fn reshard_after_forward(self) -> ReshardAfterForward {
        match self {
            Self::FullShard | Self::HybridShard => ReshardAfterForward::Always,
            _ => ReshardAfterForward::Never,
        }
    }
}

impl fmt::Display for ShardingStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::ALL[*self as usize].1)
    }
}

impl FromStr for ShardingStrategy {
    type Err = ShardError;

    /// By name, in any case, or by number.
    fn from_str(name: &str) -> Result<Self, ShardError> {
        let known = |(strategy, known): &&(Self, &str)| {
            known.eq_ignore_ascii_case(name) || strategy.number().to_string() == name
        };
        Self::ALL.iter().find(known).map(|(strategy, _)| *strategy).ok_or_else(|| {
            ShardError::InvalidOption {
                option: "strategy",
                value: name.to_string(),
                expected: "use FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, \
                           HYBRID_SHARD_ZERO2, or its number from 1 to 5"
                    .into(),
            }
        })
    }
}

/// What becomes of a unit's gathered parameters between its forward and its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReshardAfterForward {
    /// They stay: one all-gather a step, and a buffer for every unit.
    Never,
    /// They go, but for the outermost unit's and the last one's, whose backward comes first.
    Always,
    /// Each rank keeps a part of them, 1 over this number of ranks, so that the backward's
    /// all-gather is among that many neighbours (ZeRO++'s hpZ). It divides the number of ranks that
    /// share the parameters; 1 is [`Never`](Self::Never), all of them [`Always`](Self::Always).
    To(usize),
}

/// When a unit's parameters are gathered again for its backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BackwardPrefetch {
    /// Before the backward of the unit after it runs: most overlap, one more buffer in use.
    #[default]
    Pre,
    /// When the backward of the unit after it has ended, before its gradients are reduced: less
    /// overlap, and no buffer beside the one in use.
    Post,
    /// When its own backward begins.
    None,
}

/// Which of the annotated units are units of their own. The others join the unit around them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WrapPolicy {
    /// All of them, and the modules in fields under `#[fsdp(unit)]`.
    #[default]
    Annotated,
    /// The named types, and the outermost unit: `TransformerBased(unit_types![BertLayer])`.
    TransformerBased(&'static [UnitType]),
    /// As `TransformerBased`, by the types' names: what a configuration file can say.
    Named(&'static [&'static str]),
    /// Those with at least so many parameters, not counting those of units within them that are
    /// wrapped themselves; and the outermost unit.
    SizeBased {
        /// The least number of parameters.
        min_num_params: usize,
    },
    /// None but the outermost unit.
    NoWrap,
}

/// How gradients of several micro-batches become one: what
/// [`Fsdp::accumulate`](crate::Fsdp::accumulate) does with each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GradientAccumulation {
    /// Each is reduced, and its shards are added up: a reduce-scatter a unit and micro-batch, under
    /// the hybrid strategies an all-reduce too, and no memory beyond the shards' gradients.
    #[default]
    ReduceEach,
    /// They are added up unsharded and reduced once, with the last (PyTorch's `no_sync`): costs the
    /// bytes of the whole model's gradients on every rank.
    HoldUnsharded,
}

/// What rests in the host's memory instead of the device's, to fit models that do not fit there.
///
/// The optimizer then steps on the host, on [Flex](burn::backend::Flex): its parameters and gradients
/// are Flex tensors. The device that computes is the rank's ([`Worker::device`](crate::Worker::device)),
/// and the model may be built on either. Needs the feature `flex`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OffloadPolicy {
    /// Nothing.
    #[default]
    None,
    /// Parameters, reduced gradients and optimizer state (PyTorch's `CPUOffloadPolicy`). A unit's
    /// shards are copied to the device for every all-gather, in the parameters' type.
    Params {
        /// Whether what is copied to the device is first put in pages that stay in place, which
        /// devices read faster; copies back to the host are not.
        pin_memory: bool,
    },
    /// The same, but a copy of this rank's shards stays on the device from forward to backward:
    /// they cross over once a step (ZeRO-Offload of the optimizer's state and the f32 parameters).
    OptimizerOnly,
}

impl OffloadPolicy {
    /// Where parameters rest.
    pub(crate) const fn rest(self) -> StorageDevice {
        match self {
            Self::None => StorageDevice::Device,
            Self::Params { pin_memory } => StorageDevice::Host { pinned: pin_memory },
            Self::OptimizerOnly => StorageDevice::Host { pinned: true },
        }
    }
}

/// Which units keep their inputs alone in forward, and run their forward again in backward.
///
/// A unit within such a unit belongs to its recomputation, and is not checkpointed on its own; one
/// that the [`WrapPolicy`] joins to the unit around it is none. What a unit's forward draws from
/// [`nn::Dropout`](crate::nn::Dropout) is the same both times; that it depends on nothing but its
/// inputs, its parameters and those draws is the model's promise, kept as far as construction can
/// see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationCheckpointing {
    /// None.
    None,
    /// Those under `#[fsdp_unit(checkpoint)]`.
    #[default]
    Annotated,
    /// All units of the named types: `Units(unit_types![BertLayer])`.
    Units(&'static [UnitType]),
    /// All but the outermost, whose recomputation would hold every activation again, and those that a
    /// field under `#[fsdp(unit)]` makes outside of the others, whose calls are not run again:
    /// construction warns of them.
    All,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategies_are_known_by_accelerates_names() {
        for (index, (strategy, name)) in ShardingStrategy::ALL.into_iter().enumerate() {
            assert_eq!(name.parse(), Ok(strategy));
            assert_eq!(strategy.to_string(), name);
            assert_eq!((index + 1).to_string().parse(), Ok(strategy));
        }
        assert!(
            "0".parse::<ShardingStrategy>().is_err() && "6".parse::<ShardingStrategy>().is_err()
        );
        let error = "FULL_SHRAD".parse::<ShardingStrategy>().unwrap_err();
        assert!(error.to_string().contains("FULL_SHRAD"), "{error}");
    }
}
