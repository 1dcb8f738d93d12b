//! Tensors in memory-mapped files: a safetensors file, a folder of them with an index, or a Burn
//! record. Opening reads and checks the headers; elements are read later, only as far as needed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use burn::tensor::DType;
use burn_pack::{Bytes, Reader};
use burn_std::AllocationProperty;
use safetensors::{Dtype, SafeTensors};

use super::file_names::{FOLDER, METADATA, is_plain};
use super::mapped::{MappedFile, MappedTensor};
use super::torch::{distributed_checkpoint, is_archive, saved_file};
use crate::error::LoadError;

/// The tensors of a file or folder, by name.
#[derive(Debug)]
pub(super) struct Source {
    /// Path of the file or folder, for error messages.
    pub(super) label: String,
    pub(super) tensors: BTreeMap<String, MappedTensor>,
    /// Name of the file of each tensor, if an index names several files.
    files: BTreeMap<String, String>,
}

impl Source {
    /// Opens a safetensors file, a file of `torch.save`, an index of several, or a folder with one
    /// of these or of `torch.distributed.checkpoint`. In a folder with several, safetensors come
    /// first, and a single file before an index, as in transformers.
    pub(super) fn open(path: &Path) -> Result<Self, LoadError> {
        let label = path.display().to_string();
        if path.is_dir() {
            let held = |name: &&str| path.join(name).is_file();
            return match FOLDER.iter().copied().find(held) {
                Some(METADATA) => Ok(Self::whole(label, distributed_checkpoint(path)?)),
                Some(name) => Self::open(&path.join(name)),
                None => Err(LoadError::Io {
                    file: label,
                    reason: format!("the folder holds none of {}", FOLDER.join(", ")),
                }),
            };
        }
        if path.extension().is_some_and(|extension| extension == "json") {
            return Self::index(path);
        }
        Ok(Self::whole(label, weights_file(path)?))
    }

    /// Returns the tensors of one file or folder without an index.
    fn whole(label: String, tensors: BTreeMap<String, MappedTensor>) -> Self {
        Self { label, tensors, files: BTreeMap::new() }
    }

    /// Returns the name of a tensor's file among several, and "the file" where there is one.
    pub(super) fn file_of(&self, tensor: &str) -> &str {
        self.files.get(tensor).map_or("the file", String::as_str)
    }

    /// Opens the files that an index names, and checks that the index and the files agree.
    fn index(path: &Path) -> Result<Self, LoadError> {
        let label = path.display().to_string();
        let wrong = |reason: String| LoadError::Format {
            file: label.clone(),
            format: "index of weights files",
            reason,
        };
        let text = std::fs::read(path)
            .map_err(|error| LoadError::Io { file: label.clone(), reason: error.to_string() })?;
        let (names_of, mut problems) = read_index(&text).map_err(wrong)?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let (mut tensors, mut files) = (BTreeMap::new(), BTreeMap::new());
        for (file, mut names) in names_of {
            let found = match weights_file(&folder.join(&file)) {
                Ok(found) => found,
                Err(error) => {
                    problems.push(format!("{error}; the index has {} in it", listed(&names)));
                    continue;
                }
            };
            for (name, tensor) in found {
                if names.remove(name.as_str()) {
                    files.insert(name.clone(), file.clone());
                    tensors.insert(name, tensor);
                } else {
                    problems.push(format!("`{name}`: in {file}, where the index does not list it"));
                }
            }
            problems.extend(names.into_iter().map(|name| format!("`{name}`: not in {file}")));
        }
        if problems.is_empty() {
            return Ok(Self { label, tensors, files });
        }
        problems.sort();
        Err(LoadError::Index { file: label, problems })
    }

    /// Opens a Burn record. A path without extension gets `.bpk`, as in Burn.
    pub(super) fn record(path: &Path) -> Result<Self, LoadError> {
        let path = match path.extension() {
            None if !path.exists() => path.with_extension(burn_pack::EXTENSION),
            _ => path.to_path_buf(),
        };
        let file = MappedFile::open(&path)?;
        let label = path.display().to_string();
        let tensors = record_file(&label, &file)?;
        Ok(Self::whole(label, tensors))
    }
}

/// Returns the first names of a file's tensors, and how many more there are.
fn listed(names: &BTreeSet<String>) -> String {
    let first: Vec<String> = names.iter().take(3).map(|name| format!("`{name}`")).collect();
    match names.len() - first.len() {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

/// The names of tensors by the file that an index gives for them.
type NamesOfFiles = BTreeMap<String, BTreeSet<String>>;

/// Reads an index: returns the names of tensors by file, and the entries that name no file.
///
/// # Errors
///
/// A description of the fault of a text that is no index.
pub(super) fn read_index(text: &[u8]) -> Result<(NamesOfFiles, Vec<String>), String> {
    let json: serde_json::Value =
        serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let map = json.get("weight_map").and_then(serde_json::Value::as_object);
    let map = map.ok_or("it has no object `weight_map`")?;
    let (mut names_of, mut problems) = (NamesOfFiles::new(), Vec::new());
    for (name, file) in map {
        match file.as_str() {
            Some(file) if is_plain(file) => {
                names_of.entry(file.into()).or_default().insert(name.clone());
            }
            Some(file) => problems.push(format!("`{name}`: `{file}` is no file name")),
            None => problems.push(format!("`{name}`: {file} is no file name")),
        }
    }
    Ok((names_of, problems))
}

/// Returns the tensors of a Burn record. `label` names the file in errors.
pub(super) fn record_file(
    label: &str,
    file: &MappedFile,
) -> Result<BTreeMap<String, MappedTensor>, LoadError> {
    let wrong = |reason: String| LoadError::Format {
        file: label.to_string(),
        format: "Burn record",
        reason: format!("{reason}; it may be truncated"),
    };
    let bytes = bytes::Bytes::from_owner(file.clone());
    let reader = Reader::from_bytes(Bytes::from_shared(bytes, AllocationProperty::Other))
        .and_then(Reader::into_tensors)
        .map_err(|error| wrong(error.to_string()))?;
    let start = file.as_ref().as_ptr().addr();
    let mut tensors = BTreeMap::new();
    for tensor in reader {
        let (name, dtype, shape, _, bytes) =
            tensor.into_parts().map_err(|error| wrong(error.to_string()))?;
        let dtype = match dtype {
            DType::F64 => Some(Dtype::F64),
            DType::F32 | DType::Flex32 => Some(Dtype::F32),
            DType::F16 => Some(Dtype::F16),
            DType::BF16 => Some(Dtype::BF16),
            _ => None,
        };
        let Some(dtype) = dtype else {
            // Not a float: refused where it is matched to a parameter.
            tensors.insert(name, MappedTensor::unreadable(shape.to_vec()));
            continue;
        };
        // The reader returns slices of the map; an empty slice may point anywhere.
        let at = if bytes.is_empty() { 0 } else { bytes.as_ptr().addr().wrapping_sub(start) };
        let range = at..at.wrapping_add(bytes.len());
        let tensor = MappedTensor::contiguous(file, dtype, shape.to_vec(), range)
            .ok_or_else(|| wrong(format!("`{name}` does not lie in it")))?;
        tensors.insert(name, tensor);
    }
    Ok(tensors)
}

/// Returns the tensors of a safetensors file, or of a file of `torch.save`, by its first bytes.
fn weights_file(path: &Path) -> Result<BTreeMap<String, MappedTensor>, LoadError> {
    let file = MappedFile::open(path)?;
    let label = path.display().to_string();
    match is_archive(&file) {
        true => saved_file(&label, &file),
        false => safetensors_file(&label, &file),
    }
}

/// Returns the tensors of a safetensors file. `label` names the file in errors.
pub(super) fn safetensors_file(
    label: &str,
    file: &MappedFile,
) -> Result<BTreeMap<String, MappedTensor>, LoadError> {
    let wrong = |reason: String| LoadError::Format {
        file: label.to_string(),
        format: "safetensors file",
        reason: format!("{reason}; it may be truncated"),
    };
    let (header, metadata) =
        SafeTensors::read_metadata(file.as_ref()).map_err(|error| wrong(error.to_string()))?;
    let start = size_of::<u64>() + header;
    let mapped = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
        let (from, to) = info.data_offsets;
        let range = start + from..start + to;
        let tensor = MappedTensor::contiguous(file, info.dtype, info.shape.clone(), range);
        let tensor = tensor.ok_or_else(|| wrong(format!("`{name}` does not lie in it")))?;
        Ok((name, tensor))
    };
    metadata.tensors().into_iter().map(mapped).collect()
}
