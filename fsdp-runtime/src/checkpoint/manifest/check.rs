//! Checks of a manifest that need no other file.

use std::collections::BTreeSet;

use super::document::{FORMAT, Manifest, VERSION};
use super::dtype::Dtype;
use super::entries::{SplitEntry, TensorEntry};
use crate::error::CheckpointError;

/// Largest accepted number of bytes for one checksum: blocks above it could overflow sums of
/// offsets.
const MAX_CHECKSUM_BLOCK: u64 = 1 << 40;

impl Manifest {
    /// Checks that the parts of the manifest agree with each other. `file` is the name in errors.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Inconsistent`] with every contradiction.
    pub(in crate::checkpoint) fn check(&self, file: &str) -> Result<(), CheckpointError> {
        let problems = problems(self);
        if problems.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Inconsistent { file: file.into(), problems })
    }
}

/// Returns every contradiction in a manifest.
fn problems(manifest: &Manifest) -> Vec<String> {
    let Manifest { format, version, world_size, files, checksum_block, .. } = manifest;
    let mut problems = Vec::new();
    if format != FORMAT || *version == 0 || *version > VERSION {
        problems.push(format!("format `{format}`, version {version}"));
    }
    if *world_size == 0 || files.len() != *world_size {
        problems.push(format!("{} files for {world_size} ranks", files.len()));
    }
    for (name, model) in &manifest.models {
        let mesh = model.mesh;
        let ranks = mesh.replicate.checked_mul(mesh.shard).and_then(|n| n.checked_mul(mesh.tensor));
        if ranks != Some(*world_size) {
            problems.push(format!("`{name}`: a mesh of {mesh:?} for {world_size} ranks"));
        }
    }
    if *checksum_block == 0 || *checksum_block > MAX_CHECKSUM_BLOCK {
        problems.push(format!("checksums of {checksum_block} bytes each"));
        return problems;
    }
    for (name, tensor) in manifest.tensors() {
        if let Some(problem) = tensor_problem(tensor, files, *checksum_block) {
            problems.push(format!("`{name}`: {problem}"));
        }
    }
    for (optimizer, entry) in &manifest.optimizers {
        for (model, parameters) in &entry.models {
            let tensors = manifest.models.get(model).map(|model| &model.tensors);
            let known = |path: &String| tensors.is_some_and(|tensors| tensors.contains_key(path));
            problems.extend(parameters.keys().filter(|path| !known(path)).map(|path| {
                format!(
                    "optimizer `{optimizer}` has state of `{path}`, which is not in model `{model}`"
                )
            }));
        }
    }
    problems
}

/// Returns the first contradiction in a tensor's entry. `files` are the sizes of the ranks' files
/// and `block` the number of bytes of one checksum.
fn tensor_problem(tensor: &TensorEntry, files: &[u64], block: u64) -> Option<String> {
    if let Some(codes) = tensor.codes
        && (!codes.is_coded() || codes.wrong_block().is_some() || tensor.dtype != Dtype::U32)
    {
        return Some(format!("{:?} for codes of {codes}", tensor.dtype));
    }
    let numel = tensor.stored_numel().and_then(|numel| numel.checked_mul(tensor.copies));
    let bytes = numel.and_then(|numel| numel.checked_mul(tensor.dtype.size()));
    let (Some(numel), Some(_)) = (numel, bytes) else {
        return Some(format!("the shape {:?} overflows", tensor.shape));
    };
    if tensor.copies != 1 && tensor.copies != files.len() {
        return Some(format!("{} copies of {} ranks", tensor.copies, files.len()));
    }
    let parts = match tensor.split {
        Some(split) if !is_valid(split, tensor) => {
            return Some(format!("{split:?} of the shape {:?}", tensor.shape));
        }
        split => split.map_or(1, |split| split.parts),
    };
    let numel = numel / parts;
    let (mut part, mut covered) = (0, 0);
    let mut seen = BTreeSet::new();
    for piece in &tensor.pieces {
        if covered == numel && part + 1 < parts {
            (part, covered) = (part + 1, 0);
        }
        if piece.part != part {
            return Some(format!("a piece of part {} comes in part {part} of {parts}", piece.part));
        }
        if piece.start != covered || piece.end <= piece.start || piece.end > numel {
            return Some(format!(
                "the piece {}..{} comes after element {covered} of {numel}; pieces must tile the \
                 tensor",
                piece.start, piece.end
            ));
        }
        let Some(&file) = files.get(piece.file) else {
            return Some(format!("a piece lies in file {} of {}", piece.file, files.len()));
        };
        if !seen.insert(piece.file) {
            return Some(format!("two pieces lie in file {}", piece.file));
        }
        // Cannot overflow: the size of the tensor in bytes does not.
        let bytes = ((piece.end - piece.start) * tensor.dtype.size()) as u64;
        if bytes > file {
            return Some(format!("a piece of {bytes} bytes lies in a file of {file} bytes"));
        }
        if piece.checksums.len() as u64 != bytes.div_ceil(block) {
            return Some(format!(
                "{} checksums for a piece of {bytes} bytes",
                piece.checksums.len()
            ));
        }
        covered = piece.end;
    }
    let is_complete = covered == numel && (numel == 0 || part + 1 == parts);
    (!is_complete).then(|| match parts {
        1 => format!("pieces hold {covered} of {numel} elements"),
        _ => format!("pieces hold {covered} of {numel} elements of part {part}, of {parts} parts"),
    })
}

/// Returns whether a split divides the tensor in equal parts of elements that are stored one by one.
fn is_valid(split: SplitEntry, tensor: &TensorEntry) -> bool {
    let size = tensor.shape.get(split.dim);
    split.parts > 1
        && size.is_some_and(|size| size.is_multiple_of(split.parts))
        && tensor.codes.is_none()
        && tensor.copies == 1
}
