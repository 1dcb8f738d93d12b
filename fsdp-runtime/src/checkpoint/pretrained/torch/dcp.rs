//! Folders of `torch.distributed.checkpoint`: `.metadata`, a pickle that says which parts of which
//! tensors lie where, and the files `__R_N.distcp` with an archive for each part.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;

use super::super::file_names::{METADATA, is_plain};
use super::super::mapped::{MappedFile, MappedTensor};
use super::globals::{Class, Global};
use super::machine::read_pickle;
use super::pickle::{Pickle, PickleError, Value, size};
use super::weights::{Saved, load_error};
use crate::error::LoadError;

/// Returns the tensors of a folder of `torch.distributed.checkpoint`, by their names in it. Entries
/// that are no tensors are left out.
///
/// # Errors
///
/// Those of [`saved_file`](super::saved_file).
pub(in super::super) fn distributed_checkpoint(
    folder: &Path,
) -> Result<BTreeMap<String, MappedTensor>, LoadError> {
    let metadata = MappedFile::open(&folder.join(METADATA))?;
    read_checkpoint(&folder.display().to_string(), metadata.as_ref(), |name| {
        MappedFile::open(&folder.join(name))
    })
}

/// Returns the tensors that `metadata` describes. `open` opens a file of the folder, and `label`
/// names the folder in errors.
pub(in super::super) fn read_checkpoint(
    label: &str,
    metadata: &[u8],
    mut open: impl FnMut(&str) -> Result<MappedFile, LoadError>,
) -> Result<BTreeMap<String, MappedTensor>, LoadError> {
    let at = |name: &str| format!("{label}/{name}");
    let described =
        read_pickle(metadata).and_then(|pickle| Ok((tensors(&pickle)?, parts(&pickle)?)));
    let (mut tensors, parts) = described.map_err(|error| load_error(&at(METADATA), error))?;
    let mut files = BTreeMap::new();
    for part in &parts {
        if tensors.contains_key(part.tensor) && !files.contains_key(part.file) {
            files.insert(part.file, open(part.file)?);
        }
    }
    for part in parts {
        let (Some(tensor), Some(file)) = (tensors.get_mut(part.tensor), files.get(part.file))
        else {
            continue;
        };
        let found = Saved::open(file, part.range).and_then(|saved| saved.only_tensor());
        let found = found.map_err(|error| load_error(&at(part.file), error))?;
        tensor.parts.push((part.offsets, found));
    }
    let assembled = |(name, Described { dtype, shape, parts }): (&str, Described)| {
        let tensor = MappedTensor::assembled(dtype, shape, parts);
        let tensor = tensor.map_err(|reason| format!("`{name}`: {reason}").into());
        Ok((name.to_string(), tensor.map_err(|error| load_error(label, error))?))
    };
    tensors.into_iter().map(assembled).collect()
}

/// A tensor that the metadata describe.
struct Described {
    dtype: Dtype,
    shape: Vec<usize>,
    /// Parts that were found, with their positions.
    parts: Vec<(Vec<usize>, MappedTensor)>,
}

/// A part of a tensor in a file.
struct Part<'a> {
    /// Name of the tensor.
    tensor: &'a str,
    /// Position of the part in the tensor.
    offsets: Vec<usize>,
    /// Name of the file.
    file: &'a str,
    /// Range of the part's archive in the file.
    range: Range<usize>,
}

/// Returns the tensors in `Metadata.state_dict_metadata`.
fn tensors<'a>(pickle: &Pickle<'a>) -> Result<BTreeMap<&'a str, Described>, PickleError> {
    let field = pickle.field(Class::Metadata, pickle.root, "state_dict_metadata");
    let Some(entries) = field.and_then(|field| pickle.dict(field)) else {
        return Err("it is no metadata of a distributed checkpoint".to_string().into());
    };
    let mut tensors = BTreeMap::new();
    for &(name, value) in entries {
        let Value::Text(name) = name else { continue };
        if pickle.object(Class::Tensor, value).is_none() {
            continue;
        }
        let described = || {
            let properties = pickle.field(Class::Tensor, value, "properties")?;
            let state = pickle.object(Class::Properties, properties)?;
            let dtype = match pickle.sequence(state) {
                Some(state) => *state.first()?,
                None => pickle.field(Class::Properties, properties, "dtype")?,
            };
            let Value::Global(Global::Dtype(dtype)) = dtype else { return None };
            let shape = pickle.sizes(pickle.field(Class::Tensor, value, "size")?)?;
            Some(Described { dtype, shape, parts: Vec::new() })
        };
        let Some(described) = described() else {
            return Err(format!("the description of `{name}` is incomplete").into());
        };
        tensors.insert(name, described);
    }
    Ok(tensors)
}

/// Returns the parts of tensors in `Metadata.storage_data`.
fn parts<'a>(pickle: &Pickle<'a>) -> Result<Vec<Part<'a>>, PickleError> {
    let field = pickle.field(Class::Metadata, pickle.root, "storage_data");
    let Some(entries) = field.and_then(|field| pickle.dict(field)) else {
        return Err("it does not say where the tensors lie".to_string().into());
    };
    let mut parts = Vec::new();
    for &(index, info) in entries {
        let Some(Value::Text(tensor)) = pickle.field(Class::Index, index, "fqn") else {
            return Err("an entry has no name".to_string().into());
        };
        // Entries that are no tensors have no position.
        let offsets = pickle.field(Class::Index, index, "offset");
        let Some(offsets) = offsets.and_then(|offsets| pickle.sizes(offsets)) else { continue };
        let number = |name| pickle.field(Class::StorageInfo, info, name).and_then(size);
        let range = || {
            let (start, length) = (number("offset")?, number("length")?);
            Some(start..start.checked_add(length)?)
        };
        let file = pickle.field(Class::StorageInfo, info, "relative_path");
        let (Some(Value::Text(file)), Some(range)) = (file, range()) else {
            return Err(format!("a part of `{tensor}` has no place").into());
        };
        if !is_plain(file) {
            return Err(format!("`{file}`, of `{tensor}`, is no file name").into());
        }
        let transforms = pickle.field(Class::StorageInfo, info, "transform_descriptors");
        if transforms.is_some_and(|transforms| {
            pickle.sequence(transforms) != Some(&[][..]) && transforms != Value::Other
        }) {
            return Err(format!("a part of `{tensor}` is compressed").into());
        }
        parts.push(Part { tensor, offsets, file, range });
    }
    Ok(parts)
}
