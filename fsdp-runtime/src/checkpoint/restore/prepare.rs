//! The checks of a load. They change nothing; after them only a file that becomes unreadable can
//! make the load fail.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::ModuleOptimizer;
use serde_json::Value;

use super::builder::Restore;
use super::compare::{compare_model, compare_optimizer, compare_target};
use super::optimizer::load_optimizer;
use super::target::{Target, stored_ranges};
use crate::checkpoint::manifest::{Manifest, model_tensor_name};
use crate::checkpoint::reader::CheckpointReader;
use crate::checkpoint::scheduler;
use crate::checkpoint::sharded_model::{LocalParam, ShardedModel};
use crate::error::CheckpointError;
use crate::module::ParamIndex;
use crate::optim::{GradScaler, owners};

/// A load whose checks have all passed.
pub(super) struct Prepared {
    pub(super) reader: Arc<CheckpointReader>,
    /// Name in the ranks' files of each parameter to load, by model name. A parameter of which this
    /// rank stores no element is loaded as well.
    pub(super) tensors: BTreeMap<String, HashMap<ParamIndex, String>>,
    pub(super) optimizers: BTreeMap<String, ModuleOptimizer>,
    pub(super) schedulers: BTreeMap<String, ModuleLrScheduler>,
    pub(super) scalers: BTreeMap<String, GradScaler>,
    pub(super) values: BTreeMap<String, Value>,
    /// Differences of models that are left as they are.
    pub(super) left: Vec<String>,
}

/// Prepares a load on rank `rank`, without changing anything.
///
/// Compares the checkpoint with the models, optimizers, schedulers and scalers of `restore`.
/// Verifies the checksums of the blocks that the rank reads. Loads optimizers, schedulers and
/// scalers into copies.
///
/// # Errors
///
/// [`CheckpointError::Mismatch`] with every difference, and the errors of reading files.
pub(super) fn prepare(
    restore: &Restore<'_>,
    reader: Arc<CheckpointReader>,
    rank: usize,
) -> Result<Prepared, CheckpointError> {
    let manifest = reader.manifest();
    let values = values(manifest, &reader.name())?;
    let (mut differences, mut left) = (Vec::new(), Vec::new());
    let mut targets: BTreeMap<&str, Vec<Target<'_>>> = BTreeMap::new();
    for (name, model) in &restore.models {
        let of_model = targets.entry(name).or_insert_with(|| model_targets(&**model, rank));
        let found = manifest.models.get(name).filter(|_| restore.lenient);
        let into = if found.is_some() { &mut left } else { &mut differences };
        compare_model(name, of_model, manifest, into);
        if let Some(found) = found {
            of_model.retain(|target| compare_target(name, target, found).is_empty());
        }
    }
    for (name, optimizer) in &restore.optimizers {
        compare_optimizer(name, optimizer, &targets, manifest, &mut differences)?;
    }
    let schedulers = load_schedulers(restore, manifest, &mut differences);
    let scalers = load_scalers(restore, manifest, &mut differences);
    if !differences.is_empty() {
        return Err(CheckpointError::Mismatch { folder: reader.name(), differences });
    }

    let mut tensors: BTreeMap<String, HashMap<ParamIndex, String>> = BTreeMap::new();
    for (model, targets) in &targets {
        tensors.insert(model.to_string(), verify_model(model, targets, &reader)?);
    }
    let mut optimizers = BTreeMap::new();
    for (name, own) in &restore.optimizers {
        optimizers.insert(name.clone(), load_optimizer(name, own, &targets, &reader)?);
    }
    Ok(Prepared { tensors, optimizers, schedulers, scalers, values, left, reader: reader.clone() })
}

/// Parses the values that the program added. `folder` names the checkpoint in errors.
fn values(manifest: &Manifest, folder: &str) -> Result<BTreeMap<String, Value>, CheckpointError> {
    let value = |(name, text): (&String, &String)| {
        let value = serde_json::from_str(text).map_err(|error| CheckpointError::NotAManifest {
            file: folder.to_string(),
            reason: format!("its value `{name}`: {error}"),
        });
        Ok((name.clone(), value?))
    };
    manifest.values.iter().map(value).collect()
}

fn model_targets(model: &dyn ShardedModel, rank: usize) -> Vec<Target<'_>> {
    let (units, mesh) = (model.schedule().units(), model.schedule().mesh());
    let owners = owners(units, mesh);
    let mut targets = Vec::new();
    model.for_each_param(&mut |LocalParam { id, index, dtype, .. }| {
        let owned = owners.get(&index) == Some(&mesh.shard_rank().index());
        targets.push(Target { id, index, spec: model.spec(index), dtype, rank, owned });
    });
    targets
}

/// Returns a copy of each scheduler with the checkpoint's state.
fn load_schedulers(
    restore: &Restore<'_>,
    manifest: &Manifest,
    differences: &mut Vec<String>,
) -> BTreeMap<String, ModuleLrScheduler> {
    let mut schedulers = BTreeMap::new();
    for (name, own) in &restore.schedulers {
        let Some(numbers) = manifest.schedulers.get(name) else {
            differences.push(format!("missing: scheduler `{name}`"));
            continue;
        };
        match scheduler::with_scalars(own, numbers) {
            Ok(loaded) => _ = schedulers.insert(name.clone(), loaded),
            Err(found) => differences
                .extend(found.into_iter().map(|text| format!("scheduler `{name}`: {text}"))),
        }
    }
    schedulers
}

/// Returns the checkpoint's loss scalers.
fn load_scalers(
    restore: &Restore<'_>,
    manifest: &Manifest,
    differences: &mut Vec<String>,
) -> BTreeMap<String, GradScaler> {
    let mut scalers = BTreeMap::new();
    for name in restore.scalers.keys() {
        let loaded = manifest.scalers.get(name).map(GradScaler::from_scalars);
        match loaded.unwrap_or(Err("it is missing".into())) {
            Ok(loaded) => _ = scalers.insert(name.clone(), loaded),
            Err(found) => differences.push(format!("loss scaler `{name}`: {found}")),
        }
    }
    scalers
}

/// Verifies the checksums of the blocks that this rank reads of a model, and returns the names in
/// the ranks' files.
fn verify_model(
    model: &str,
    targets: &[Target<'_>],
    reader: &CheckpointReader,
) -> Result<HashMap<ParamIndex, String>, CheckpointError> {
    let mut names = HashMap::new();
    for target in targets {
        let path = &target.spec.path;
        let key = model_tensor_name(model, path);
        if !target.spec.range().is_empty() {
            let tensor = &reader.manifest().models[model].tensors[path];
            reader.verify(&key, tensor, &stored_ranges(target.spec, tensor, target.rank))?;
        }
        names.insert(target.index, key);
    }
    Ok(names)
}
