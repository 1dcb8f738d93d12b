//! What each rank found when it compared a state with the model, and the report of all ranks.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::checkpoint::load_report::LoadReport;
use crate::checkpoint::ranks::Ranks;
use crate::error::{CheckpointError, Error};

/// Keys that a rank found when it compared a state with the model. A rank that does not provide the
/// state has found none.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Found {
    /// Keys of parameters that the state has.
    pub(super) loaded: BTreeSet<String>,
    /// Keys of parameters that the state lacks.
    pub(super) missing: BTreeSet<String>,
    /// Keys of the state that the model lacks.
    pub(super) unexpected: BTreeSet<String>,
    /// Keys of the state whose parameters are not selected.
    pub(super) filtered: BTreeSet<String>,
}

impl Found {
    /// Returns the report of what all ranks have found. Every rank calls it and gets the same
    /// result. `what` names the state in the errors of collectives.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] on every rank where some ranks' states have a parameter
    /// that the states of others lack.
    pub(super) fn report(self, ranks: &Ranks, what: &str) -> Result<LoadReport, Error> {
        let all = ranks.exchange(what, self)?;
        let all: Vec<&Found> = all.iter().map(|found| &**found).collect();
        let loaded = union(all.iter().map(|found| &found.loaded));
        let missing = union(all.iter().map(|found| &found.missing));
        let differences: Vec<String> = loaded
            .intersection(&missing)
            .map(|path| {
                let rank = |keys: fn(&Found) -> &BTreeSet<String>| {
                    all.iter().position(|found| keys(found).contains(path)).unwrap_or_default()
                };
                let (has, lacks) = (rank(|found| &found.loaded), rank(|found| &found.missing));
                format!("`{path}`: in the state of rank {has}, missing in that of rank {lacks}")
            })
            .collect();
        if !differences.is_empty() {
            return Err(CheckpointError::StateMismatch { differences }.into());
        }
        Ok(LoadReport {
            loaded: loaded.len(),
            missing: missing.into_iter().collect(),
            unexpected: union(all.iter().map(|found| &found.unexpected)).into_iter().collect(),
            misshapen: Vec::new(),
            filtered: union(all.iter().map(|found| &found.filtered)).into_iter().collect(),
        })
    }
}

/// Returns the keys that any of the sets has.
fn union<'a>(sets: impl Iterator<Item = &'a BTreeSet<String>>) -> BTreeSet<String> {
    sets.flatten().cloned().collect()
}
