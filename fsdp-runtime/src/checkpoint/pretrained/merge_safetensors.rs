//! Merging several safetensors files into one, without the model.

use std::path::Path;

use super::safetensors_file::{NewFile, TensorHeader};
use super::source::{MappedTensor, Source};
use crate::error::Error;

/// Merges the safetensors files named by an index into one file at `out`. `from` is the index, or a
/// folder with `model.safetensors.index.json`. Tensors are copied unchanged, one at a time.
///
/// # Errors
///
/// [`LoadError`](crate::LoadError) where the input cannot be read, [`SaveError`](crate::SaveError)
/// where the output cannot be written.
pub fn merge_safetensors(from: impl AsRef<Path>, out: impl AsRef<Path>) -> Result<(), Error> {
    let source = Source::safetensors(from.as_ref())?;
    let header = |(name, tensor): (&String, &MappedTensor)| TensorHeader {
        name: name.clone(),
        shape: tensor.shape.clone(),
        dtype: tensor.dtype,
        bytes: tensor.bytes().len() as u64,
    };
    let headers: Vec<TensorHeader> = source.tensors.iter().map(header).collect();
    let mut file = NewFile::safetensors(out.as_ref(), &headers)?;
    for tensor in source.tensors.values() {
        file.write(tensor.bytes())?;
        tensor.release();
    }
    file.complete()?.publish()?;
    Ok(())
}
