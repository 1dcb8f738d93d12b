//! Names of weights files, as transformers writes and reads them.

use std::path::{Component, Path};

/// Name of a model's only weights file.
pub(super) const SINGLE: &str = "model.safetensors";
/// Name of the index of several weights files.
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// Name of a model's only weights file of `torch.save`.
const SINGLE_BIN: &str = "pytorch_model.bin";
/// Name of the index of several weights files of `torch.save`.
const INDEX_BIN: &str = "pytorch_model.bin.index.json";
/// Name of the file that describes a folder of `torch.distributed.checkpoint`.
pub(super) const METADATA: &str = ".metadata";
/// Names by which a folder of weights is recognised, the preferred ones first.
pub(super) const FOLDER: [&str; 5] = [SINGLE, INDEX, SINGLE_BIN, INDEX_BIN, METADATA];

/// Returns whether `name` is the name of a file in the same folder, without any path.
pub(super) fn is_plain(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
        && !name.contains(['/', '\\'])
}

/// Returns whether `name` is that of one of several weights files:
/// `model-00001-of-00002.safetensors`.
pub(super) fn is_numbered(name: &str) -> bool {
    let number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    name.strip_prefix("model-")
        .and_then(|name| name.strip_suffix(".safetensors"))
        .and_then(|name| name.split_once("-of-"))
        .is_some_and(|(index, count)| number(index) && number(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_weights_files_are_numbered() {
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
