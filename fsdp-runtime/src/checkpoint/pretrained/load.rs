//! Loading safetensors files by the model's keys.

use std::collections::BTreeMap;
use std::path::Path;

use super::frozen::FrozenParams;
use super::load_values::{ParamTarget, load_values};
use super::matching::{MatchedTensor, WantedTensor, match_tensors};
use super::options::LoadOptions;
use super::source::Source;
use crate::checkpoint::filter::FilteredParam;
use crate::checkpoint::load_report::LoadReport;
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::state::StateMut;
use crate::error::{Error, LoadError};
use crate::fully_shard::{Fsdp, shard};
use crate::launch::Worker;
use crate::launch::agree::{OnError, agree_result};
use crate::module::{FsdpModule, HookedForward, ParamIndex};
use crate::options::FsdpOptions;
use crate::param_group::plan::{IgnoredParam, Key};
use crate::param_group::{ParamSpec, Placement, Unit};

impl<M: FsdpModule> StateMut<'_, M> {
    /// Loads parameters by their keys: each field's `#[fsdp(key = "..")]`, or else the field's
    /// name.
    ///
    /// `path` is one of:
    ///
    /// - a safetensors file, an index of several, or a folder with `model.safetensors` or
    ///   `model.safetensors.index.json`;
    /// - a file that PyTorch's `torch.save` wrote (`.bin`, `.pt`, `.pth`) since its version 1.6, an
    ///   index of several, or a folder with `pytorch_model.bin` or `pytorch_model.bin.index.json`.
    ///   Keys of dicts within dicts are joined by dots;
    /// - a folder of `torch.distributed.checkpoint`, with `.metadata`.
    ///
    /// The files are memory-mapped, and each rank reads only the elements that it stores. A pickle
    /// is read without running any of its code. Every rank calls it. On an error the model is
    /// unchanged on all ranks.
    ///
    /// # Errors
    ///
    /// [`LoadError`] where a file cannot be read or is in none of these formats, where an index does not fit
    /// the files, or where a pickle imports a name that weights do not need. The same error where the tensors
    /// do not fit the model, with all keys that are missing, unexpected or of the wrong shape, and where a
    /// file has two different tensors for a tied parameter. [`CollectiveError`](crate::errors::CollectiveError)
    /// where another rank has such an error.
    pub fn load_safetensors(
        &mut self,
        path: impl AsRef<Path>,
        options: &LoadOptions,
    ) -> Result<LoadReport, Error> {
        let Fsdp { schedule, keys, ignored, .. } = &*self.model;
        let params = Params { units: schedule.units(), keys, ignored };
        let frozen = FrozenParams::of(self.model);
        let matched = match_files(path.as_ref(), &params, &frozen, options);
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
        let params = Params { units: &plan.units, keys: &plan.keys, ignored: &plan.ignored };
        let matched = match load.filter.is_of_trainable() {
            true => Err(LoadError::Filter { reason: FROZEN.into() }),
            false => match_files(path.as_ref(), &params, &FrozenParams::default(), load),
        };
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

/// Why a filter cannot leave out frozen parameters of a model that is built from files.
const FROZEN: &str = "the frozen parameters of a model that is built from files need values as \
                      well; leave out `with_trainable_only`";

/// The parameters of a model, as construction planned them.
struct Params<'a> {
    units: &'a [Unit],
    keys: &'a BTreeMap<ParamIndex, Key>,
    ignored: &'a [IgnoredParam],
}

impl<'a> Params<'a> {
    /// Returns each parameter with its key and description.
    fn iter(&self) -> impl Iterator<Item = (ParamTarget, &'a Key, &'a ParamSpec)> {
        let Self { units, keys, ignored } = *self;
        let sharded = keys.iter().map(|(&index, key)| {
            (ParamTarget::Sharded(index), key, &units[index.unit].params[index.param])
        });
        let per_rank =
            |param: &'a IgnoredParam| (ParamTarget::PerRank(param.id), &param.key, &param.spec);
        sharded.chain(ignored.iter().map(per_rank))
    }

    /// Returns the parameter that `spec`, of the parameter at `index`, is tied to.
    fn owner(&self, index: ParamIndex, spec: &ParamSpec) -> Option<(&'a Key, &'a ParamSpec)> {
        let Placement::TiedTo(param) = spec.placement else { return None };
        let owner = ParamIndex { param, ..index };
        Some((self.keys.get(&owner)?, &self.units[owner.unit].params[param]))
    }
}

/// Matches the tensors in the files at `path` to a model's parameters.
fn match_files(
    path: &Path,
    params: &Params<'_>,
    frozen: &FrozenParams,
    options: &LoadOptions,
) -> Result<(Vec<(ParamTarget, MatchedTensor)>, LoadReport), LoadError> {
    fn seen<'a>(key: &'a Key, spec: &'a ParamSpec, frozen: bool) -> FilteredParam<'a> {
        FilteredParam { path: &spec.path, key: &key.name, frozen }
    }
    let all = params.iter().map(|(target, key, spec)| seen(key, spec, frozen.contains(target)));
    options.filter.check(all).map_err(|reason| LoadError::Filter { reason })?;
    let source = Source::open(path)?;
    let wanted = params.iter().map(|(target, key, spec)| {
        let wanted = match target {
            ParamTarget::Sharded(index) => {
                let wanted = WantedTensor::of_param(spec, &key.name, key.transposed);
                match params.owner(index, spec) {
                    Some((key, owner)) => wanted.copy_of(&key.name, owner),
                    None => wanted,
                }
            }
            ParamTarget::PerRank(_) => WantedTensor::full(&key.name, &spec.shape, key.transposed),
        };
        (target, wanted.selected(options.filter.selects(&seen(key, spec, frozen.contains(target)))))
    });
    match_tensors(&source, wanted, options)
}
