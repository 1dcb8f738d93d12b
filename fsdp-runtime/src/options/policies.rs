//! Enums that options of sharding take: strategy, prefetch, wrapping, accumulation, offload,
//! recomputation.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::backend::StorageDevice;
use crate::error::ShardError;
use crate::module::UnitType;

/// Which of parameters, gradients and optimizer state are sharded, under PyTorch's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[non_exhaustive]
pub enum ShardingStrategy {
    /// Shards parameters, gradients and optimizer state (ZeRO stage 3). Gathered parameters are
    /// freed after forward.
    #[default]
    FullShard,
    /// Shards gradients and optimizer state (ZeRO stage 2). Parameters are sharded between steps,
    /// and stay gathered from forward to backward.
    ShardGradOp,
    /// Shards nothing: every rank stores the whole model, and gradients are all-reduced (PyTorch's
    /// DDP).
    NoShard,
    /// [`FullShard`](Self::FullShard) within groups of ranks. Gradients are all-reduced across the
    /// groups.
    HybridShard,
    /// [`ShardGradOp`](Self::ShardGradOp) within groups of ranks. Gradients are all-reduced across
    /// the groups.
    HybridShardZero2,
}

impl ShardingStrategy {
    /// Every strategy with its name in Accelerate's configuration files, in the order of
    /// Accelerate's numbers: `FULL_SHARD` is 1.
    pub const ALL: [(Self, &'static str); 5] = [
        (Self::FullShard, "FULL_SHARD"),
        (Self::ShardGradOp, "SHARD_GRAD_OP"),
        (Self::NoShard, "NO_SHARD"),
        (Self::HybridShard, "HYBRID_SHARD"),
        (Self::HybridShardZero2, "HYBRID_SHARD_ZERO2"),
    ];

    /// Returns the strategy's number in Accelerate's configuration files, 1 to 5.
    pub const fn number(self) -> usize {
        self as usize + 1
    }

    /// Returns whether ranks form shard groups that each hold a copy of the whole model.
    pub const fn is_hybrid(self) -> bool {
        matches!(self, Self::HybridShard | Self::HybridShardZero2)
    }

    /// Returns whether parameters are sharded between steps: under all strategies but `NO_SHARD`.
    pub const fn shards(self) -> bool {
        !matches!(self, Self::NoShard)
    }

    /// Returns the default of the option `reshard_after_forward` under this strategy.
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

    /// Parses a strategy's name, in any case, or its number.
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

/// Whether a unit's gathered parameters are freed between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ReshardAfterForward {
    /// Keeps the gathered parameters until backward: one all-gather for each unit and step, and a
    /// gather buffer for every unit.
    Never,
    /// Frees the gathered parameters after forward and gathers them again for backward. The
    /// outermost unit, and the last one, whose backward comes first, stay gathered.
    Always,
    /// Keeps 1/n of the gathered parameters on each rank, for the given number of ranks n. The
    /// all-gather for backward then runs among n neighbours only (hpZ of
    /// [ZeRO++](https://arxiv.org/abs/2306.10209)).
    ///
    /// The number must divide the number of ranks that share the parameters. `To(1)` is
    /// [`Never`](Self::Never), and `To` with all ranks is [`Always`](Self::Always).
    To(usize),
}

/// Time at which a unit's parameters are gathered for backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum BackwardPrefetch {
    /// Gathers a unit before the backward of the unit that follows it in forward: the most overlap,
    /// with one more gather buffer in use.
    #[default]
    Pre,
    /// Gathers a unit after the backward of the unit that follows it in forward, before that unit's
    /// gradients are reduced: less overlap, without a further gather buffer in use.
    Post,
    /// Gathers a unit when its own backward begins: no overlap.
    None,
}

/// How [context parallel](crate::FsdpOptions::with_context_parallel) ranks exchange the keys and values of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ContextExchange {
    /// Each rank gathers those of whole rows, for one layer at a time: one exchange in forward, and two in backward.
    /// PyTorch's `allgather`, which is its default too.
    #[default]
    Gather,
    /// The ranks pass their parts on from neighbour to neighbour, while they compute with those that they have. Each
    /// has the keys and values of two ranks at a time: n - 1 exchanges in forward and 2 n - 1 in backward, among n
    /// ranks. Gradients of keys and values travel in f32. PyTorch's `alltoall`, and *Ring Attention*.
    Ring,
}

/// Which of the annotated units are gathered separately.
///
/// Units that are not selected merge into the enclosing unit. The outermost unit is always a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WrapPolicy {
    /// Selects all annotated units, and the modules in fields under `#[fsdp(unit)]`.
    #[default]
    Annotated,
    /// Selects units of the given types: `TransformerBased(unit_types![BertLayer])`.
    TransformerBased(&'static [UnitType]),
    /// Selects units by the names of their types, as a configuration file gives them.
    Named(&'static [&'static str]),
    /// Selects units, and modules in fields under `#[fsdp(unit)]`, that have at least a given
    /// number of parameters. Parameters of selected units inside the unit do not count.
    SizeBased {
        /// Smallest number of parameters of a unit, in elements.
        min_num_params: usize,
    },
    /// Selects only the outermost unit.
    NoWrap,
}

/// How the gradients of several micro-batches are added up.
///
/// The option applies to [`Fsdp::accumulate`](crate::Fsdp::accumulate).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum GradientAccumulation {
    /// Reduces the gradients of each micro-batch and adds up the shards. This takes one
    /// reduce-scatter for each unit and micro-batch (and one all-reduce under the hybrid
    /// strategies), and no memory beyond the gradient shards.
    #[default]
    ReduceEach,
    /// Reduces the gradients of each micro-batch within the shard group, adds up the shards, and
    /// all-reduces the sums among the groups once, with the last micro-batch (FSDP2's
    /// `set_requires_all_reduce(False)`).
    ///
    /// It takes the memory of [`ReduceEach`](Self::ReduceEach), and is the same where there is one
    /// group: under all but the hybrid strategies.
    ReduceInGroup,
    /// Adds up unsharded gradients and reduces them once, with the last micro-batch (PyTorch's
    /// `no_sync`). This takes the bytes of the whole model's gradients on every rank.
    HoldUnsharded,
}

/// State that is stored in host memory in place of device memory.
///
/// Under a policy other than `None`, the optimizer steps on the host, on
/// [Flex](burn::backend::Flex): its parameters and gradients are Flex tensors. The device that
/// computes is [`Worker::device`](crate::Worker::device), and the model may be built on that device
/// or on Flex. Offload needs the feature `flex`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum OffloadPolicy {
    /// Stores everything on the device.
    #[default]
    None,
    /// Stores parameters, reduced gradients and optimizer state in host memory (PyTorch's
    /// `CPUOffloadPolicy`). Each all-gather first copies the unit's shards to the device, in the
    /// dtype in which they are gathered.
    Params {
        /// Whether shards that are copied to the device are cast into pinned (page-locked) memory,
        /// which devices read faster. Copies from CUDA devices use pinned memory in any case.
        pin_memory: bool,
    },
    /// Stores the same as [`Params`](Self::Params) in pinned host memory, and keeps a copy of this
    /// rank's shards on the device from forward to backward.
    ///
    /// The shards are thus copied once a step (ZeRO-Offload of the optimizer state and the f32
    /// parameters).
    OptimizerOnly,
}

impl OffloadPolicy {
    /// Returns where parameters, reduced gradients and optimizer state are stored between uses.
    pub(crate) const fn storage_device(self) -> StorageDevice {
        match self {
            Self::None => StorageDevice::Device,
            Self::Params { pin_memory } => StorageDevice::Host { pinned: pin_memory },
            Self::OptimizerOnly => StorageDevice::Host { pinned: true },
        }
    }
}

/// Which units store only their inputs in forward, and recompute their forward in backward.
///
/// The recomputation of a unit includes the units inside it, which are not recomputed separately. A
/// unit that the [`WrapPolicy`] merges into the enclosing unit is not recomputed either.
///
/// Random numbers from [`nn::Dropout`](crate::nn::Dropout) are equal in both runs of a forward.
/// Apart from these, a forward must depend only on its inputs and its parameters. Construction
/// refuses the violations that it can detect; the others are up to the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ActivationCheckpointing {
    /// Recomputes no unit.
    None,
    /// Recomputes the units under `#[fsdp_unit(checkpoint)]`.
    #[default]
    Annotated,
    /// Recomputes all units of the given types: `Units(unit_types![BertLayer])`.
    Units(&'static [UnitType]),
    /// Recomputes all units but the outermost, whose recomputation would store every activation
    /// again.
    ///
    /// Modules in fields under `#[fsdp(unit)]` outside recomputed units are not recomputed either.
    /// Construction logs a warning that names them.
    All,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategies_parse_from_accelerates_names_and_numbers() {
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
