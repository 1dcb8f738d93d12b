//! The tensors of a file that `torch.save` wrote.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::mapped::{MappedFile, MappedTensor};
use super::archive::Archive;
use super::machine::read_pickle;
use super::pickle::{Node, Pickle, PickleError, TensorRef, Value};
use crate::error::LoadError;

/// First bytes of an archive.
const ARCHIVE: &[u8] = b"PK\x03\x04";
/// First bytes of the format that PyTorch wrote before version 1.6.
const LEGACY: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
/// Number of dicts within dicts that are searched for tensors.
const DEPTH: usize = 32;

/// Returns whether the bytes begin as a file of `torch.save` does.
pub(in super::super) fn is_archive(file: &MappedFile) -> bool {
    file.as_ref().starts_with(ARCHIVE) || file.as_ref().starts_with(LEGACY)
}

/// Returns the tensors of a file that `torch.save` wrote. Keys of dicts within dicts are joined by
/// dots; values that are no tensors are left out. `label` names the file in errors.
///
/// # Errors
///
/// [`LoadError::UnsafePickle`] where the pickle imports a name that weights do not need, and
/// [`LoadError::Format`] where the file cannot be read.
pub(in super::super) fn saved_file(
    label: &str,
    file: &MappedFile,
) -> Result<BTreeMap<String, MappedTensor>, LoadError> {
    if file.as_ref().starts_with(LEGACY) {
        let reason =
            "it was written before PyTorch 1.6; load it there and save it again".to_string();
        return Err(load_error(label, reason.into()));
    }
    let saved = Saved::open(file, 0..file.as_ref().len());
    saved.and_then(|saved| saved.tensors()).map_err(|error| load_error(label, error))
}

/// Returns the error for a file of PyTorch that is refused.
pub(super) fn load_error(label: &str, error: PickleError) -> LoadError {
    match error {
        PickleError::Global(global) => LoadError::UnsafePickle { file: label.to_string(), global },
        PickleError::Invalid(reason) => {
            LoadError::Format { file: label.to_string(), format: "file of PyTorch", reason }
        }
    }
}

/// An archive of `torch.save` in a file, whose pickle was read.
pub(super) struct Saved<'a> {
    file: &'a MappedFile,
    /// Range of the archive in the file.
    within: Range<usize>,
    archive: Archive,
    pickle: Pickle<'a>,
    /// Length of the pickle in bytes.
    length: usize,
}

impl<'a> Saved<'a> {
    /// Opens the archive in a range of a file.
    pub(super) fn open(file: &'a MappedFile, within: Range<usize>) -> Result<Self, PickleError> {
        let Some(bytes) = file.as_ref().get(within.clone()) else {
            return Err(format!("an archive at {within:?} exceeds the file").into());
        };
        let archive = Archive::open(bytes)?;
        if archive.has("byteorder") && &bytes[archive.record("byteorder")?] != b"little" {
            return Err("its numbers are not little-endian".to_string().into());
        }
        let pickle = archive.record(Archive::PICKLE)?;
        let length = pickle.len();
        let pickle = read_pickle(&bytes[pickle])?;
        Ok(Self { file, within, archive, pickle, length })
    }

    /// Returns the tensor that the archive consists of.
    pub(super) fn only_tensor(&self) -> Result<MappedTensor, PickleError> {
        match self.pickle.node(self.pickle.root) {
            Some(Node::Tensor(tensor)) => self.tensor(tensor),
            _ => Err("it holds no single tensor".to_string().into()),
        }
    }

    /// Returns the tensors of a dict, and of dicts within it.
    fn tensors(&self) -> Result<BTreeMap<String, MappedTensor>, PickleError> {
        let mut tensors = BTreeMap::new();
        // Dicts may contain themselves, or one dict many times: bounds on depth, and on the lengths
        // of all names, end the search.
        let mut names = self.length.saturating_mul(4).saturating_add(1 << 16);
        let mut open = vec![(String::new(), self.pickle.root, 0)];
        if self.pickle.dict(self.pickle.root).is_none() {
            return Err("it holds no dict of tensors, as `model.state_dict()` is"
                .to_string()
                .into());
        }
        while let Some((prefix, dict, depth)) = open.pop() {
            for &(key, value) in self.pickle.dict(dict).unwrap_or_default() {
                let name = match key {
                    Value::Text(key) => format!("{prefix}{key}"),
                    Value::Int(key) => format!("{prefix}{key}"),
                    _ => continue,
                };
                let within = names.checked_sub(name.len() + 1).filter(|_| depth < DEPTH);
                let Some(rest) = within else {
                    return Err("it has dicts within dicts without end".to_string().into());
                };
                names = rest;
                match self.pickle.node(value) {
                    Some(Node::Dict(_)) => open.push((name + ".", value, depth + 1)),
                    Some(Node::Tensor(tensor)) => {
                        let mapped = self.tensor(tensor);
                        let mapped = mapped.map_err(|error| in_tensor(&name, error))?;
                        if tensors.insert(name.clone(), mapped).is_some() {
                            return Err(format!("it has two tensors `{name}`").into());
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(tensors)
    }

    /// Returns a tensor of the pickle as one in the file.
    fn tensor(&self, tensor: &TensorRef<'_>) -> Result<MappedTensor, PickleError> {
        let TensorRef { storage, offset, shape, strides } = tensor;
        let record = self.archive.record(&format!("data/{}", storage.key))?;
        let start = self.within.start;
        let range = start + record.start..start + record.end;
        let (shape, strides) = (shape.clone(), strides.clone());
        Ok(MappedTensor::strided(self.file, storage.dtype, &range, *offset, shape, strides)?)
    }
}

/// Adds the name of a tensor to an error.
fn in_tensor(name: &str, error: PickleError) -> PickleError {
    match error {
        PickleError::Invalid(reason) => PickleError::Invalid(format!("`{name}`: {reason}")),
        PickleError::Global(_) => error,
    }
}
