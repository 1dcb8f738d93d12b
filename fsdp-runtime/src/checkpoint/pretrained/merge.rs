//! Several safetensors files into one, without the model.

use std::path::Path;

use super::source::{Source, Stored};
use super::write::{Header, NewFile};
use crate::error::Error;

/// Merges a folder of safetensors files, as its `model.safetensors.index.json` (or one given by its
/// path) names them, into one file at `out`. Tensors are copied as they are, one at a time.
///
/// # Errors
///
/// [`LoadError`](crate::LoadError) for what is read, [`SaveError`](crate::SaveError) for what is
/// written.
pub fn merge_safetensors(from: impl AsRef<Path>, out: impl AsRef<Path>) -> Result<(), Error> {
    let source = Source::safetensors(from.as_ref())?;
    let header = |(name, tensor): (&String, &Stored)| Header {
        name: name.clone(),
        shape: tensor.shape.clone(),
        dtype: tensor.dtype,
        bytes: tensor.bytes().len() as u64,
    };
    let headers: Vec<Header> = source.tensors.iter().map(header).collect();
    let mut file = NewFile::safetensors(out.as_ref(), &headers)?;
    for tensor in source.tensors.values() {
        file.write(tensor.bytes())?;
        tensor.release();
    }
    file.complete()?.publish()?;
    Ok(())
}
