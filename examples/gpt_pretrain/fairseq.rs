//! Arguments of fairseq that name what this program does in any case, so that fairseq's command runs
//! as it is.

use clap::{Args, ValueEnum};
use fsdp_runtime::prelude::ShardingStrategy;

/// fairseq's arguments.
#[derive(Args, Clone, Debug, Default)]
pub struct FairseqArgs {
    /// fairseq's name of the strategy: fully_sharded is FULL_SHARD, the others are NO_SHARD
    #[arg(long, value_name = "NAME", value_enum, conflicts_with = "strategy")]
    pub ddp_backend: Option<DdpBackend>,

    /// fairseq's task
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    pub task: Task,

    /// Optimizer; under --cpu-offload, both run on the CPU
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    pub optimizer: Optimizer,

    /// fairseq's loss
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    pub criterion: Criterion,
}

/// fairseq's way to share the work of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum DdpBackend {
    /// Parameters, gradients and optimizer state are sharded
    FullySharded,
    /// Every rank has all of them
    PytorchDdp,
    /// As pytorch_ddp
    LegacyDdp,
    /// As pytorch_ddp
    #[value(name = "c10d", alias = "no_c10d")]
    C10d,
}

/// fairseq's task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Task {
    /// Prediction of the next word piece
    #[default]
    LanguageModeling,
}

/// Optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Optimizer {
    /// AdamW
    #[default]
    Adam,
    /// AdamW, by the name of DeepSpeed's optimizer for the CPU
    CpuAdam,
}

/// fairseq's loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Criterion {
    /// Mean negative log-likelihood of the next word piece
    #[default]
    CrossEntropy,
}

impl FairseqArgs {
    /// Returns the strategy that `--ddp-backend` names, if it is given.
    pub fn strategy(&self) -> Option<ShardingStrategy> {
        self.ddp_backend.map(|backend| match backend {
            DdpBackend::FullySharded => ShardingStrategy::FullShard,
            DdpBackend::PytorchDdp | DdpBackend::LegacyDdp | DdpBackend::C10d => {
                ShardingStrategy::NoShard
            }
        })
    }
}
