//! Tensors in memory-mapped files: one safetensors file, a folder of them with its index, or a Burn
//! record. Opening reads and checks what the headers say; elements are read later, in part.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Component, Path};
use std::sync::Arc;

use burn::tensor::DType;
use burn_pack::{Bytes, Reader};
use burn_std::AllocationProperty;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use super::{INDEX, LoadError, SINGLE};

/// A mapped file. Clones share the map.
#[derive(Clone, Debug)]
pub(super) struct Mapped(Arc<Mmap>);

impl Mapped {
    fn open(path: &Path) -> Result<Self, LoadError> {
        let io = |error: std::io::Error| LoadError::Io {
            file: path.display().to_string(),
            reason: error.to_string(),
        };
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is only ever read. That nobody truncates the file meanwhile is the user's
        // part, as with every memory-mapped reader.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self(Arc::new(map)))
    }

    /// Gives the pages of a range back to the system, so that what was read does not add up.
    fn release(&self, range: &Range<usize>) {
        #[cfg(unix)]
        // SAFETY: the map is shared and read-only, so that a page dropped is read from the file
        // again, with the same bytes. A failure costs memory and nothing else.
        let _ = unsafe {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            self.0.unchecked_advise_range(advice, range.start, range.len())
        };
        #[cfg(not(unix))]
        let _ = range;
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    file: Mapped,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Where in the file, in bytes.
    range: Range<usize>,
}

impl Stored {
    /// Its bytes, little-endian.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.file.as_ref()[self.range.clone()]
    }

    /// Says that its bytes have been read.
    pub(super) fn release(&self) {
        self.file.release(&self.range);
    }
}

/// The tensors of a file or folder, by name.
#[derive(Debug)]
pub(super) struct Source {
    /// What messages call it.
    pub(super) label: String,
    pub(super) tensors: BTreeMap<String, Stored>,
}

impl Source {
    /// A safetensors file, its index, or a folder with either; the single file goes first, as in
    /// transformers.
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
        Ok(Self { label, tensors: one_file(path)? })
    }

    /// The files that an index names.
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
            let found = match one_file(&folder.join(file)) {
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
                    problems.push(format!("`{name}`: in {file}, where the index has it not"));
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

    /// A Burn record, with `.bpk` appended to a name without extension as Burn does.
    pub(super) fn record(path: &Path) -> Result<Self, LoadError> {
        let path = match path.extension() {
            None if !path.exists() => path.with_extension(burn_pack::EXTENSION),
            _ => path.to_path_buf(),
        };
        Self::of_record(path.display().to_string(), Mapped::open(&path)?)
    }

    fn of_record(label: String, file: Mapped) -> Result<Self, LoadError> {
        let wrong = |reason: String| LoadError::Format {
            file: label.clone(),
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
                // Of no float parameter; named as such where one meets it.
                _ => Dtype::U8,
            };
            // What the reader hands out are windows of the map; an empty one may be anywhere.
            let at = if bytes.is_empty() { 0 } else { bytes.as_ptr().addr().wrapping_sub(start) };
            let range = at..at.wrapping_add(bytes.len());
            if file.as_ref().get(range.clone()).is_none() {
                return Err(wrong(format!("`{name}` does not lie in it")));
            }
            let stored = Stored { file: file.clone(), dtype, shape: shape.to_vec(), range };
            tensors.insert(name, stored);
        }
        Ok(Self { label, tensors })
    }
}

/// A name in the same folder.
pub(super) fn is_plain(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
        && !name.contains(['/', '\\'])
}

fn one_file(path: &Path) -> Result<BTreeMap<String, Stored>, LoadError> {
    let file = Mapped::open(path)?;
    let wrong = |reason: String| LoadError::Format {
        file: path.display().to_string(),
        format: "safetensors file",
        reason: format!("{reason}; it may be truncated"),
    };
    let (header, metadata) =
        SafeTensors::read_metadata(file.as_ref()).map_err(|error| wrong(error.to_string()))?;
    let start = size_of::<u64>() + header;
    let stored = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
        let (from, to) = info.data_offsets;
        let stored = Stored {
            file: file.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            range: start + from..start + to,
        };
        (name, stored)
    };
    Ok(metadata.tensors().into_iter().map(stored).collect())
}
