//! How the model is sharded, with new, pretrained or restored weights.

use anyhow::{Context, Result};
use burn::tensor::{Device, FloatDType};
use fsdp_runtime::Mesh;
use fsdp_runtime::memory::MemoryForecast;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, from_pretrained};

use crate::cli::Cli;
use crate::common::launch_settings::LaunchSettings;
use crate::common::lora::{Lora, load_adapters};
use crate::job::Job;
use crate::model::{CausalLm, DecoderLayer};

/// Number of f32 tensors of a parameter's shape that AdamW keeps for it.
const ADAM_MOMENTS: usize = 2;

/// Returns the options that the arguments and the configuration file ask for.
pub fn options(cli: &Cli, settings: &LaunchSettings, lora: Option<&Lora>) -> FsdpOptions {
    let options = settings.options.clone().with_strategy(settings.strategy);
    let options = options
        .with_tensor_parallel(tensor_parallel(cli, settings))
        .with_sequence_parallel(cli.sequence_parallel)
        .with_context_parallel(context_parallel(cli, settings));
    let mut options = options.with_seed(cli.training.seed);
    if cli.context_ring {
        options = options.with_context_exchange(ContextExchange::Ring);
    }
    if cli.bf16 {
        // The loss is computed in f32.
        let policy = MixedPrecisionPolicy::new()
            .with_param_dtype(FloatDType::BF16)
            .with_output_dtype(FloatDType::F32);
        options = options.with_mixed_precision(policy);
    }
    if cli.recompute {
        let layers = ActivationCheckpointing::Units(unit_types![DecoderLayer]);
        options = options.with_activation_checkpointing(layers);
    }
    if cli.cpu_offload {
        options = options.with_offload(OffloadPolicy::Params { pin_memory: true });
    }
    match lora {
        Some(lora) => options.with_storage(StoragePolicy::new().with_frozen(lora.storage)),
        None => options,
    }
}

/// Returns the number of tensor parallel ranks that the arguments or the configuration file ask for.
pub fn tensor_parallel(cli: &Cli, settings: &LaunchSettings) -> usize {
    cli.tensor_parallel.unwrap_or(settings.tensor_parallel)
}

/// Returns the number of context parallel ranks that the arguments or the configuration file ask for.
pub fn context_parallel(cli: &Cli, settings: &LaunchSettings) -> usize {
    cli.context_parallel.unwrap_or(settings.context_parallel)
}

/// Builds the model, with adapters if there are any. Its parameters are not initialised yet.
///
/// # Errors
///
/// If no linear layer has the name of an adapter's target.
pub fn unsharded(job: &Job, device: &Device) -> Result<CausalLm> {
    let model = job.config.init(job.positions, device);
    match &job.lora {
        Some(lora) => lora.config.apply(model).context("--lora"),
        None => Ok(model),
    }
}

/// Builds the model and shards it over all ranks. Its weights are initialised, read from a folder, or
/// left uninitialised if a checkpoint is loaded next (`resumes`).
///
/// # Errors
///
/// If the weights do not fit the model, or if a peer fails.
pub fn shard_model(job: &Job, worker: &Worker, resumes: bool) -> Result<Fsdp<CausalLm>> {
    let (model, options) = (unsharded(job, worker.device())?, job.options.clone());
    if resumes {
        return Ok(fully_shard(model, worker, options.with_deferred_init(true))?);
    }
    let Some(folder) = &job.weights else { return Ok(fully_shard(model, worker, options)?) };
    let load = LoadOptions::new()
        .with_new_adapters()
        // Files of old versions hold the rotary frequencies.
        .with_allowed_unexpected("model.rotary_emb.inv_freq");
    let load = (0..job.config.num_hidden_layers).fold(load, |load, layer| {
        load.with_allowed_unexpected(format!("model.layers.{layer}.self_attn.rotary_emb.inv_freq"))
    });
    let (mut model, _) = from_pretrained(model, worker, options, folder, &load)
        .with_context(|| format!("cannot start from {}", folder.display()))?;
    if let Some(folder) = &job.adapters {
        load_adapters(&mut model, folder)?;
    }
    Ok(model)
}

/// Returns the memory that a rank will need, without activations.
///
/// # Errors
///
/// If the model cannot be sharded as the options ask.
pub fn forecast(job: &Job, worker: &Worker) -> Result<MemoryForecast> {
    let model = unsharded(job, worker.device())?;
    let mesh = Mesh::new(worker.rank(), worker.world());
    let forecast = MemoryForecast::new(&model, mesh, &job.options)?.with_optimizer(ADAM_MOMENTS);
    let accumulates = job.recipe.args.accumulate > 1;
    Ok(if accumulates { forecast.with_accumulation() } else { forecast })
}
