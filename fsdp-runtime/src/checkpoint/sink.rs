//! Where one rank's part of a save goes: to its file at once, or to memory first.

use std::ops::Range;
use std::path::Path;

use burn::tensor::{Bytes, DType};

use super::manifest::{
    Dtype, Manifest, ParameterEntry, Piece, TensorEntry, model_key, optimizer_key, rank_file,
};
use super::rank_file;
use super::scalar::Scalars;
use crate::error::CheckpointError;

/// Where a tensor belongs in a manifest.
#[derive(Clone, Debug)]
pub(crate) enum Owner {
    Model { model: String, path: String },
    Optimizer { optimizer: String, model: String, path: String, name: String },
}

impl Owner {
    /// Its name in a rank's file.
    pub(crate) fn key(&self) -> String {
        match self {
            Self::Model { model, path } => model_key(model, path),
            Self::Optimizer { optimizer, model, path, name } => {
                optimizer_key(optimizer, model, path, name)
            }
        }
    }
}

/// Elements that this rank writes.
pub(crate) struct Part<'a> {
    pub(crate) owner: Owner,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// How many copies of the tensor there are; `range` goes over all of them.
    pub(crate) copies: usize,
    pub(crate) range: Range<usize>,
    pub(crate) bytes: Elements<'a>,
}

/// Their bytes.
pub(crate) enum Elements<'a> {
    /// The tensor's own memory.
    Borrowed(&'a [u8]),
    /// A copy that was made already, and the bytes of it that are meant.
    Copied(Bytes, Range<usize>),
}

impl Elements<'_> {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Copied(bytes, range) => &bytes[range.clone()],
        }
    }
}

/// What takes the parts of a save.
pub(crate) trait Sink {
    /// Takes a part.
    fn part(&mut self, part: Part<'_>) -> Result<(), CheckpointError>;
    /// Takes an optimizer's numbers for a parameter.
    fn scalars(&mut self, optimizer: &str, model: &str, path: &str, scalars: Scalars);
}

/// A rank's file and its part of the manifest, as they are written.
pub(crate) struct FileSink {
    file: rank_file::Writer,
    manifest: Manifest,
    rank: usize,
}

impl FileSink {
    /// Creates the file of a rank in `folder`. `manifest` has all but the tensors.
    pub(crate) fn create(
        folder: &Path,
        rank: usize,
        manifest: Manifest,
    ) -> Result<Self, CheckpointError> {
        // The path, and the numbers around it; optimizers keep two or three tensors a parameter.
        let paths = manifest.models.values().flat_map(|model| &model.units);
        let paths = paths.flat_map(|unit| &unit.parameters);
        let names: usize = paths.map(|path| path.len() + 160).sum();
        let names = names * (1 + 4 * manifest.optimizers.len());
        let file = rank_file::Writer::create(folder.join(rank_file(rank)), names)?;
        Ok(Self { file, manifest, rank })
    }

    /// Ends the file; returns this rank's part of the manifest.
    pub(crate) fn finish(self) -> Result<Manifest, CheckpointError> {
        let Self { file, mut manifest, rank } = self;
        manifest.files[rank] = file.finish()?;
        Ok(manifest)
    }
}

impl Sink for FileSink {
    fn part(&mut self, part: Part<'_>) -> Result<(), CheckpointError> {
        let key = part.owner.key();
        let Some(dtype) = Dtype::of(part.dtype) else {
            return Err(CheckpointError::UnsupportedDtype { tensor: key, dtype: part.dtype });
        };
        let mut tensor =
            TensorEntry { dtype, shape: part.shape, copies: part.copies, pieces: Vec::new() };
        if !part.range.is_empty() {
            let checksums = self.file.write(&key, dtype, part.bytes.as_slice())?;
            let (start, end) = (part.range.start, part.range.end);
            tensor.pieces.push(Piece { file: self.rank, start, end, checksums });
        }
        match part.owner {
            Owner::Model { model, path } => {
                if let Some(entry) = self.manifest.models.get_mut(&model) {
                    entry.tensors.insert(path, tensor);
                }
            }
            Owner::Optimizer { optimizer, model, path, name } => {
                self.parameter(&optimizer, &model, &path).tensors.insert(name, tensor);
            }
        }
        Ok(())
    }

    fn scalars(&mut self, optimizer: &str, model: &str, path: &str, scalars: Scalars) {
        self.parameter(optimizer, model, path).scalars = scalars;
    }
}

impl FileSink {
    fn parameter(&mut self, optimizer: &str, model: &str, path: &str) -> &mut ParameterEntry {
        let optimizer = self.manifest.optimizers.entry(optimizer.to_string()).or_default();
        let model = optimizer.models.entry(model.to_string()).or_default();
        model.entry(path.to_string()).or_default()
    }
}

/// A copy of this rank's parts, to be written while training goes on.
#[derive(Default)]
pub(crate) struct MemorySink {
    parts: Vec<Part<'static>>,
    scalars: Vec<(String, String, String, Scalars)>,
}

impl Sink for MemorySink {
    fn part(&mut self, part: Part<'_>) -> Result<(), CheckpointError> {
        let bytes = match part.bytes {
            Elements::Borrowed(bytes) => {
                Elements::Copied(Bytes::from_bytes_vec(bytes.to_vec()), 0..bytes.len())
            }
            Elements::Copied(bytes, range) => Elements::Copied(bytes, range),
        };
        let Part { owner, dtype, shape, copies, range, .. } = part;
        self.parts.push(Part { owner, dtype, shape, copies, range, bytes });
        Ok(())
    }

    fn scalars(&mut self, optimizer: &str, model: &str, path: &str, scalars: Scalars) {
        self.scalars.push((optimizer.into(), model.into(), path.into(), scalars));
    }
}

impl MemorySink {
    /// Hands everything on, freeing each part once it was taken.
    pub(crate) fn drain(self, sink: &mut dyn Sink) -> Result<(), CheckpointError> {
        for (optimizer, model, path, scalars) in self.scalars {
            sink.scalars(&optimizer, &model, &path, scalars);
        }
        self.parts.into_iter().try_for_each(|part| sink.part(part))
    }
}
