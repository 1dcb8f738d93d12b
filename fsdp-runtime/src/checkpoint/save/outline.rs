//! This rank's part of the manifest before tensors are added.

use std::collections::BTreeMap;

use super::contents::Checkpoint;
use crate::checkpoint::manifest::{
    KeyEntry, Manifest, MeshShape, ModelEntry, RandomState, UnitEntry,
};
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::sharded_model::ShardedModel;
use crate::layout::WorldSize;
use crate::param_group::plan::Key;
use crate::param_group::{ParamSpec, Placement};

/// Returns this rank's part of the manifest without tensors.
pub(super) fn outline(checkpoint: &Checkpoint<'_>, ranks: &Ranks) -> Manifest {
    let mut manifest = Manifest::new(ranks.mesh.world, checkpoint.progress);
    for (name, model) in &checkpoint.models {
        if model.schedule().mesh().tensor_size() != WorldSize::ONE {
            manifest.allow_splits();
        }
        manifest.models.insert(name.clone(), model_outline(*model, ranks.index()));
    }
    for name in checkpoint.optimizers.keys() {
        manifest.optimizers.insert(name.clone(), Default::default());
    }
    manifest.schedulers = checkpoint.schedulers.clone();
    manifest.scalers = checkpoint.scalers.clone();
    manifest.values = checkpoint.values.clone();
    manifest
}

fn model_outline(model: &dyn ShardedModel, rank: usize) -> ModelEntry {
    let schedule = model.schedule();
    let (mesh, random) = (schedule.mesh(), schedule.random());
    let units = schedule.units().iter().map(|unit| UnitEntry {
        path: unit.path.clone(),
        level: unit.level,
        parameters: unit.params.iter().map(|spec| spec.path.clone()).collect(),
    });
    ModelEntry {
        strategy: schedule.strategy().to_string(),
        mesh: MeshShape {
            replicate: mesh.replicas().size(),
            shard: mesh.shard_size().size(),
            tensor: mesh.tensor_size().size(),
        },
        units: units.collect(),
        tensors: BTreeMap::new(),
        random: [(rank, RandomState { seed: random.seed(), step: random.step() })].into(),
        keys: keys(model),
    }
}

/// Returns the name and layout of each parameter for which these differ from the module's.
fn keys(model: &dyn ShardedModel) -> BTreeMap<String, KeyEntry> {
    let sharded = model.keys().iter().map(|(index, key)| (model.spec(*index), key));
    let ignored = model.ignored().iter().map(|ignored| (&ignored.spec, &ignored.key));
    let entry = |(spec, key): (&ParamSpec, &Key)| {
        let differs = key.transposed || key.name != spec.path;
        let owns = !matches!(spec.placement, Placement::TiedTo(_));
        let Key { name, transposed } = key.clone();
        (differs && owns).then(|| (spec.path.clone(), KeyEntry { name, transposed }))
    };
    sharded.chain(ignored).filter_map(entry).collect()
}
