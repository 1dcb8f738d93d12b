//! Sharding of the model, with new, pretrained or restored weights.

use std::path::Path;

use anyhow::{Context, Result};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{LoadOptions, from_pretrained};

use crate::job::Job;
use crate::model::BertForSequenceClassification;
use crate::progress::Progress;

/// The sharded model. It dereferences to the plain one.
pub type ShardedBert = Fsdp<BertForSequenceClassification>;

/// Builds the model and shards it over all ranks. Its weights are initialised, read from a
/// pretrained model, or left uninitialised if a checkpoint is loaded next.
///
/// # Errors
///
/// If the pretrained weights do not fit the model, or if a peer fails.
pub fn shard_model(job: &Job, worker: &Worker, progress: &Progress) -> Result<ShardedBert> {
    let model = job.config.init(job.dataset.classes, worker.device());
    let mut options = job.options.clone().with_strategy(job.strategy).with_seed(job.recipe.seed);
    let model = match &job.lora {
        None => model,
        Some(lora) => {
            options = options.with_storage(StoragePolicy::new().with_frozen(lora.storage));
            lora.config.apply(model).context("--lora")?
        }
    };
    if job.checkpoints.resume.is_some() {
        return Ok(fully_shard(model, worker, options.with_deferred_init(true))?);
    }
    match &job.pretrained {
        None => Ok(fully_shard(model, worker, options)?),
        Some(directory) => shard_pretrained(model, worker, options, directory, progress),
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
