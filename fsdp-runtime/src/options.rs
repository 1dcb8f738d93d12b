//! How a model is sharded: PyTorch's and Accelerate's options as types.

use std::fmt;
use std::str::FromStr;

use crate::error::ShardError;
use crate::unit_type::UnitType;

/// What is sharded between steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ShardingStrategy {
    /// Parameters, gradients and optimizer state (ZeRO stage 3); resharded after forward.
    #[default]
    FullShard,
    /// Nothing: every rank holds the whole model, gradients are all-reduced (PyTorch's DDP).
    NoShard,
}

impl ShardingStrategy {
    /// Every strategy, with its name in Accelerate's configuration files.
    pub const ALL: [(Self, &'static str); 2] =
        [(Self::FullShard, "FULL_SHARD"), (Self::NoShard, "NO_SHARD")];
}

impl fmt::Display for ShardingStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FullShard => "FULL_SHARD",
            Self::NoShard => "NO_SHARD",
        })
    }
}

impl FromStr for ShardingStrategy {
    type Err = ShardError;

    fn from_str(name: &str) -> Result<Self, ShardError> {
        let known = |(_, known): &&(Self, &str)| known.eq_ignore_ascii_case(name);
        Self::ALL.iter().find(known).map(|(strategy, _)| *strategy).ok_or_else(|| {
            ShardError::InvalidOption {
                option: "strategy",
                value: name.to_string(),
                expected: "use FULL_SHARD or NO_SHARD",
            }
        })
    }
}

/// When a unit's parameters are gathered again for its backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BackwardPrefetch {
    /// Before the backward of the unit after it runs: most overlap, one more buffer in use.
    #[default]
    Pre,
    /// When its own backward begins.
    None,
}

/// Which of the annotated units are units of their own. The others join the unit around them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WrapPolicy {
    /// All of them.
    #[default]
    Annotated,
    /// The named types, and the outermost unit: `TransformerBased(unit_types![BertLayer])`.
    TransformerBased(&'static [UnitType]),
}

impl WrapPolicy {
    pub(crate) fn wraps(self, unit: UnitType) -> bool {
        match self {
            Self::Annotated => true,
            Self::TransformerBased(units) => units.contains(&unit),
        }
    }
}

/// The options of [`fully_shard`](crate::fully_shard).
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct FsdpOptions {
    pub(crate) strategy: ShardingStrategy,
    pub(crate) wrap: WrapPolicy,
    pub(crate) slots: usize,
    pub(crate) forward_prefetch: bool,
    pub(crate) backward_prefetch: BackwardPrefetch,
    pub(crate) persist_below: usize,
    pub(crate) sync_module_states: bool,
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
            wrap: WrapPolicy::Annotated,
            slots: 2,
            forward_prefetch: true,
            backward_prefetch: BackwardPrefetch::Pre,
            persist_below: 0,
            sync_module_states: true,
            seed: None,
        }
    }

    /// What is sharded between steps.
    pub const fn strategy(mut self, strategy: ShardingStrategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Which of the annotated units are gathered on their own.
    pub const fn wrap(mut self, wrap: WrapPolicy) -> Self {
        self.wrap = wrap;
        self
    }

    /// How many buffers the units of one nesting level share; at least 1. Two hold the unit that
    /// computes and the one that is prefetched; with one, nothing is prefetched.
    pub const fn slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// Whether to gather a unit while the one before it computes, in forward.
    pub const fn forward_prefetch(mut self, prefetch: bool) -> Self {
        self.forward_prefetch = prefetch;
        self
    }

    /// When to gather a unit for its backward.
    pub const fn backward_prefetch(mut self, prefetch: BackwardPrefetch) -> Self {
        self.backward_prefetch = prefetch;
        self
    }

    /// Matrices of fewer elements stay whole on every rank, as vectors always do.
    pub const fn persist_below(mut self, elements: usize) -> Self {
        self.persist_below = elements;
        self
    }

    /// Whether rank 0's weights are broadcast. Otherwise every rank must have initialised the same
    /// ones, which is checked.
    pub const fn sync_module_states(mut self, sync: bool) -> Self {
        self.sync_module_states = sync;
        self
    }

    /// Seeds what is drawn from here on: the values of parameters that are not initialised yet,
    /// each from a seed of its own, and the masks of [`nn::Dropout`](crate::nn::Dropout). Runs with
    /// one seed repeat exactly. Without, dropout has seed 0 and initialisation Burn's own state.
    pub const fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    pub(crate) fn check(&self) -> Result<(), ShardError> {
        if self.slots == 0 {
            return Err(ShardError::InvalidOption {
                option: "slots",
                value: "0".into(),
                expected: "use at least 1",
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategies_are_known_by_accelerates_names() {
        for (strategy, name) in ShardingStrategy::ALL {
            assert_eq!(name.parse(), Ok(strategy));
            assert_eq!(strategy.to_string(), name);
        }
        let error = "FULL_SHRAD".parse::<ShardingStrategy>().unwrap_err();
        assert!(error.to_string().contains("FULL_SHRAD"), "{error}");
    }
}
