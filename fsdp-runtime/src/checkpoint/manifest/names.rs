//! Names of files in a checkpoint folder, and of tensors in a rank's file.

/// File name of the manifest in a checkpoint folder.
pub const MANIFEST: &str = "manifest.json";

/// Returns the name of a rank's file: `rank-00000.safetensors`.
pub(in crate::checkpoint) fn rank_file_name(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

/// Returns the name of a parameter in the ranks' files.
pub(in crate::checkpoint) fn model_tensor_name(model: &str, path: &str) -> String {
    format!("model/{model}/{path}")
}

/// Returns the name of one tensor of an optimizer's state in the ranks' files.
pub(in crate::checkpoint) fn optimizer_tensor_name(
    optimizer: &str,
    model: &str,
    path: &str,
    name: &str,
) -> String {
    format!("optimizer/{optimizer}/{model}/{path}/{name}")
}
