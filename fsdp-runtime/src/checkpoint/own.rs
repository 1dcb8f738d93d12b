//! Ignored parameters and running statistics in a checkpoint. Each rank has one of its own: where all
//! are alike, one copy is written, as of any other parameter; where they differ, every rank's.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::DType;

use super::manifest::{TensorEntry, model_key, optimizer_key};
use super::model;
use super::optimizer::{self, Names};
use super::ranks::Ranks;
use super::save::Checkpoint;
use crate::error::CheckpointError;
use crate::error::Error;
use crate::param_group::{ParamSpec, Placement};

/// The tensors of ignored parameters that differ between ranks, by their names in a rank's file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Differing(BTreeSet<String>);

impl Differing {
    /// Compares what the ranks have. Every rank calls it.
    pub(crate) fn find(checkpoint: &Checkpoint<'_>, ranks: &Ranks) -> Result<Self, Error> {
        // Models are the same on all ranks.
        if checkpoint.models.values().all(|model| model.ignored().is_empty()) {
            return Ok(Self::default());
        }
        let mine = ranks.settle("ignored parameters", digests(checkpoint))?;
        let all = ranks.exchange("ignored parameters", mine)?;
        let names: BTreeSet<&String> = all.iter().flat_map(|digests| digests.keys()).collect();
        let mut differing = BTreeSet::new();
        for name in names {
            for (rank, digests) in ranks.mesh.world.ranks().zip(&all) {
                let has = |digests: &BTreeMap<String, u64>| match digests.contains_key(name) {
                    true => format!("`{name}`"),
                    false => format!("no `{name}`"),
                };
                let (expected, found) = (has(&all[0]), has(digests));
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

    /// Whether every rank writes its own of a tensor.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.contains(name)
    }
}

/// Where a rank's own copy begins among the elements that a checkpoint has of a tensor. A rank that
/// the saving world did not have goes on with rank 0's, and so does a parameter that was ignored
/// there and is not here.
pub(crate) fn first_element(entry: &ParamSpec, stored: &TensorEntry, rank: usize) -> usize {
    match entry.held {
        Placement::PerRank if rank < stored.copies => rank * stored.numel().unwrap_or(0),
        _ => 0,
    }
}

/// A digest of each tensor of this rank's ignored parameters, and of the optimizers' state of them.
fn digests(checkpoint: &Checkpoint<'_>) -> Result<BTreeMap<String, u64>, CheckpointError> {
    let mut digests = BTreeMap::new();
    for (name, model) in &checkpoint.models {
        let mut own = Vec::new();
        model.visit(&mut |held| {
            let entry = model.entry(held.place);
            if entry.held == Placement::PerRank {
                let data = model::own(held.base);
                let key = model_key(name, &entry.path);
                digests.insert(key, digest(held.dtype, &entry.shape, data.as_bytes()));
                own.push((held.id, &entry.path));
            }
        });
        for (optimizer, saved) in &checkpoint.optimizers {
            for (id, path) in &own {
                let mut names = Names::default();
                let states = optimizer::read(optimizer, saved.optimizer, &[*id], &mut names)?;
                for tensor in states.into_values().flat_map(|state| state.tensors) {
                    let key = optimizer_key(optimizer, name, path, &tensor.name);
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
