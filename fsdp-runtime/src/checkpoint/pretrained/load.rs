//! Loading a safetensors file, or a folder of them, by the model's keys.

use std::collections::BTreeMap;
use std::path::Path;

use super::fill::Target;
use super::fit::{Part, Wanted, fit};
use super::source::Source;
use super::{LoadError, LoadOptions, LoadReport};
use crate::checkpoint::StateMut;
use crate::error::Error;
use crate::fully_shard::init::same_on_all;
use crate::fully_shard::{Fsdp, shard};
use crate::launch::Worker;
use crate::module::ParamIndex;
use crate::module::{FsdpModule, HookedForward};
use crate::options::FsdpOptions;
use crate::param_group::Unit;
use crate::param_group::plan::{IgnoredParam, Key};

impl<M: FsdpModule> StateMut<'_, M> {
    /// Loads parameters by their keys (each field's `#[fsdp(key = "..")]` or name) from a
    /// safetensors file, from an index of several, or from a folder with `model.safetensors` or
    /// `model.safetensors.index.json`. The files are memory-mapped, and each rank reads what it
    /// holds. Every rank calls it; on an error the model is unchanged on all.
    ///
    /// # Errors
    ///
    /// [`LoadError`]: a file cannot be read, is no safetensors file, an index does not fit its
    /// files, or the tensors do not fit the model, with all keys that are missing, unexpected or
    /// misshapen. [`CollectiveError`](crate::CollectiveError) where another rank found one.
    pub fn load_safetensors(
        &mut self,
        path: impl AsRef<Path>,
        options: &LoadOptions,
    ) -> Result<LoadReport, Error> {
        let fitted = open(
            path.as_ref(),
            self.model.engine.units(),
            &self.model.keys,
            &self.model.ignored,
            options,
        );
        let (parts, report) = self.model.same_on_all("the load", fitted.map_err(Error::from))?;
        self.model.fill(parts);
        Ok(report)
    }
}

/// Shards `module` and loads it as [`Fsdp::load_safetensors`] does: the inverse of
/// [`Fsdp::save_pretrained`]. What the file holds is never initialised on any rank, so that the
/// most a rank allocates is its shards and the gather buffers; what it lacks, as `load` allows,
/// is initialised as by [`fully_shard`](crate::fully_shard).
///
/// # Errors
///
/// As [`fully_shard`](crate::fully_shard) and [`Fsdp::load_safetensors`].
pub fn from_pretrained<M: HookedForward>(
    module: M,
    worker: &Worker,
    options: FsdpOptions,
    path: impl AsRef<Path>,
    load: &LoadOptions,
) -> Result<(Fsdp<M>, LoadReport), Error> {
    let mut fitted = None;
    let mut fsdp = shard(module, worker, options, |plan| {
        let found = open(path.as_ref(), &plan.units, &plan.keys, &plan.ignored, load);
        let (parts, report) = same_on_all(worker, found.map_err(Error::from))?;
        let place = |(target, _): &(Target, Part)| match target {
            Target::Parameter(place) => Some(*place),
            Target::Local(_) => None,
        };
        let places = parts.iter().filter_map(place).collect();
        fitted = Some((parts, report));
        Ok(places)
    })?;
    let (parts, report) = fitted.unwrap_or_default();
    fsdp.fill(parts);
    Ok((fsdp, report))
}

/// The parts of a file that go to each place.
fn open(
    path: &Path,
    units: &[Unit],
    keys: &BTreeMap<ParamIndex, Key>,
    ignored: &[IgnoredParam],
    options: &LoadOptions,
) -> Result<(Vec<(Target, Part)>, LoadReport), LoadError> {
    let source = Source::safetensors(path)?;
    let sharded = keys.iter().map(|(&place, key)| {
        let entry = &units[place.unit].entries[place.entry];
        (Target::Parameter(place), Wanted::of(entry, &key.name, key.transposed))
    });
    let local = ignored.iter().map(|IgnoredParam { id, key, entry }| {
        (Target::Local(*id), Wanted::whole(&key.name, &entry.shape, key.transposed))
    });
    fit(&source, sharded.chain(local), options)
}
