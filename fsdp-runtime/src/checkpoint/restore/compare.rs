//! Differences between a checkpoint and the models, optimizers and schedulers to load it into.

use std::collections::BTreeMap;
use std::fmt::Debug;

use super::builder::LoadedOptimizer;
use super::target::Target;
use crate::checkpoint::manifest::{Dtype, Manifest, ModelEntry, TensorEntry};
use crate::checkpoint::optimizer_state::{self, StateSchema};
use crate::error::CheckpointError;
use crate::layout::StorageType;

/// Adds the differences between a model's parameters and those of the checkpoint.
pub(super) fn compare_model(
    name: &str,
    targets: &[Target<'_>],
    manifest: &Manifest,
    differences: &mut Vec<String>,
) {
    let Some(model) = manifest.models.get(name) else {
        return differences.push(format!("missing: model `{name}`"));
    };
    differences.extend(targets.iter().flat_map(|target| compare_target(name, target, model)));
    let known = |path: &String| targets.iter().any(|target| target.spec.path == *path);
    let unexpected = model.tensors.keys().filter(|path| !known(path));
    differences.extend(unexpected.map(|path| format!("unexpected: `{path}` of model `{name}`")));
}

/// Returns the differences between a parameter and that of a model in the checkpoint.
pub(super) fn compare_target(name: &str, target: &Target<'_>, model: &ModelEntry) -> Vec<String> {
    let path = &target.spec.path;
    let Some(found) = model.tensors.get(path) else {
        return vec![format!("missing: `{path}` of model `{name}`")];
    };
    let mut differences = Vec::new();
    let expected = target.spec.whole_shape();
    if found.shape != expected {
        differences.push(format!(
            "different shape: `{path}` of model `{name}` is {:?} in the checkpoint, \
             {expected:?} in the model",
            found.shape
        ));
    }
    if found.codes != target.spec.storage.codes() {
        let stored = |dtype: &dyn Debug, codes: Option<StorageType>| match codes {
            Some(codes) => codes.to_string(),
            None => format!("{dtype:?}"),
        };
        differences.push(format!(
            "different storage: `{path}` of model `{name}` is {} in the checkpoint, {} in the \
             model",
            stored(&found.dtype, found.codes),
            stored(&target.dtype, target.spec.storage.codes()),
        ));
    } else if found.codes.is_none() && Dtype::of(target.dtype) != Some(found.dtype) {
        differences.push(format!(
            "different dtype: `{path}` of model `{name}` is {:?} in the checkpoint, {:?} in \
             the model",
            found.dtype, target.dtype
        ));
    }
    differences
}

/// Adds the differences between an optimizer's state in the checkpoint and what the optimizer
/// takes.
///
/// # Errors
///
/// [`CheckpointError::Record`] for state that Burn cannot write or read.
pub(super) fn compare_optimizer(
    name: &str,
    own: &LoadedOptimizer<'_>,
    targets: &BTreeMap<&str, Vec<Target<'_>>>,
    manifest: &Manifest,
    differences: &mut Vec<String>,
) -> Result<(), CheckpointError> {
    let Some(found) = manifest.optimizers.get(name) else {
        differences.push(format!("missing: optimizer `{name}`"));
        return Ok(());
    };
    let mut schemas = Vec::new();
    for (model, parameters) in &found.models {
        let Some(targets) = targets.get(model.as_str()) else {
            differences
                .push(format!("optimizer `{name}` has state of model `{model}`; load it as well"));
            continue;
        };
        for target in targets {
            let path = &target.spec.path;
            let Some(state) = parameters.get(path) else { continue };
            for (tensor, stored) in &state.tensors {
                if target.state_ranges(stored, own.whole).is_none() {
                    differences.push(format!(
                        "optimizer `{name}`: `{tensor}` of `{path}` is {:?}, which cannot be \
                         sharded; wrap the optimizer in `WholeParam` and add it with \
                         `with_whole_optimizer`",
                        stored.shape
                    ));
                }
            }
            let dtype =
                |(name, stored): (&String, &TensorEntry)| (name.clone(), stored.dtype.burn());
            schemas.push(StateSchema {
                id: target.id,
                path: path.clone(),
                rank: target.spec.shape.len(),
                scalars: state.scalars.clone(),
                tensors: state.tensors.iter().map(dtype).collect(),
            });
        }
    }
    differences.extend(optimizer_state::differences(name, own.optimizer, &schemas)?);
    Ok(())
}
