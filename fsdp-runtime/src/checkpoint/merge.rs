//! Conversion of a checkpoint to a folder that transformers loads, without the model's code: the
//! manifest has the name and layout of every tensor in the framework that the model comes from.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::slice::from_ref;

use fsdp_kernels::codes::{decoded_elements, widened_elements};

use super::folder;
use super::manifest::{Dtype, MANIFEST, ModelEntry, TensorEntry, model_tensor_name};
use super::pretrained::SaveDtype;
use super::pretrained::safetensors_file::{CompleteFile, NewFile, TensorHeader, save_error};
use super::pretrained::weights_files::{TensorToWrite, WeightsFile, publish, split_into_files};
use super::reader::CheckpointReader;
use crate::error::{CheckpointError, Error, SaveError};

/// Approximate number of bytes that are read at once of a tensor that is not transposed.
const CHUNK: usize = 16 << 20;

/// Options of [`merge`]: which model, size of files, names of tensors.
#[derive(Clone, Debug)]
#[must_use]
pub struct MergeOptions {
    model: Option<String>,
    max_shard_size: u64,
    module_paths: bool,
    dtype: Option<SaveDtype>,
}

impl Default for MergeOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl MergeOptions {
    /// Returns the default options: the checkpoint's only model, in files of at most 5 GB, with the
    /// names and layouts of the framework that the model comes from, and in the dtypes in which it is
    /// stored. Codes are decoded to f32.
    pub fn new() -> Self {
        Self { model: None, max_shard_size: 5_000_000_000, module_paths: false, dtype: None }
    }

    /// Selects a model by name. Required where the checkpoint holds several models.
    pub fn with_model(mut self, name: impl Into<String>) -> Self {
        self.model = Some(name.into());
        self
    }

    /// Sets the maximum number of bytes of tensors in one file, as
    /// [`SavePretrained::with_max_shard_size`](crate::pretrained::SavePretrained::with_max_shard_size) does.
    pub fn with_max_shard_size(mut self, bytes: u64) -> Self {
        self.max_shard_size = bytes;
        self
    }

    /// Sets whether tensors have their module paths as names and the module's layouts.
    pub fn with_module_paths(mut self, module_paths: bool) -> Self {
        self.module_paths = module_paths;
        self
    }

    /// Sets the dtype of all float tensors. Default: the dtype in which each is stored, and f32 for
    /// codes.
    pub fn with_dtype(mut self, dtype: SaveDtype) -> Self {
        self.dtype = Some(dtype);
        self
    }
}

/// Result of [`merge`]: what was read and which files were written.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Merged {
    /// Folder of the checkpoint that was read.
    pub checkpoint: PathBuf,
    /// Name of the model in the checkpoint.
    pub model: String,
    /// Number of tensors written.
    pub tensors: usize,
    /// Number of bytes of tensors written.
    pub bytes: u64,
    /// Paths of the files written.
    pub files: Vec<PathBuf>,
}

/// Merges a model of a checkpoint into the folder `output`: `model.safetensors`, or numbered files
/// with an index. `folder` is a checkpoint, or a folder of checkpoints, of which the newest
/// complete one is read.
///
/// The files are equal to those that
/// [`State::save_pretrained`](crate::checkpoint::State::save_pretrained) writes of the same model;
/// additional files such as `config.json` are not written. Needs no ranks, no device and none of
/// the model's code. One tensor is in memory at a time, and checksums are verified as it is read.
/// The files are renamed to their names once all are complete.
///
/// Of an ignored parameter or running statistic whose values differ between ranks, rank 0's are
/// written.
///
/// # Errors
///
/// [`CheckpointError`] where the checkpoint cannot be read, [`SaveError`] where the output cannot
/// be written.
pub fn merge(
    folder: impl AsRef<Path>,
    output: impl AsRef<Path>,
    options: &MergeOptions,
) -> Result<Merged, Error> {
    let (checkpoint, output) = (find_checkpoint(folder.as_ref())?, output.as_ref());
    let reader = CheckpointReader::open(&checkpoint)?;
    let (name, model) = select_model(&reader, options.model.as_deref())?;
    let tensors = tensors_to_write(name, model, options)?;
    let (count, bytes) = (tensors.len(), tensors.iter().map(|tensor| tensor.header.bytes).sum());
    std::fs::create_dir_all(output)
        .map_err(|error| save_error(&output.display().to_string(), &error))?;
    let weights = split_into_files(tensors, options.max_shard_size);
    let files: Vec<_> = weights.iter().map(|file| output.join(&file.name)).collect();
    let complete =
        |(file, path): (&WeightsFile<CheckpointTensor<'_>>, &PathBuf)| write(&reader, file, path);
    let complete = weights.iter().zip(&files).map(complete).collect::<Result<_, Error>>()?;
    publish(output, &weights, complete, &[])?;
    Ok(Merged { checkpoint, model: name.clone(), tensors: count, bytes, files })
}

/// Returns `path` if it is a checkpoint, else the newest complete checkpoint in it.
fn find_checkpoint(path: &Path) -> Result<PathBuf, CheckpointError> {
    if path.join(MANIFEST).is_file() {
        return Ok(path.to_path_buf());
    }
    let folder::Listing { complete, torn } = folder::list(path)?;
    match complete.last() {
        Some((_, newest)) => Ok(newest.clone()),
        // Opening the path reports why it is not a checkpoint.
        None if torn.is_empty() => Ok(path.to_path_buf()),
        None => Err(CheckpointError::NoCheckpoint {
            folder: path.display().to_string(),
            torn: torn.iter().map(|path| path.display().to_string()).collect(),
        }),
    }
}

/// Returns the model `asked` for, or the only model.
fn select_model<'a>(
    reader: &'a CheckpointReader,
    asked: Option<&str>,
) -> Result<(&'a String, &'a ModelEntry), CheckpointError> {
    let models = &reader.manifest().models;
    let found = match asked {
        Some(name) => models.get_key_value(name),
        None if models.len() == 1 => models.first_key_value(),
        None => None,
    };
    found.ok_or_else(|| CheckpointError::NoSuchModel {
        folder: reader.name(),
        asked: asked.map(str::to_string),
        models: models.keys().cloned().collect(),
    })
}

/// A tensor of the checkpoint.
#[derive(Debug)]
struct CheckpointTensor<'a> {
    /// The tensor's name in the ranks' files.
    key: String,
    entry: &'a TensorEntry,
    /// Dtype that the elements are converted to; `None` where their bytes are copied.
    converted: Option<SaveDtype>,
}

/// Returns the dtype that a tensor is converted to, if it is.
fn converted_to(entry: &TensorEntry, options: &MergeOptions) -> Option<SaveDtype> {
    let is_float = matches!(entry.dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
    match (entry.codes, options.dtype) {
        (Some(_), dtype) => Some(dtype.unwrap_or(SaveDtype::F32)),
        (None, dtype) => dtype.filter(|_| is_float),
    }
}

/// Returns the model's tensors in layout order, with the names and layouts to write.
fn tensors_to_write<'a>(
    model_name: &str,
    model: &'a ModelEntry,
    options: &MergeOptions,
) -> Result<Vec<TensorToWrite<CheckpointTensor<'a>>>, SaveError> {
    let in_units = model.units.iter().flat_map(|unit| &unit.parameters);
    let known: BTreeSet<&String> = in_units.clone().collect();
    let ignored = model.tensors.keys().filter(|path| !known.contains(path));
    let mut names: BTreeMap<String, &String> = BTreeMap::new();
    let mut tensors = Vec::new();
    // Units list tied parameters too, which have no tensor of their own.
    for (path, entry) in
        in_units.chain(ignored).filter_map(|path| Some((path, model.tensors.get(path)?)))
    {
        let key = model.keys.get(path).filter(|_| !options.module_paths);
        let name = key.map_or(path, |key| &key.name).clone();
        if let Some(first) = names.insert(name.clone(), path) {
            let (first, second) = (first.clone(), path.clone());
            return Err(SaveError::DuplicateKey { key: name, first, second });
        }
        let transpose = match entry.shape[..] {
            [rows, columns] if key.is_some_and(|key| key.transposed) => Some([rows, columns]),
            _ => None,
        };
        let mut shape = entry.shape.clone();
        if transpose.is_some() {
            shape.reverse();
        }
        let converted = converted_to(entry, options);
        let dtype = converted.map_or(safetensors_dtype(entry.dtype), SaveDtype::safetensors);
        // Cannot overflow: the manifest has been checked.
        let bytes = (entry.numel().unwrap_or(0) * dtype.bitsize() / 8) as u64;
        let header = TensorHeader { name, shape, dtype, bytes };
        let source =
            CheckpointTensor { key: model_tensor_name(model_name, path), entry, converted };
        tensors.push(TensorToWrite { source, header, transpose });
    }
    Ok(tensors)
}

/// Writes one file under a temporary name.
fn write(
    reader: &CheckpointReader,
    file: &WeightsFile<CheckpointTensor<'_>>,
    path: &Path,
) -> Result<CompleteFile, Error> {
    let mut out = NewFile::safetensors(path, &file.headers())?;
    for TensorToWrite { source, transpose, .. } in &file.tensors {
        let CheckpointTensor { key, entry, converted } = source;
        let (numel, size) = (entry.numel().unwrap_or(0), entry.dtype.size());
        let codes = entry.codes.unwrap_or_default();
        // A multiple of the elements of a record.
        let step = if transpose.is_some() { numel.max(1) } else { CHUNK / size };
        for start in (0..numel).step_by(step) {
            let range = start..(start + step).min(numel);
            let stored = codes.stored_range(&range);
            let stored = from_ref(&stored);
            reader.verify(key, entry, stored)?;
            let mut bytes = vec![0; stored[0].len() * size];
            reader.read(key, entry, stored, &mut bytes)?;
            match (converted, transpose) {
                (Some(dtype), _) => {
                    let elements = elements(&bytes, entry, range.len());
                    out.tensor(&elements, *transpose, *dtype)?;
                }
                (None, Some(shape)) => out.transposed(&bytes, *shape, size)?,
                (None, None) => out.write(&bytes)?,
            }
        }
    }
    Ok(out.complete()?)
}

/// Returns the first `numel` elements of a tensor in f32, given their bytes in the checkpoint.
fn elements(bytes: &[u8], entry: &TensorEntry, numel: usize) -> Vec<f32> {
    match entry.codes {
        Some(codes) => decoded_elements(bytes, codes, numel),
        None => widened_elements(bytes, entry.dtype.burn()).unwrap_or_default(),
    }
}

/// Converts a dtype to that of the safetensors crate.
fn safetensors_dtype(dtype: Dtype) -> safetensors::Dtype {
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
