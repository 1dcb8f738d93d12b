//! Memory that a rank will need, computed from the model's shapes before anything is allocated.

use anyhow::{Context, Result};
use burn::tensor::{DType, Device};
use fsdp_runtime::memory::MemoryForecast;
use fsdp_runtime::{Mesh, WorldSize};

use crate::arch::Arch;
use crate::job::Setup;
use crate::sharding::ActivationPolicy;

/// Number of f32 tensors of a parameter's shape that AdamW keeps for it.
const ADAM_MOMENTS: usize = 2;
/// Logits that `linear_cross_entropy` computes at once, or those of so many rows.
const CHUNK_LOGITS: u128 = 1 << 24;
const CHUNK_ROWS: u128 = 16;

/// Returns the forecast of the rank that needs the most device memory, of `world_size` ranks with
/// `local_ranks` on each machine.
///
/// # Errors
///
/// If the model cannot be sharded as the setup asks.
pub fn forecast(
    setup: &Setup,
    world_size: usize,
    local_ranks: usize,
    device: &Device,
) -> Result<MemoryForecast> {
    let model = setup.model(device)?;
    let world = WorldSize::new(world_size)?;
    // The hybrid strategies shard within a machine.
    let tensor = setup.sharding.tensor_parallel;
    let options = setup.options().with_shard_size((local_ranks / tensor).max(1));
    let mut largest: Option<MemoryForecast> = None;
    for rank in world.ranks() {
        let of_rank = MemoryForecast::new(&model, Mesh::new(rank, world), &options)?;
        let larger = largest.is_none_or(|largest| largest.total() < of_rank.total());
        largest = if larger { Some(of_rank) } else { largest };
    }
    let policy = match setup.sharding.activations {
        // Flex computes in host memory, so that offloaded activations stay where they are.
        ActivationPolicy::RecomputeFromHost if is_flex(device) => ActivationPolicy::Recompute,
        policy => policy,
    };
    let (on_device, on_host) = activation_bytes(setup, policy);
    let forecast = largest.context("no rank")?.with_optimizer(ADAM_MOMENTS);
    let accumulates = setup.recipe.update_freq.iter().any(|batches| *batches > 1);
    let forecast = if accumulates { forecast.with_accumulation() } else { forecast };
    Ok(forecast.with_activations(on_device).with_host_activations(on_host))
}

/// Estimates the bytes of activations that are kept for the backward pass of one batch: in device
/// memory and in host memory.
///
/// The estimate counts the operations of the model. Per word piece:
///
/// - A block keeps about 20 vectors of the model's width (norms, projections, the attention's output
///   per head and joined, the feed-forward block at four times the width, residuals and masks), and
///   one number per head.
/// - The loss holds the logits of a chunk of rows once, in f32, and the gradient of the last norm's
///   output.
/// - Embeddings and the last norm keep 3 vectors.
///
/// The gradient of the output weight is computed first, in f32, and stays until the gradient of the tied
/// embedding is added to it. A block that is recomputed keeps its input only, and one block at a
/// time holds all of its activations.
///
/// Each result is at most 2^60 bytes.
fn activation_bytes(setup: &Setup, policy: ActivationPolicy) -> (usize, usize) {
    let Arch { layers, width, heads, vocabulary, .. } = setup.arch;
    let element_size = DType::from(setup.sharding.precision.dtype()).size();
    let (tensor, context) = (setup.sharding.tensor_parallel, setup.sharding.context_parallel);
    let (rows, length) = (setup.recipe.batch_size, setup.recipe.tokens_per_sample / context);
    // The product of all of these may exceed 64 bits.
    let [rows, length, element_size, width, heads, layers, vocabulary] =
        [rows, length, element_size, width, heads, layers, vocabulary].map(|size| size as u128);

    // Of a block, each tensor parallel rank has the norms and residuals whole.
    let of_block = 6 * width + (14 * width + heads) / tensor as u128;
    let of_blocks = match policy {
        ActivationPolicy::KeepAll => layers * of_block,
        ActivationPolicy::Recompute => layers * width + of_block,
        ActivationPolicy::RecomputeFromHost => of_block,
    };
    let numbers = rows * length * (of_blocks + 3 * width);
    let logits = (rows * length * vocabulary).min(CHUNK_LOGITS.max(CHUNK_ROWS * vocabulary));
    let of_loss = logits + rows * length * width + vocabulary * width;
    let on_host = match policy {
        ActivationPolicy::RecomputeFromHost => rows * length * layers * width * element_size,
        _ => 0,
    };
    let bytes = |bytes: u128| bytes.min(1 << 60) as usize;
    (bytes(numbers * element_size + of_loss * 4), bytes(on_host))
}

fn is_flex(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    return *device == Device::flex();
    #[cfg(not(feature = "flex"))]
    {
        let _ = device;
        false
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::Cli;
    use crate::common::device::DeviceName;

    /// Two machines of two ranks each: every machine holds the whole model.
    #[test]
    fn the_hybrid_strategies_shard_within_a_machine() {
        let setup = |strategy: &str| {
            Setup::new(&Cli::parse_from(["gpt_pretrain", "--strategy", strategy])).unwrap()
        };
        let device = DeviceName::Flex.resolve().unwrap();
        let of = |strategy, world| forecast(&setup(strategy), world, 2, &device).unwrap();
        assert_eq!(of("HYBRID_SHARD", 4).shards, of("FULL_SHARD", 2).shards);
        assert_eq!(of("HYBRID_SHARD", 4).optimizer, of("FULL_SHARD", 2).optimizer);
        assert!(of("FULL_SHARD", 4).shards < of("FULL_SHARD", 2).shards);
    }
}
