//! Tensors in memory-mapped files: a safetensors file, a folder of them with an index, or a Burn
//! record. Opening reads and checks the headers; elements are read later, only as far as needed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::DType;
use burn_pack::{Bytes, Reader};
use burn_std::AllocationProperty;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use super::file_names::{INDEX, SINGLE, is_plain};
use crate::error::LoadError;

/// A memory-mapped file. Clones share the map.
#[derive(Clone, Debug)]
struct MappedFile(Arc<Mmap>);

impl MappedFile {
    fn open(path: &Path) -> Result<Self, LoadError> {
        let io = |error: std::io::Error| LoadError::Io {
            file: path.display().to_string(),
            reason: error.to_string(),
        };
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is only read. The user must not truncate the file while it is loaded, as
        // with every memory-mapped reader.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self(Arc::new(map)))
    }

    /// Returns the memory pages of a byte range to the system, so that pages already read do not
    /// add up.
    fn release(&self, range: &Range<usize>) {
        #[cfg(unix)]
        // SAFETY: the map is shared and read-only, so that a page that was dropped is read from the
        // file again with equal bytes. A failure only costs memory.
        let _ = unsafe {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            self.0.unchecked_advise_range(advice, range.start, range.len())
        };
        #[cfg(not(unix))]
        let _ = range;
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// A tensor in a memory-mapped file.
#[derive(Clone, Debug)]
pub(super) struct MappedTensor {
    file: MappedFile,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Range of the tensor's bytes in the file.
    range: Range<usize>,
}

impl MappedTensor {
    /// Returns the tensor's bytes, little-endian.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.file.as_ref()[self.range.clone()]
    }

    /// Returns the tensor's memory pages to the system. A later read loads them from the file
    /// again.
    pub(super) fn release(&self) {
        self.file.release(&self.range);
    }
}

/// The tensors of a file or folder, by name.
#[derive(Debug)]
pub(super) struct Source {
    /// Path of the file or folder, for error messages.
    pub(super) label: String,
    pub(super) tensors: BTreeMap<String, MappedTensor>,
}

impl Source {
    /// Opens a safetensors file, an index of several, or a folder with either. In a folder with
    /// both, the single file is read, as in transformers.
    pub(super) fn safetensors(path: &Path) -> Result<Self, LoadError> {
        let label = path.display().to_string();
        if path.is_dir() {
            let (single, index) = (path.join(SINGLE), path.join(INDEX));
            return match (single.is_file(), index.is_file()) {
                (false, true) => Self::index(&index),
                (true, _) => Self::safetensors(&single),
                (false, false) => Err(LoadError::Io {
                    file: label,
                    reason: format!("the folder holds neither {SINGLE} nor {INDEX}"),
                }),
            };
        }
        if path.extension().is_some_and(|extension| extension == "json") {
            return Self::index(path);
        }
        Ok(Self { label, tensors: safetensors_file(path)? })
    }

    /// Opens the files that an index names, and checks that the index and the files agree.
    fn index(path: &Path) -> Result<Self, LoadError> {
        let label = path.display().to_string();
        let wrong = |reason: String| LoadError::Format {
            file: label.clone(),
            format: "index of safetensors files",
            reason,
        };
        let text = std::fs::read(path)
            .map_err(|error| LoadError::Io { file: label.clone(), reason: error.to_string() })?;
        let json: serde_json::Value =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let map = json.get("weight_map").and_then(serde_json::Value::as_object);
        let map = map.ok_or_else(|| wrong("it has no object `weight_map`".into()))?;
        let folder = path.parent().unwrap_or(Path::new(""));

        let mut problems = Vec::new();
        let mut names_of: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (name, file) in map {
            match file.as_str() {
                Some(file) if is_plain(file) => {
                    names_of.entry(file).or_default().insert(name);
                }
                Some(file) => problems.push(format!("`{name}`: `{file}` is no file name")),
                None => problems.push(format!("`{name}`: {file} is no file name")),
            }
        }
        let mut tensors = BTreeMap::new();
        for (file, mut names) in names_of {
            let found = match safetensors_file(&folder.join(file)) {
                Ok(found) => found,
                Err(error) => {
                    problems.push(error.to_string());
                    continue;
                }
            };
            for (name, tensor) in found {
                if names.remove(name.as_str()) {
                    tensors.insert(name, tensor);
                } else {
                    problems.push(format!("`{name}`: in {file}, where the index does not list it"));
                }
            }
            problems.extend(names.into_iter().map(|name| format!("`{name}`: not in {file}")));
        }
        if problems.is_empty() {
            return Ok(Self { label, tensors });
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
        Ok(Self { tensors: record_file(&label, &file)?, label })
    }
}

/// Returns the tensors of a Burn record. `label` names the file in errors.
fn record_file(
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
            DType::F64 => Dtype::F64,
            DType::F32 | DType::Flex32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            // Not a float: refused where it is matched to a parameter.
            _ => Dtype::U8,
        };
        // The reader returns slices of the map; an empty slice may point anywhere.
        let at = if bytes.is_empty() { 0 } else { bytes.as_ptr().addr().wrapping_sub(start) };
        let range = at..at.wrapping_add(bytes.len());
        if file.as_ref().get(range.clone()).is_none() {
            return Err(wrong(format!("`{name}` does not lie in it")));
        }
        let tensor = MappedTensor { file: file.clone(), dtype, shape: shape.to_vec(), range };
        tensors.insert(name, tensor);
    }
    Ok(tensors)
}

/// Returns the tensors of a safetensors file.
fn safetensors_file(path: &Path) -> Result<BTreeMap<String, MappedTensor>, LoadError> {
    let file = MappedFile::open(path)?;
    let wrong = |reason: String| LoadError::Format {
        file: path.display().to_string(),
        format: "safetensors file",
        reason: format!("{reason}; it may be truncated"),
    };
    let (header, metadata) =
        SafeTensors::read_metadata(file.as_ref()).map_err(|error| wrong(error.to_string()))?;
    let start = size_of::<u64>() + header;
    let mapped = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
        let (from, to) = info.data_offsets;
        let tensor = MappedTensor {
            file: file.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            range: start + from..start + to,
        };
        (name, tensor)
    };
    Ok(metadata.tensors().into_iter().map(mapped).collect())
}
