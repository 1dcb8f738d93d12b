//! Sharding of the model, with new, pretrained or restored weights.

use std::path::Path;

use anyhow::{Context, Result};
use burn::tensor::Device;
use fsdp_runtime::Mesh;
use fsdp_runtime::memory::MemoryForecast;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, from_pretrained};

use crate::common::lora::load_adapters;
use crate::common::progress::Progress;
use crate::job::Job;
use crate::model::BertForSequenceClassification;

/// Number of f32 tensors of a parameter's shape that AdamW keeps for it.
const ADAM_MOMENTS: usize = 2;

/// The sharded model. It dereferences to the plain one.
pub type ShardedBert = Fsdp<BertForSequenceClassification>;

/// Builds the model and shards it over all ranks. Its weights are initialised, read from a
/// pretrained model, or left uninitialised if a checkpoint is loaded next (`resumes`). Returns the
/// memory that the rank will need, without activations, if memory is recorded.
///
/// # Errors
///
/// If the pretrained weights do not fit the model, or if a peer fails.
pub fn shard_model(
    job: &Job,
    worker: &Worker,
    progress: &Progress,
    resumes: bool,
) -> Result<(ShardedBert, Option<MemoryForecast>)> {
    let (model, options) = unsharded(job, worker.device())?;
    let mesh = Mesh::new(worker.rank(), worker.world());
    let forecast = || MemoryForecast::new(&model, mesh, &options);
    let forecast = job.memory.is_on().then(forecast).transpose()?;
    let forecast = forecast.map(|forecast| forecast.with_optimizer(ADAM_MOMENTS));
    if resumes {
        return Ok((fully_shard(model, worker, options.with_deferred_init(true))?, forecast));
    }
    let model = match &job.pretrained {
        None => fully_shard(model, worker, options)?,
        Some(directory) => {
            let mut model = shard_pretrained(model, worker, options, directory, progress)?;
            if let Some(folder) = &job.adapters {
                load_adapters(&mut model, folder)?;
            }
            model
        }
    };
    Ok((model, forecast))
}

/// Builds the model, with adapters if there are any, and returns the options to shard it with.
///
/// # Errors
///
/// If no linear layer has the name of an adapter's target.
pub fn unsharded(
    job: &Job,
    device: &Device,
) -> Result<(BertForSequenceClassification, FsdpOptions)> {
    let model = job.config.init(job.dataset.classes, device);
    let options = job.options.clone().with_strategy(job.strategy).with_seed(job.recipe.seed);
    match &job.lora {
        None => Ok((model, options)),
        Some(lora) => {
            let options = options.with_storage(StoragePolicy::new().with_frozen(lora.storage));
            Ok((lora.config.apply(model).context("--lora")?, options))
        }
    }
}

/// Shards the model and reads its weights from a Hugging Face directory. Every rank reads its own
/// shards only.
fn shard_pretrained(
    model: BertForSequenceClassification,
    worker: &Worker,
    options: FsdpOptions,
    directory: &Path,
    progress: &Progress,
) -> Result<ShardedBert> {
    let load = LoadOptions::new()
        .with_new_adapters()
        // A file of the encoder alone has no classifier, perhaps no pooler, and no `bert.` prefix.
        .with_base_prefix("bert")
        .with_allowed_missing("classifier.")
        .with_allowed_missing("bert.pooler.")
        // A file of the pretrained model also has the heads of the pretraining tasks.
        .with_allowed_unexpected("cls.")
        // Old files hold the position indices, and other names for the layer norms' parameters.
        .with_allowed_unexpected("embeddings.position_ids")
        .with_allowed_unexpected("bert.embeddings.position_ids")
        .with_legacy_layer_norm();
    let (model, mut report) = from_pretrained(model, worker, options, directory, &load)
        .with_context(|| format!("cannot start from {}", directory.display()))?;
    report.missing.retain(|name| !name.contains(".lora."));
    for (what, names) in [("newly initialised", &report.missing), ("not used", &report.unexpected)]
    {
        if !names.is_empty() {
            progress.note(&format!("{}: {what}: {}", directory.display(), names.join(", ")));
        }
    }
    Ok(model)
}
