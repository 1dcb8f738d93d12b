//! The steps of a load: all ranks check, and then all ranks change their models.

use std::path::Path;
use std::sync::Arc;

use super::builder::{Restore, Restored};
use super::prepare::{Prepared, prepare};
use super::target::stored_ranges;
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::reader::CheckpointReader;
use crate::checkpoint::state::StateMut;
use crate::error::Error;
use crate::launch::Worker;
use crate::module::FsdpModule;

impl Restore<'_> {
    /// Loads a checkpoint folder, saved at any world size. Every rank calls it. If the checkpoint
    /// does not fit, or if its files are damaged, nothing is changed.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`](crate::errors::CheckpointError) on the ranks that found the error, with every
    /// difference in one error, and
    /// [`CollectiveError::PeerFailed`](crate::errors::CollectiveError::PeerFailed) on the others.
    pub fn load(self, worker: &Worker, folder: impl AsRef<Path>) -> Result<Restored, Error> {
        load(self, &Ranks::from(worker), folder.as_ref())
    }
}

impl<M: FsdpModule> StateMut<'_, M> {
    /// Loads the model named `model` of a checkpoint folder, saved at any world size. Every rank
    /// calls it. The model is unchanged where the checkpoint does not fit or its files are damaged.
    ///
    /// # Errors
    ///
    /// Those of [`Restore::load`].
    pub fn load(&mut self, folder: impl AsRef<Path>) -> Result<Restored, Error> {
        let ranks = Ranks::from(&*self.model);
        load(Restore::new().with_model("model", self.model), &ranks, folder.as_ref())
    }
}

fn load(restore: Restore<'_>, ranks: &Ranks, path: &Path) -> Result<Restored, Error> {
    let prepared = CheckpointReader::open(path)
        .and_then(|reader| prepare(&restore, Arc::new(reader), ranks.index()));
    let Prepared { reader, mut tensors, optimizers, schedulers, scalers, values, left } =
        ranks.agree("a checkpoint's checks", prepared)?;
    let manifest = reader.manifest();
    // All ranks have passed all checks. Changes begin here.
    let mut outcome = Ok(());
    for (name, model) in restore.models {
        let entry = &manifest.models[&name];
        let states = &entry.random;
        if let Some(state) = states.get(&ranks.index()).or_else(|| states.get(&0)) {
            model.schedule().random().restore(state.seed, state.step);
        }
        let mut keys = tensors.remove(&name).unwrap_or_default();
        let loaded = keys.keys().copied().collect();
        model.replace_values(&loaded, &mut |index, spec, _| {
            let key = keys.remove(&index)?;
            let tensor = entry.tensors.get(&spec.path)?;
            let ranges = stored_ranges(spec, tensor, ranks.index());
            let data = reader.data(&key, tensor, &ranges, spec.base_shape());
            data.map_err(|error| outcome = Err(error)).ok()
        });
    }
    for (name, optimizer) in restore.optimizers {
        if let Some(loaded) = optimizers.get(&name) {
            *optimizer.optimizer = loaded.clone();
        }
    }
    for (name, scheduler) in restore.schedulers {
        if let Some(loaded) = schedulers.get(&name) {
            *scheduler = loaded.clone();
        }
    }
    for (name, scaler) in restore.scalers {
        if let Some(loaded) = scalers.get(&name) {
            *scaler = loaded.clone();
        }
    }
    // A file that passed the checks may have become unreadable since. All ranks return that error.
    ranks.agree("a checkpoint's elements", outcome)?;
    Ok(Restored { progress: manifest.progress, world_size: manifest.world_size, values, left })
}
