//! `save_pretrained`: the full state in the names and layouts of the framework it came from.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use burn::module::{Param, ParamId};
use burn::tensor::{DispatchTensor, Tensor, TensorData};
use serde_json::json;

use super::fill::Target;
use super::source::is_plain;
use super::write::{Complete, Header, NewFile, failed, whole};
use super::{INDEX, SINGLE, SaveError, SavePretrained};
use crate::error::Error;
use crate::fully_shard::Fsdp;
use crate::group::Held as EntryHeld;
use crate::mesh::Rank;
use crate::param::{Place, Sharded};
use crate::plan::IgnoredParam;
use crate::unit::{FsdpModule, Walk};

impl<M: FsdpModule> Fsdp<M> {
    /// Writes the full state to a folder that transformers' `from_pretrained` loads:
    /// `model.safetensors`, or numbered files with an index, under each parameter's key, and the
    /// additional files. A weight that other places are tied to is written once, under its owner's
    /// key, as transformers does.
    ///
    /// Every rank calls it. Parameters are gathered one at a time to rank 0, which writes them as
    /// they come, so that no rank holds more than its fragments and one parameter. Files are
    /// written beside and take their names when all are complete and flushed to disk: one killed
    /// before leaves what was there, and perhaps files that end in `.tmp`. Only where several files replace several of the same names
    /// can a kill between renames leave the folder without an index, which a load then reports.
    ///
    /// Running statistics, such as those of `BatchNorm`, are not among the parameters;
    /// [`save_burnpack`](Self::save_burnpack) writes them.
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
        let plan = self.plan_save(folder, options).map_err(Error::from);
        let shards = self.same_on_all("the plan of a save", plan)?;
        let Held { bases, locals } = self.held();
        let first = self.mesh().rank == Rank::ZERO;
        let mut written: Result<Vec<Complete>, SaveError> = Ok(Vec::new());
        for shard in &shards {
            let mut file = (first && written.is_ok())
                .then(|| NewFile::safetensors(&folder.join(&shard.file), &shard.headers()));
            for tensor in &shard.tensors {
                // After a failure of its own rank 0 still takes part: the others wait for it.
                let writes = matches!(file, Some(Ok(_)));
                let full = match tensor.from {
                    Target::Parameter(place) => {
                        self.engine.full(place, bases[&place].clone(), writes)?
                    }
                    Target::Local(id) => locals.get(&id).cloned(),
                };
                if let (Some(full), Some(Ok(out))) = (full, &mut file)
                    && let Err(error) = tensor.write(out, &full, options)
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
            true => written.and_then(|files| publish(folder, &shards, files, options)),
            false => Ok(()),
        };
        self.same_on_all("a save", published.map_err(Error::from))
    }

    /// The files to write, in the order of writing, once all is known to be in order.
    fn plan_save(&self, folder: &Path, options: &SavePretrained) -> Result<Vec<Shard>, SaveError> {
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
    pub(super) fn held(&self) -> Held {
        struct Read<'a> {
            held: Held,
            ignored: &'a [IgnoredParam],
            first: bool,
        }
        impl Walk for Read<'_> {
            fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if let Some(sharded) = Sharded::of(param) {
                    self.held.bases.insert(sharded.place, param.base().into_dispatch());
                } else if self.first && self.ignored.iter().any(|ignored| ignored.id == param.id) {
                    let data = param.base().into_data().convert::<f32>();
                    self.held.locals.insert(param.id, data);
                }
            }
        }
        let first = self.mesh().rank == Rank::ZERO;
        let mut read = Read { held: Held::default(), ignored: &self.ignored, first };
        self.module.walk(&mut read);
        read.held
    }
}

/// What a rank holds of each parameter.
#[derive(Default)]
pub(super) struct Held {
    pub(super) bases: HashMap<Place, DispatchTensor>,
    /// IgnoredParam parameters, on rank 0 alone: its own are written.
    locals: HashMap<ParamId, TensorData>,
}

/// One file to write.
#[derive(Debug)]
struct Shard {
    file: String,
    tensors: Vec<ToWrite>,
}

impl Shard {
    fn headers(&self) -> Vec<Header> {
        self.tensors.iter().map(|tensor| tensor.header.clone()).collect()
    }
}

#[derive(Debug)]
struct ToWrite {
    from: Target,
    header: Header,
    /// Rows and columns of the parameter, where the file holds it transposed.
    transpose: Option<[usize; 2]>,
}

impl ToWrite {
    fn write(
        &self,
        file: &mut NewFile,
        full: &TensorData,
        options: &SavePretrained,
    ) -> Result<(), SaveError> {
        let elements = full.as_slice::<f32>().map_err(|error| SaveError::Io {
            file: self.header.name.clone(),
            reason: format!("its elements are no f32: {error:?}"),
        })?;
        file.tensor(elements, self.transpose, options.dtype)
    }
}

/// Cuts the tensors into files of at most `max` bytes, as transformers does: a tensor that does not
/// fit any more begins the next file.
fn cut(tensors: Vec<ToWrite>, max: u64) -> Vec<Shard> {
    let mut groups: Vec<Vec<ToWrite>> = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in tensors {
        let group = groups.last_mut().expect("there is one from the start");
        if !group.is_empty() && bytes + tensor.header.bytes > max {
            bytes = 0;
            groups.push(Vec::new());
        }
        bytes += tensor.header.bytes;
        groups.last_mut().expect("there is one from the start").push(tensor);
    }
    let count = groups.len();
    let name = |index: usize| match count {
        1 => SINGLE.to_string(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    let shard = |(index, tensors)| Shard { file: name(index), tensors };
    groups.into_iter().enumerate().map(shard).collect()
}

/// Gives the complete files their names, and removes the weights they replace.
fn publish(
    folder: &Path,
    shards: &[Shard],
    files: Vec<Complete>,
    options: &SavePretrained,
) -> Result<(), SaveError> {
    let others: Result<Vec<_>, _> =
        options.files.iter().map(|(name, contents)| whole(&folder.join(name), contents)).collect();
    let index = (shards.len() > 1).then(|| whole(&folder.join(INDEX), &index_of(shards)));
    let (others, index) = (others?, index.transpose()?);
    // The index that names files about to be replaced must not outlive them.
    if index.is_some() && shards.iter().any(|shard| folder.join(&shard.file).exists()) {
        remove(&folder.join(INDEX))?;
    }
    for file in others.into_iter().chain(files).chain(index) {
        file.publish()?;
    }
    // One file goes before an index, so the one that is not this save's must go.
    remove(&folder.join(if shards.len() > 1 { SINGLE } else { INDEX }))?;
    let entries =
        std::fs::read_dir(folder).map_err(|error| failed(&folder.display().to_string(), &error))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if is_numbered(name) && shards.iter().all(|shard| shard.file != name) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Whether a file is one of several of an earlier save: `model-00001-of-00002.safetensors`.
fn is_numbered(name: &str) -> bool {
    let number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    name.strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|rest| rest.split_once("-of-"))
        .is_some_and(|(index, count)| number(index) && number(count))
}

fn remove(path: &Path) -> Result<(), SaveError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(failed(&path.display().to_string(), &error))
        }
        _ => Ok(()),
    }
}

fn index_of(shards: &[Shard]) -> Vec<u8> {
    let tensors = || shards.iter().flat_map(|shard| &shard.tensors);
    let total: u64 = tensors().map(|tensor| tensor.header.bytes).sum();
    let map: BTreeMap<&str, &str> = shards
        .iter()
        .flat_map(|shard| {
            shard.tensors.iter().map(|tensor| (tensor.header.name.as_str(), shard.file.as_str()))
        })
        .collect();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    format!("{index:#}\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(entry: usize, bytes: u64) -> ToWrite {
        let header = Header {
            name: entry.to_string(),
            shape: vec![],
            dtype: safetensors::Dtype::F32,
            bytes,
        };
        ToWrite { from: Target::Parameter(Place { unit: 0, entry }), header, transpose: None }
    }

    fn sizes(bytes: &[u64], max: u64) -> Vec<Vec<u64>> {
        let tensors = bytes.iter().enumerate().map(|(entry, &bytes)| tensor(entry, bytes));
        let of = |shard: &Shard| shard.tensors.iter().map(|tensor| tensor.header.bytes).collect();
        cut(tensors.collect(), max).iter().map(of).collect()
    }

    #[test]
    fn tensors_are_cut_in_order_and_one_too_large_is_alone() {
        assert_eq!(sizes(&[4, 4, 4], 12), [vec![4, 4, 4]]);
        assert_eq!(sizes(&[4, 4, 4], 11), [vec![4, 4], vec![4]]);
        assert_eq!(sizes(&[20, 4, 20, 4], 8), [vec![20], vec![4], vec![20], vec![4]]);
        assert_eq!(sizes(&[4, 4], 0), [vec![4], vec![4]]);
        let names = cut(vec![tensor(0, 9), tensor(1, 9)], 10);
        let names: Vec<_> = names.iter().map(|shard| shard.file.as_str()).collect();
        assert_eq!(names, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
    }

    #[test]
    fn only_numbered_files_of_weights_are_an_earlier_saves() {
        assert!(is_numbered("model-00002-of-00010.safetensors"));
        for other in [
            "model.safetensors",
            "model-00002-of-00010.bin",
            "model-2-of-10.safetensors",
            "model-adapter-of-00010.safetensors",
            "model-000a2-of-00010.safetensors",
        ] {
            assert!(!is_numbered(other), "{other}");
        }
    }
}
