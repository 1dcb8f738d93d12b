//! Distribution of the model over ranks: the four ways of PyTorch's tutorial.

use fsdp_runtime::prelude::*;

/// Smallest number of parameters of a unit in the tutorial's `size_based_auto_wrap_policy`. Only
/// `fc1` has as many.
const MIN_NUM_PARAMS: usize = 20_000;

/// Distribution of the model over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// What is sharded.
    pub strategy: ShardingStrategy,
    /// Smallest number of parameters of a layer that is a unit of its own. `None`: the whole model
    /// is one unit.
    pub min_num_params: Option<usize>,
    /// Whether parameters, gradients and the optimizer's state are kept in host memory.
    pub cpu_offload: bool,
}

impl Sharding {
    /// The ways that `--compare` compares, each with the name of its file and of its row.
    pub const COMPARED: [(&str, &str, Self); 4] = [
        ("ddp", "DDP", Self { strategy: ShardingStrategy::NoShard, ..Self::ONE_UNIT }),
        ("fsdp", "FSDP, one unit", Self::ONE_UNIT),
        ("fsdp-wrap", "FSDP, size-based", Self::WRAPPED),
        ("fsdp-offload", "FSDP, CPU offload", Self { cpu_offload: true, ..Self::WRAPPED }),
    ];

    const ONE_UNIT: Self =
        Self { strategy: ShardingStrategy::FullShard, min_num_params: None, cpu_offload: false };

    const WRAPPED: Self = Self { min_num_params: Some(MIN_NUM_PARAMS), ..Self::ONE_UNIT };

    /// Returns the options of `fully_shard`.
    pub fn options(&self, seed: u64) -> FsdpOptions {
        let wrap = match self.min_num_params {
            Some(min_num_params) => WrapPolicy::SizeBased { min_num_params },
            None => WrapPolicy::NoWrap,
        };
        let offload = match self.cpu_offload {
            true => OffloadPolicy::Params { pin_memory: true },
            false => OffloadPolicy::None,
        };
        FsdpOptions::new()
            .with_strategy(self.strategy)
            .with_wrap(wrap)
            .with_offload(offload)
            .with_seed(seed)
    }
}
