//! The weights files of a folder that transformers loads: how tensors are divided among them, and
//! how they replace the files of an earlier save.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use super::file_names::{INDEX, SINGLE, is_numbered};
use super::safetensors_file::{CompleteFile, TensorHeader, save_error, small_file};
use crate::error::SaveError;

/// A weights file to write. `T` is the source of a tensor's elements.
#[derive(Debug)]
pub(in crate::checkpoint) struct WeightsFile<T> {
    /// File name without the folder.
    pub(in crate::checkpoint) name: String,
    pub(in crate::checkpoint) tensors: Vec<TensorToWrite<T>>,
}

impl<T> WeightsFile<T> {
    /// Returns the headers of the tensors, in order.
    pub(in crate::checkpoint) fn headers(&self) -> Vec<TensorHeader> {
        self.tensors.iter().map(|tensor| tensor.header.clone()).collect()
    }
}

/// A tensor to write.
#[derive(Debug)]
pub(in crate::checkpoint) struct TensorToWrite<T> {
    /// Source of the elements.
    pub(in crate::checkpoint) source: T,
    pub(in crate::checkpoint) header: TensorHeader,
    /// Shape `[rows, columns]` of the parameter, where the file has the transpose.
    pub(in crate::checkpoint) transpose: Option<[usize; 2]>,
}

/// Divides the tensors, in order, into files of at most `max` bytes. A tensor larger than that gets
/// a file of its own. transformers divides tensors by this rule too.
pub(in crate::checkpoint) fn split_into_files<T>(
    tensors: Vec<TensorToWrite<T>>,
    max: u64,
) -> Vec<WeightsFile<T>> {
    let mut files: Vec<Vec<TensorToWrite<T>>> = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in tensors {
        let file = files.last_mut().expect("there is at least one file");
        if !file.is_empty() && bytes + tensor.header.bytes > max {
            bytes = 0;
            files.push(Vec::new());
        }
        bytes += tensor.header.bytes;
        files.last_mut().expect("there is at least one file").push(tensor);
    }
    let count = files.len();
    let name = |index: usize| match count {
        1 => SINGLE.to_string(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    let named = |(index, tensors)| WeightsFile { name: name(index), tensors };
    files.into_iter().enumerate().map(named).collect()
}

/// Renames the complete `files`, and `others` as name and contents, to their names in `folder`, and
/// removes the weights files that they replace.
pub(in crate::checkpoint) fn publish<T>(
    folder: &Path,
    weights: &[WeightsFile<T>],
    files: Vec<CompleteFile>,
    others: &[(String, Vec<u8>)],
) -> Result<(), SaveError> {
    let others: Result<Vec<_>, _> =
        others.iter().map(|(name, contents)| small_file(&folder.join(name), contents)).collect();
    let index = (weights.len() > 1).then(|| small_file(&folder.join(INDEX), &index_of(weights)));
    let (others, index) = (others?, index.transpose()?);
    // An old index that names files about to be replaced must go first.
    if index.is_some() && weights.iter().any(|file| folder.join(&file.name).exists()) {
        remove(&folder.join(INDEX))?;
    }
    for file in others.into_iter().chain(files).chain(index) {
        file.publish()?;
    }
    // Loaders prefer a single file to an index: remove the one that an earlier save may have left.
    remove(&folder.join(if weights.len() > 1 { SINGLE } else { INDEX }))?;
    let entries = std::fs::read_dir(folder)
        .map_err(|error| save_error(&folder.display().to_string(), &error))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if is_numbered(name) && weights.iter().all(|file| file.name != name) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Deletes a file that may not exist.
fn remove(path: &Path) -> Result<(), SaveError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(save_error(&path.display().to_string(), &error))
        }
        _ => Ok(()),
    }
}

/// Returns the text of the index: which file has which tensor.
fn index_of<T>(weights: &[WeightsFile<T>]) -> Vec<u8> {
    let tensors = || weights.iter().flat_map(|file| &file.tensors);
    let total: u64 = tensors().map(|tensor| tensor.header.bytes).sum();
    let map: BTreeMap<&str, &str> = weights
        .iter()
        .flat_map(|file| {
            file.tensors.iter().map(|tensor| (tensor.header.name.as_str(), file.name.as_str()))
        })
        .collect();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    format!("{index:#}\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(entry: usize, bytes: u64) -> TensorToWrite<()> {
        let header = TensorHeader {
            name: entry.to_string(),
            shape: vec![],
            dtype: safetensors::Dtype::F32,
            bytes,
        };
        TensorToWrite { source: (), header, transpose: None }
    }

    fn sizes(bytes: &[u64], max: u64) -> Vec<Vec<u64>> {
        let tensors = bytes.iter().enumerate().map(|(entry, &bytes)| tensor(entry, bytes));
        let of = |file: &WeightsFile<()>| {
            file.tensors.iter().map(|tensor| tensor.header.bytes).collect()
        };
        split_into_files(tensors.collect(), max).iter().map(of).collect()
    }

    #[test]
    fn tensors_are_split_in_order_and_a_large_one_gets_its_own_file() {
        assert_eq!(sizes(&[4, 4, 4], 12), [vec![4, 4, 4]]);
        assert_eq!(sizes(&[4, 4, 4], 11), [vec![4, 4], vec![4]]);
        assert_eq!(sizes(&[20, 4, 20, 4], 8), [vec![20], vec![4], vec![20], vec![4]]);
        assert_eq!(sizes(&[4, 4], 0), [vec![4], vec![4]]);
        let names = split_into_files(vec![tensor(0, 9), tensor(1, 9)], 10);
        let names: Vec<_> = names.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
    }
}
