//! Ignored parameters and running statistics, of which each rank has its own values. Where the
//! values are equal on all ranks the checkpoint has one copy; where they differ it has one copy per
//! rank.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::DType;

use super::contents::Checkpoint;
use crate::checkpoint::manifest::{model_tensor_name, optimizer_tensor_name};
use crate::checkpoint::optimizer_state::{self, StateNames};
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::sharded_model::ignored_values;
use crate::error::{CheckpointError, Error};
use crate::param_group::Placement;

/// The tensors of ignored parameters whose values differ between ranks, by their names in a rank's
/// file.
#[derive(Clone, Debug, Default)]
pub(super) struct DifferingTensors(BTreeSet<String>);

impl DifferingTensors {
    /// Compares the values of all ranks. Every rank calls it.
    pub(super) fn find(checkpoint: &Checkpoint<'_>, ranks: &Ranks) -> Result<Self, Error> {
        // All ranks have the same ignored parameters, so that all return here or none.
        if checkpoint.models.values().all(|model| model.ignored().is_empty()) {
            return Ok(Self::default());
        }
        let own = ranks.agree("ignored parameters", digests(checkpoint))?;
        let all = ranks.exchange("ignored parameters", own)?;
        let names: BTreeSet<&String> = all.iter().flat_map(|digests| digests.keys()).collect();
        let mut differing = BTreeSet::new();
        for name in names {
            for (rank, digests) in ranks.mesh.world.ranks().zip(&all) {
                let presence = |digests: &BTreeMap<String, u64>| match digests.contains_key(name) {
                    true => format!("`{name}`"),
                    false => format!("no `{name}`"),
                };
                let (expected, found) = (presence(&all[0]), presence(digests));
                if found != expected {
                    return Err(CheckpointError::RanksDiffer { rank, expected, found }.into());
                }
            }
            if all.iter().any(|digests| digests[name] != all[0][name]) {
                differing.insert(name.clone());
            }
        }
        Ok(Self(differing))
    }

    /// Returns whether every rank writes its own copy of a tensor.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.0.contains(name)
    }
}

/// Returns a digest of each tensor of this rank's ignored parameters and of the optimizers' state
/// for them, by the tensor's name in a rank's file.
fn digests(checkpoint: &Checkpoint<'_>) -> Result<BTreeMap<String, u64>, CheckpointError> {
    let mut digests = BTreeMap::new();
    for (name, model) in &checkpoint.models {
        let mut ignored = Vec::new();
        model.for_each_param(&mut |param| {
            let spec = model.spec(param.index);
            if spec.held == Placement::PerRank {
                let data = ignored_values(param.base);
                let key = model_tensor_name(name, &spec.path);
                digests.insert(key, digest(param.dtype, &spec.shape, data.as_bytes()));
                ignored.push((param.id, &spec.path));
            }
        });
        for (optimizer, saved) in &checkpoint.optimizers {
            for (id, path) in &ignored {
                let mut names = StateNames::default();
                let states = optimizer_state::read(optimizer, saved.optimizer, &[*id], &mut names)?;
                for tensor in states.into_values().flat_map(|state| state.tensors) {
                    let key = optimizer_tensor_name(optimizer, name, path, &tensor.name);
                    let digest = digest(tensor.dtype, &tensor.shape, &tensor.bytes);
                    digests.insert(key, digest);
                }
            }
        }
    }
    Ok(digests)
}

fn digest(dtype: DType, shape: &[usize], bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (format!("{dtype:?}"), shape, bytes).hash(&mut hasher);
    hasher.finish()
}
