//! A checkpoint's model as what transformers loads, without the model's code: the manifest knows
//! every tensor's name and layout in the framework it comes from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::folder;
use super::manifest::{Dtype, MANIFEST, ModelEntry, TensorEntry, model_key};
use super::read::Folder;
use crate::checkpoint::pretrained::shards::{Shard, ToWrite, cut, publish};
use crate::checkpoint::pretrained::write::{Complete, Header, NewFile, failed};
use crate::error::CheckpointError;
use crate::error::Error;
use crate::error::SaveError;

/// About how many bytes are read at once of a tensor that is written as it lies.
const CHUNK: usize = 16 << 20;

/// What [`merge`] writes of a checkpoint.
#[derive(Clone, Debug)]
#[must_use]
pub struct MergeOptions {
    model: Option<String>,
    max_shard_size: u64,
    module_paths: bool,
}

impl Default for MergeOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl MergeOptions {
    /// The checkpoint's only model, in files of at most 5 GB, in the names and layouts of the
    /// framework it comes from.
    pub fn new() -> Self {
        Self { model: None, max_shard_size: 5_000_000_000, module_paths: false }
    }

    /// The model of this name, where the checkpoint holds several.
    pub fn with_model(mut self, name: impl Into<String>) -> Self {
        self.model = Some(name.into());
        self
    }

    /// The most bytes of tensors in one file, as
    /// [`SavePretrained::with_max_shard_size`](crate::SavePretrained::with_max_shard_size).
    pub fn with_max_shard_size(mut self, bytes: u64) -> Self {
        self.max_shard_size = bytes;
        self
    }

    /// Whether tensors are named by their module paths and lie as in the module.
    pub fn with_module_paths(mut self, module_paths: bool) -> Self {
        self.module_paths = module_paths;
        self
    }
}

/// What [`merge`] wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// The checkpoint it was read from.
    pub checkpoint: PathBuf,
    /// The model's name in it.
    pub model: String,
    /// How many tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// The files they went to.
    pub files: Vec<PathBuf>,
}

/// Merges the model in a checkpoint, or in the newest complete one of a folder of checkpoints, into
/// the folder `output`: `model.safetensors`, or numbered files with an index. The files are what
/// [`Fsdp::save_pretrained`](crate::Fsdp::save_pretrained) writes of the same model, but for the
/// additional ones, such as `config.json`.
///
/// Needs no rank, no device and none of the model's code. One tensor is in memory at a time, and its
/// checksums are compared as it is read. Files take their names when all are complete.
///
/// Of an ignored parameter or a running statistic that differs between ranks, rank 0's is written.
///
/// # Errors
///
/// [`CheckpointError`] for what is read, [`SaveError`] for what is written.
pub fn merge(
    folder: impl AsRef<Path>,
    output: impl AsRef<Path>,
    options: &MergeOptions,
) -> Result<Merged, Error> {
    let (checkpoint, output) = (find(folder.as_ref())?, output.as_ref());
    let folder = Folder::open(&checkpoint)?;
    let (name, model) = choose(&folder, options.model.as_deref())?;
    let tensors = plan(name, model, options.module_paths)?;
    let (count, bytes) = (tensors.len(), tensors.iter().map(|tensor| tensor.header.bytes).sum());
    std::fs::create_dir_all(output)
        .map_err(|error| failed(&output.display().to_string(), &error))?;
    let shards = cut(tensors, options.max_shard_size);
    let files: Vec<_> = shards.iter().map(|shard| output.join(&shard.file)).collect();
    let complete = |(shard, path): (&Shard<Stored<'_>>, &PathBuf)| write(&folder, shard, path);
    let complete = shards.iter().zip(&files).map(complete).collect::<Result<_, Error>>()?;
    publish(output, &shards, complete, &[])?;
    Ok(Merged { checkpoint, model: name.clone(), tensors: count, bytes, files })
}

/// The checkpoint, or the newest complete one in a folder of them.
fn find(path: &Path) -> Result<PathBuf, CheckpointError> {
    if path.join(MANIFEST).is_file() {
        return Ok(path.to_path_buf());
    }
    let folder::Listing { complete, torn } = folder::list(path)?;
    match complete.last() {
        Some((_, newest)) => Ok(newest.clone()),
        None if torn.is_empty() => Ok(path.to_path_buf()),
        None => Err(CheckpointError::NoCheckpoint {
            folder: path.display().to_string(),
            torn: torn.iter().map(|path| path.display().to_string()).collect(),
        }),
    }
}

fn choose<'a>(
    folder: &'a Folder,
    asked: Option<&str>,
) -> Result<(&'a String, &'a ModelEntry), CheckpointError> {
    let models = &folder.manifest().models;
    let found = match asked {
        Some(name) => models.get_key_value(name),
        None if models.len() == 1 => models.first_key_value(),
        None => None,
    };
    found.ok_or_else(|| CheckpointError::NoSuchModel {
        folder: folder.name(),
        asked: asked.map(str::to_string),
        models: models.keys().cloned().collect(),
    })
}

/// Where a tensor to write lies in the checkpoint.
#[derive(Debug)]
struct Stored<'a> {
    key: String,
    tensor: &'a TensorEntry,
}

/// The model's tensors in layout order, under the names they are to have.
fn plan<'a>(
    name: &str,
    model: &'a ModelEntry,
    module_paths: bool,
) -> Result<Vec<ToWrite<Stored<'a>>>, SaveError> {
    let laid_out = model.units.iter().flat_map(|unit| &unit.parameters);
    let known: std::collections::BTreeSet<&String> = laid_out.clone().collect();
    let rest = model.tensors.keys().filter(|path| !known.contains(path));
    let mut named: BTreeMap<String, &String> = BTreeMap::new();
    let mut tensors = Vec::new();
    // Tied parameters are of no tensor of their own.
    for (path, tensor) in
        laid_out.chain(rest).filter_map(|path| Some((path, model.tensors.get(path)?)))
    {
        let entry = model.keys.get(path).filter(|_| !module_paths);
        let key = entry.map_or(path, |entry| &entry.name).clone();
        if let Some(first) = named.insert(key.clone(), path) {
            let (first, second) = (first.clone(), path.clone());
            return Err(SaveError::DuplicateKey { key, first, second });
        }
        let transpose = match tensor.shape[..] {
            [rows, columns] if entry.is_some_and(|entry| entry.transposed) => Some([rows, columns]),
            _ => None,
        };
        let mut shape = tensor.shape.clone();
        if transpose.is_some() {
            shape.reverse();
        }
        // Nothing overflows: the manifest was checked.
        let bytes = (tensor.numel().unwrap_or(0) * tensor.dtype.size()) as u64;
        let header = Header { name: key, shape, dtype: stored(tensor.dtype), bytes };
        let from = Stored { key: model_key(name, path), tensor };
        tensors.push(ToWrite { from, header, transpose });
    }
    Ok(tensors)
}

fn write(folder: &Folder, shard: &Shard<Stored<'_>>, path: &Path) -> Result<Complete, Error> {
    let mut file = NewFile::safetensors(path, &shard.headers())?;
    for ToWrite { from: Stored { key, tensor }, transpose, .. } in &shard.tensors {
        let (numel, size) = (tensor.numel().unwrap_or(0), tensor.dtype.size());
        // What lies as it is to be written goes through in parts.
        let step = if transpose.is_some() { numel.max(1) } else { CHUNK / size };
        for start in (0..numel).step_by(step) {
            let range = start..(start + step).min(numel);
            folder.verify(key, tensor, range.clone())?;
            let mut bytes = vec![0; range.len() * size];
            folder.read(key, tensor, range, &mut bytes)?;
            match transpose {
                Some(shape) => file.transposed(&bytes, *shape, size)?,
                None => file.write(&bytes)?,
            }
        }
    }
    Ok(file.complete()?)
}

/// As the safetensors crate names it.
fn stored(dtype: Dtype) -> safetensors::Dtype {
    match dtype {
        Dtype::F64 => safetensors::Dtype::F64,
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::F16 => safetensors::Dtype::F16,
        Dtype::BF16 => safetensors::Dtype::BF16,
        Dtype::I64 => safetensors::Dtype::I64,
        Dtype::I32 => safetensors::Dtype::I32,
        Dtype::I16 => safetensors::Dtype::I16,
        Dtype::I8 => safetensors::Dtype::I8,
        Dtype::U64 => safetensors::Dtype::U64,
        Dtype::U32 => safetensors::Dtype::U32,
        Dtype::U16 => safetensors::Dtype::U16,
        Dtype::U8 => safetensors::Dtype::U8,
    }
}
