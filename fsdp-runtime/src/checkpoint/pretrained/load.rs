//! Loading safetensors files by the model's keys.

use std::collections::BTreeMap;
use std::path::Path;

use super::load_values::{ParamTarget, load_values};
use super::matching::{MatchedTensor, WantedTensor, match_tensors};
use super::options::{LoadOptions, LoadReport};
use super::source::Source;
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::state::StateMut;
use crate::error::{Error, LoadError};
use crate::fully_shard::{Fsdp, shard};
use crate::launch::Worker;
use crate::launch::agree::{OnError, agree_result};
use crate::module::{FsdpModule, HookedForward, ParamIndex};
use crate::options::FsdpOptions;
use crate::param_group::Unit;
use crate::param_group::plan::{IgnoredParam, Key};

impl<M: FsdpModule> StateMut<'_, M> {
    /// Loads parameters by their keys: each field's `#[fsdp(key = "..")]`, or else the field's
    /// name.
    ///
    /// `path` is a safetensors file, an index of several, or a folder with `model.safetensors` or
    /// `model.safetensors.index.json`. The files are memory-mapped, and each rank reads only the
    /// elements that it stores. Every rank calls it. On an error the model is unchanged on all
    /// ranks.
    ///
    /// # Errors
    ///
    /// [`LoadError`] where a file cannot be read or is no safetensors file, or where an index does
    /// not fit the files. The same error where the tensors do not fit the model, with all keys that
    /// are missing, unexpected or of the wrong shape. [`CollectiveError`](crate::CollectiveError)
    /// where another rank has such an error.
    pub fn load_safetensors(
        &mut self,
        path: impl AsRef<Path>,
        options: &LoadOptions,
    ) -> Result<LoadReport, Error> {
        let Fsdp { schedule, keys, ignored, .. } = &*self.model;
        let matched = match_files(path.as_ref(), schedule.units(), keys, ignored, options);
        let (matched, report) = Ranks::from(&*self.model).agree("the load", matched)?;
        load_values(self.model, matched);
        Ok(report)
    }
}

/// Shards `module` and loads it as [`StateMut::load_safetensors`] does: the inverse of
/// [`State::save_pretrained`](crate::checkpoint::State::save_pretrained).
///
/// Parameters that the file has are never initialised on any rank, so that a rank allocates no more
/// than its shards and the gather buffers. Parameters that the file lacks, as `load` allows, are
/// initialised as by [`fully_shard`](crate::fully_shard).
///
/// # Errors
///
/// Those of [`fully_shard`](crate::fully_shard) and [`StateMut::load_safetensors`].
pub fn from_pretrained<M: HookedForward>(
    module: M,
    worker: &Worker,
    options: FsdpOptions,
    path: impl AsRef<Path>,
    load: &LoadOptions,
) -> Result<(Fsdp<M>, LoadReport), Error> {
    let mut loaded = None;
    let mut fsdp = shard(module, worker, options, |plan| {
        let matched = match_files(path.as_ref(), &plan.units, &plan.keys, &plan.ignored, load);
        let (matched, report) =
            agree_result(worker.comm(), "the load", matched, OnError::FailWorld)?;
        let index = |(target, _): &(ParamTarget, MatchedTensor)| match target {
            ParamTarget::Sharded(index) => Some(*index),
            ParamTarget::PerRank(_) => None,
        };
        let indices = matched.iter().filter_map(index).collect();
        loaded = Some((matched, report));
        Ok(indices)
    })?;
    let (matched, report) = loaded.unwrap_or_default();
    load_values(&mut fsdp, matched);
    Ok((fsdp, report))
}

/// Matches the tensors in the files at `path` to a model's parameters.
fn match_files(
    path: &Path,
    units: &[Unit],
    keys: &BTreeMap<ParamIndex, Key>,
    ignored: &[IgnoredParam],
    options: &LoadOptions,
) -> Result<(Vec<(ParamTarget, MatchedTensor)>, LoadReport), LoadError> {
    let source = Source::safetensors(path)?;
    let sharded = keys.iter().map(|(&index, key)| {
        let spec = &units[index.unit].params[index.param];
        let wanted = WantedTensor::of_param(spec, &key.name, key.transposed);
        (ParamTarget::Sharded(index), wanted)
    });
    let ignored = ignored.iter().map(|IgnoredParam { id, key, spec: entry }| {
        let wanted = WantedTensor::full(&key.name, &entry.shape, key.transposed);
        (ParamTarget::PerRank(*id), wanted)
    });
    match_tensors(&source, sharded.chain(ignored), options)
}
