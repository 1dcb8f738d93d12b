//! Merging weights files into one safetensors file, without the model.

use std::path::Path;

use super::mapped::MappedTensor;
use super::safetensors_file::{NewFile, TensorHeader};
use super::source::Source;
use crate::error::Error;

/// Merges the weights files named by an index into one safetensors file at `out`. `from` is the
/// index, a folder with `model.safetensors.index.json`, or any weights that
/// [`StateMut::load_safetensors`](crate::checkpoint::StateMut::load_safetensors) reads. Tensors are
/// copied unchanged, one at a time.
///
/// # Errors
///
/// [`LoadError`](crate::errors::LoadError) where the input cannot be read, [`SaveError`](crate::errors::SaveError)
/// where the output cannot be written.
pub fn merge_safetensors(from: impl AsRef<Path>, out: impl AsRef<Path>) -> Result<(), Error> {
    let source = Source::open(from.as_ref())?;
    let header = |(name, tensor): (&String, &MappedTensor)| TensorHeader {
        name: name.clone(),
        shape: tensor.shape.clone(),
        dtype: tensor.dtype,
        bytes: tensor.bytes(),
    };
    let headers: Vec<TensorHeader> = source.tensors.iter().map(header).collect();
    let mut file = NewFile::safetensors(out.as_ref(), &headers)?;
    for tensor in source.tensors.values() {
        file.write(&tensor.row_major_bytes())?;
        tensor.release();
    }
    file.complete()?.publish()?;
    Ok(())
}
