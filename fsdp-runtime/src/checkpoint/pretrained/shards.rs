//! The files of a folder that transformers loads: which tensor goes into which, and the steps in
//! which they take their names.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use super::write::{Complete, Header, failed, whole};
use super::{INDEX, SINGLE, SaveError};

/// One file to write.
#[derive(Debug)]
pub(crate) struct Shard<T> {
    pub(crate) file: String,
    pub(crate) tensors: Vec<ToWrite<T>>,
}

impl<T> Shard<T> {
    pub(crate) fn headers(&self) -> Vec<Header> {
        self.tensors.iter().map(|tensor| tensor.header.clone()).collect()
    }
}

/// A tensor to write.
#[derive(Debug)]
pub(crate) struct ToWrite<T> {
    /// Where its elements come from.
    pub(crate) from: T,
    pub(crate) header: Header,
    /// Rows and columns of the parameter, where the file holds it transposed.
    pub(crate) transpose: Option<[usize; 2]>,
}

/// Cuts the tensors into files of at most `max` bytes, as transformers does: a tensor that does not
/// fit any more begins the next file.
pub(crate) fn cut<T>(tensors: Vec<ToWrite<T>>, max: u64) -> Vec<Shard<T>> {
    let mut groups: Vec<Vec<ToWrite<T>>> = vec![Vec::new()];
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

/// Gives the complete files and `others` beside them their names, and removes the weights they
/// replace.
pub(crate) fn publish<T>(
    folder: &Path,
    shards: &[Shard<T>],
    files: Vec<Complete>,
    others: &[(String, Vec<u8>)],
) -> Result<(), SaveError> {
    let others: Result<Vec<_>, _> =
        others.iter().map(|(name, contents)| whole(&folder.join(name), contents)).collect();
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

fn index_of<T>(shards: &[Shard<T>]) -> Vec<u8> {
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

    fn tensor(entry: usize, bytes: u64) -> ToWrite<()> {
        let header = Header {
            name: entry.to_string(),
            shape: vec![],
            dtype: safetensors::Dtype::F32,
            bytes,
        };
        ToWrite { from: (), header, transpose: None }
    }

    fn sizes(bytes: &[u64], max: u64) -> Vec<Vec<u64>> {
        let tensors = bytes.iter().enumerate().map(|(entry, &bytes)| tensor(entry, bytes));
        let of =
            |shard: &Shard<()>| shard.tensors.iter().map(|tensor| tensor.header.bytes).collect();
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
