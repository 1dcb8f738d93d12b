//! Saving the full state in the names and layouts of the framework that the model comes from.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::TensorData;

use super::file_names::{INDEX, is_plain};
use super::frozen::FrozenParams;
use super::load_values::ParamTarget;
use super::local_values::LocalValues;
use super::merged_adapters::MergedAdapters;
use super::options::SavePretrained;
use super::safetensors_file::{CompleteFile, NewFile, TensorHeader, save_error};
use super::weights_files::{TensorToWrite, WeightsFile, publish, split_into_files};
use crate::checkpoint::filter::FilteredParam;
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::state::State;
use crate::error::{Error, SaveError};
use crate::fully_shard::Fsdp;
use crate::layout::Rank;
use crate::module::FsdpModule;
use crate::param_group::Placement;
use crate::param_group::plan::{IgnoredParam, Key};

impl<M: FsdpModule> State<'_, M> {
    /// Writes the full state to a folder that transformers' `from_pretrained` loads:
    /// `model.safetensors`, or numbered files with an index, and the additional files of `options`.
    /// Each tensor is named by the parameter's key. A tied weight is written once, under the
    /// owner's key, as transformers does.
    ///
    /// Every rank calls it. Parameters are gathered to rank 0 one at a time, and written before the
    /// next one is gathered. So no rank holds more than its shards and one parameter. Ignored
    /// parameters and running statistics, of which each rank has its own values, are rank 0's.
    ///
    /// The files are written under temporary names, and renamed when all are complete and flushed
    /// to disk. A save that is interrupted earlier leaves the folder as it was, and perhaps files
    /// that end in `.tmp`. If several files replace several of the same names, an interruption
    /// between the renames can leave the folder without an index; a load reports that.
    ///
    /// # Errors
    ///
    /// [`SaveError`] on the rank that found it, [`CollectiveError`](crate::errors::CollectiveError) on the
    /// others.
    pub fn save_pretrained(
        &self,
        folder: impl AsRef<Path>,
        options: &SavePretrained,
    ) -> Result<(), Error> {
        let (folder, ranks) = (folder.as_ref(), Ranks::from(self.model));
        let adapters = match options.merged_adapters {
            true => MergedAdapters::of(self.model),
            false => Ok(MergedAdapters::default()),
        };
        let plan = adapters.and_then(|adapters| {
            Ok((plan_files(self.model, folder, &adapters, options)?, adapters))
        });
        let (weights, adapters) = ranks.agree("the plan of a save", plan)?;
        let values = Values { local: LocalValues::of(self.model), adapters };
        let mut written: Result<Vec<CompleteFile>, SaveError> = Ok(Vec::new());
        for file in &weights {
            let out = (ranks.leads() && written.is_ok())
                .then(|| NewFile::safetensors(&folder.join(&file.name), &file.headers()));
            if let Some(out) = write_file(self.model, &values, file, out, options)? {
                written = written.and_then(|mut complete| {
                    complete.push(out?.complete()?);
                    Ok(complete)
                });
            }
        }
        let published = match ranks.leads() {
            true => written.and_then(|files| publish(folder, &weights, files, &options.files)),
            false => Ok(()),
        };
        ranks.agree("a save", published)
    }
}

/// What a save reads.
pub(super) struct Values {
    /// This rank's part of each parameter.
    pub(super) local: LocalValues,
    /// Adapters that are added to their matrices.
    pub(super) adapters: MergedAdapters,
}

impl Values {
    /// Gathers a parameter, without its adapter. Returns `None` on ranks that do not write.
    fn gather<M: FsdpModule>(
        &self,
        model: &Fsdp<M>,
        param: ParamTarget,
        writes: bool,
    ) -> Result<Option<TensorData>, Error> {
        match param {
            ParamTarget::Sharded(index) => {
                model.schedule.full(index, self.local.sharded[&index].clone(), writes)
            }
            ParamTarget::PerRank(id) => Ok(self.local.per_rank.get(&id).cloned()),
        }
    }
}

/// Gathers the tensors of one file and appends them to `out`, which is `None` on ranks that do not
/// write. After an error in `out`, rank 0 still takes part in the gathers, since the other ranks
/// wait for it.
pub(super) fn write_file<M: FsdpModule>(
    model: &Fsdp<M>,
    values: &Values,
    file: &WeightsFile<ParamTarget>,
    mut out: Option<Result<NewFile, SaveError>>,
    options: &SavePretrained,
) -> Result<Option<Result<NewFile, SaveError>>, Error> {
    for tensor in &file.tensors {
        let writes = matches!(out, Some(Ok(_)));
        let mut full = values.gather(model, tensor.source, writes)?.map(Ok);
        if let Some(adapter) = values.adapters.get(tensor.source) {
            let a = values.gather(model, adapter.a, writes)?;
            let b = values.gather(model, adapter.b, writes)?;
            if let (Some(Ok(matrix)), Some(a), Some(b)) = (full.take(), a, b) {
                full = Some(adapter.add(matrix, [&a, &b]));
            }
        }
        if let (Some(full), Some(Ok(new))) = (full, &mut out)
            && let Err(error) = full
                .map_err(|reason| SaveError::Io { file: tensor.header.name.clone(), reason })
                .and_then(|full| write_tensor(tensor, new, &full, options))
        {
            out = Some(Err(error));
        }
    }
    Ok(out)
}

fn write_tensor(
    tensor: &TensorToWrite<ParamTarget>,
    file: &mut NewFile,
    full: &TensorData,
    options: &SavePretrained,
) -> Result<(), SaveError> {
    let elements = full.as_slice::<f32>().map_err(|error| SaveError::Io {
        file: tensor.header.name.clone(),
        reason: format!("its elements are not f32: {error:?}"),
    })?;
    file.tensor(elements, tensor.transpose, options.dtype)
}

/// Returns the files to write, in order, after checking all names. Rank 0 creates the folder.
fn plan_files<'a, M: FsdpModule>(
    model: &'a Fsdp<M>,
    folder: &Path,
    adapters: &MergedAdapters,
    options: &SavePretrained,
) -> Result<Vec<WeightsFile<ParamTarget>>, SaveError> {
    check_file_names(options)?;
    let mut tensors = Vec::new();
    let mut names: BTreeMap<&String, &String> = BTreeMap::new();
    let sharded = model.keys.iter().filter_map(|(&index, key)| {
        let spec = &model.schedule.units()[index.unit].params[index.param];
        let owns = !matches!(spec.placement, Placement::TiedTo(_));
        owns.then(|| (ParamTarget::Sharded(index), key, &spec.path, spec.whole_shape()))
    });
    let ignored = model.ignored.iter().map(|IgnoredParam { id, key, spec: entry }| {
        (ParamTarget::PerRank(*id), key, &entry.path, entry.shape.clone())
    });
    let frozen = match options.filter.is_of_trainable() {
        true => FrozenParams::of(model),
        false => FrozenParams::default(),
    };
    let seen = |(target, key, path, _): &(_, &'a Key, &'a String, _)| FilteredParam {
        path,
        key: &key.name,
        frozen: frozen.contains(*target) && adapters.get(*target).is_none(),
    };
    let all = sharded.chain(ignored).filter(|(target, ..)| !adapters.has_factor(*target));
    let all: Vec<_> = all.collect();
    let checked = options.filter.check(all.iter().map(seen));
    checked.map_err(|reason| SaveError::Filter { reason })?;
    for param in all.into_iter().filter(|param| options.filter.selects(&seen(param))) {
        let (source, key, path, shape) = param;
        if let Some(first) = names.insert(&key.name, path) {
            return Err(SaveError::DuplicateKey {
                key: key.name.clone(),
                first: first.clone(),
                second: path.clone(),
            });
        }
        let transpose = match shape[..] {
            [rows, columns] if key.transposed => Some([rows, columns]),
            _ => None,
        };
        let mut shape = shape.clone();
        if transpose.is_some() {
            shape.reverse();
        }
        let dtype = options.dtype.safetensors();
        let bytes = (shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64;
        let header = TensorHeader { name: key.name.clone(), shape, dtype, bytes };
        tensors.push(TensorToWrite { source, header, transpose });
    }
    if model.schedule.world_mesh().rank == Rank::ZERO {
        std::fs::create_dir_all(folder)
            .map_err(|error| save_error(&folder.display().to_string(), &error))?;
    }
    Ok(split_into_files(tensors, options.max_shard_size))
}

/// Checks that the additional files lie in the folder and have no name of a weights file.
fn check_file_names(options: &SavePretrained) -> Result<(), SaveError> {
    for (name, _) in &options.files {
        let reason = match name.as_str() {
            _ if !is_plain(name) => "it must lie in the folder itself",
            INDEX => "it is the index of the weights",
            _ if name.ends_with(".safetensors") => "it is a file of weights",
            _ => continue,
        };
        return Err(SaveError::FileName { name: name.clone(), reason });
    }
    Ok(())
}
