//! `save_pretrained`: the full state in the names and layouts of the framework it came from.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use burn::module::{Param, ParamId};
use burn::tensor::{DispatchTensor, Tensor, TensorData};

use super::fill::Target;
use super::shards::{Shard, ToWrite, cut, publish};
use super::source::is_plain;
use super::write::{Complete, Header, NewFile, failed};
use super::{INDEX, SaveError, SavePretrained};
use crate::checkpoint::State;
use crate::error::Error;
use crate::fully_shard::Fsdp;
use crate::layout::Rank;
use crate::module::{FsdpModule, ParamVisitor};
use crate::module::{ParamIndex, Sharded};
use crate::param_group::Placement as EntryHeld;
use crate::param_group::plan::IgnoredParam;

impl<M: FsdpModule> State<'_, M> {
    /// Writes the full state to a folder that transformers' `from_pretrained` loads:
    /// `model.safetensors`, or numbered files with an index, under each parameter's key, and the
    /// additional files. A weight that other places are tied to is written once, under its owner's
    /// key, as transformers does.
    ///
    /// Every rank calls it. Parameters are gathered one at a time to rank 0, which writes them as
    /// they come, so that no rank holds more than its shards and one parameter. Files are
    /// written beside and take their names when all are complete and flushed to disk: one killed
    /// before leaves what was there, and perhaps files that end in `.tmp`. Only where several files replace several of the same names
    /// can a kill between renames leave the folder without an index, which a load then reports.
    ///
    /// Of what each rank has for itself, ignored parameters and the running statistics of a
    /// `BatchNorm`, rank 0's is written.
    ///
    /// # Errors
    ///
    /// [`SaveError`] on the rank that found it, [`CollectiveError`](crate::CollectiveError) on the
    /// others.
    pub fn save_pretrained(
        &self,
        folder: impl AsRef<Path>,
        options: &SavePretrained,
    ) -> Result<(), Error> {
        let folder = folder.as_ref();
        let plan = self.model.plan_save(folder, options).map_err(Error::from);
        let shards = self.model.same_on_all("the plan of a save", plan)?;
        let Placement { bases, locals } = self.model.held();
        let first = self.model.mesh().rank == Rank::ZERO;
        let mut written: Result<Vec<Complete>, SaveError> = Ok(Vec::new());
        for shard in &shards {
            let mut file = (first && written.is_ok())
                .then(|| NewFile::safetensors(&folder.join(&shard.file), &shard.headers()));
            for tensor in &shard.tensors {
                // After a failure of its own rank 0 still takes part: the others wait for it.
                let writes = matches!(file, Some(Ok(_)));
                let full = match tensor.from {
                    Target::Parameter(place) => {
                        self.model.engine.full(place, bases[&place].clone(), writes)?
                    }
                    Target::Local(id) => locals.get(&id).cloned(),
                };
                if let (Some(full), Some(Ok(out))) = (full, &mut file)
                    && let Err(error) = write(tensor, out, &full, options)
                {
                    file = Some(Err(error));
                }
            }
            if let Some(file) = file {
                written = written.and_then(|mut complete| {
                    complete.push(file?.complete()?);
                    Ok(complete)
                });
            }
        }
        let published = match first {
            true => written.and_then(|files| publish(folder, &shards, files, &options.files)),
            false => Ok(()),
        };
        self.model.same_on_all("a save", published.map_err(Error::from))
    }
}

impl<M: FsdpModule> Fsdp<M> {
    /// The files to write, in the order of writing, once all is known to be in order.
    fn plan_save(
        &self,
        folder: &Path,
        options: &SavePretrained,
    ) -> Result<Vec<Shard<Target>>, SaveError> {
        for (name, _) in &options.files {
            let reason = match name.as_str() {
                _ if !is_plain(name) => "it must lie in the folder itself",
                INDEX => "it is the index of the weights",
                _ if name.ends_with(".safetensors") => "it is a file of weights",
                _ => continue,
            };
            return Err(SaveError::FileName { name: name.clone(), reason });
        }
        let mut tensors = Vec::new();
        let mut named = BTreeMap::new();
        let sharded = self.keys.iter().filter_map(|(&place, key)| {
            let entry = &self.engine.units()[place.unit].entries[place.entry];
            let owns = !matches!(entry.held, EntryHeld::TiedTo(_));
            owns.then_some((Target::Parameter(place), key, &entry.path, &entry.shape))
        });
        let local = self.ignored.iter().map(|IgnoredParam { id, key, entry }| {
            (Target::Local(*id), key, &entry.path, &entry.shape)
        });
        for (from, key, path, shape) in sharded.chain(local) {
            if let Some(first) = named.insert(&key.name, path) {
                let (first, second): (&String, &String) = (first, path);
                return Err(SaveError::DuplicateKey {
                    key: key.name.clone(),
                    first: first.clone(),
                    second: second.clone(),
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
            let dtype = options.dtype.stored();
            let bytes = (shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64;
            let header = Header { name: key.name.clone(), shape, dtype, bytes };
            tensors.push(ToWrite { from, header, transpose });
        }
        if self.mesh().rank == Rank::ZERO {
            std::fs::create_dir_all(folder)
                .map_err(|error| failed(&folder.display().to_string(), &error))?;
        }
        Ok(cut(tensors, options.max_shard_size))
    }

    /// What this rank holds.
    pub(super) fn held(&self) -> Placement {
        struct Read<'a> {
            held: Placement,
            ignored: &'a [IgnoredParam],
            first: bool,
        }
        impl ParamVisitor for Read<'_> {
            fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if let Some(sharded) = Sharded::of(param) {
                    self.held.bases.insert(sharded.place, param.base().into_dispatch());
                } else if self.first && self.ignored.iter().any(|ignored| ignored.id == param.id) {
                    let data = param.base().into_data().convert::<f32>();
                    self.held.locals.insert(param.id, data);
                }
            }

            fn buffer<const D: usize>(&mut self, buffer: &Param<Tensor<D>>) {
                self.param(buffer);
            }
        }
        let first = self.mesh().rank == Rank::ZERO;
        let mut read = Read { held: Placement::default(), ignored: &self.ignored, first };
        self.module.visit_params(&mut read);
        read.held
    }
}

/// What a rank holds of each parameter.
#[derive(Default)]
pub(super) struct Placement {
    pub(super) bases: HashMap<ParamIndex, DispatchTensor>,
    /// Ignored parameters and running statistics, on rank 0 alone: its own are written.
    locals: HashMap<ParamId, TensorData>,
}

fn write(
    tensor: &ToWrite<Target>,
    file: &mut NewFile,
    full: &TensorData,
    options: &SavePretrained,
) -> Result<(), SaveError> {
    let elements = full.as_slice::<f32>().map_err(|error| SaveError::Io {
        file: tensor.header.name.clone(),
        reason: format!("its elements are no f32: {error:?}"),
    })?;
    file.tensor(elements, tensor.transpose, options.dtype)
}
