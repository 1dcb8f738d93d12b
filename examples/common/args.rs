//! Command-line arguments that the examples share.

use clap::Args;
use fsdp_runtime::prelude::{Engine, ShardingStrategy};

use super::device::DeviceName;
use super::parse::bounded_count;

/// Number of ranks, and how they compute, communicate and share the model.
#[derive(Args, Clone, Debug)]
pub struct RankArgs {
    /// Number of ranks [default: the number of started processes, else 2 threads or one thread per
    /// GPU]
    #[arg(long, visible_alias = "world", value_name = "N", value_parser = bounded_count)]
    pub world_size: Option<usize>,

    /// How ranks communicate: local (threads of one process), mpi (processes started by `mpirun`),
    /// nccl (one GPU per rank) or auto
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub engine: Engine,

    /// What is sharded: FULL_SHARD (parameters, gradients and optimizer state), SHARD_GRAD_OP (as
    /// FULL_SHARD, but parameters stay gathered from forward to backward), NO_SHARD (nothing),
    /// HYBRID_SHARD or HYBRID_SHARD_ZERO2 (FULL_SHARD or SHARD_GRAD_OP within each machine)
    /// [default: FULL_SHARD]
    #[arg(long, value_name = "NAME")]
    pub strategy: Option<ShardingStrategy>,

    /// Device to compute on: auto, flex, cpu, wgpu, cuda or cuda:N
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub device: DeviceName,
}

/// What the program prints.
#[derive(Args, Clone, Copy, Debug)]
pub struct OutputArgs {
    /// Print the result as one JSON object, on the last line of standard output
    #[arg(long)]
    pub json: bool,

    /// Print the result only: no progress and no log lines
    #[arg(long)]
    pub quiet: bool,
}
