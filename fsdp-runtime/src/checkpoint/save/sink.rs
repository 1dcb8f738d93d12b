//! Destinations of one rank's part of a save: the rank's file, or memory first.

use std::ops::Range;
use std::path::Path;

use burn::tensor::{Bytes, DType};

use crate::checkpoint::manifest::{
    Dtype, Manifest, ParameterEntry, Piece, SplitEntry, TensorEntry, model_tensor_name,
    optimizer_tensor_name, rank_file_name,
};
use crate::checkpoint::rank_file::RankFileWriter;
use crate::checkpoint::scalar::Scalars;
use crate::error::CheckpointError;
use crate::layout::StorageType;

/// Estimated number of bytes that the header of a rank's file needs for a tensor, without the
/// tensor's path.
const HEADER_BYTES: usize = 160;

/// The place of a tensor in the manifest.
#[derive(Clone, Debug)]
pub(super) enum TensorOwner {
    /// A parameter of a model.
    Model { model: String, path: String },
    /// A tensor of an optimizer's state for a parameter.
    Optimizer { optimizer: String, model: String, path: String, name: String },
}

impl TensorOwner {
    /// Returns the tensor's name in a rank's file.
    pub(super) fn key(&self) -> String {
        match self {
            Self::Model { model, path } => model_tensor_name(model, path),
            Self::Optimizer { optimizer, model, path, name } => {
                optimizer_tensor_name(optimizer, model, path, name)
            }
        }
    }
}

/// The part of a tensor that this rank writes.
pub(super) struct TensorPart<'a> {
    pub(super) owner: TensorOwner,
    pub(super) dtype: DType,
    /// Form of the codes; `None` where the elements are stored one by one.
    pub(super) codes: Option<StorageType>,
    /// Full shape of one copy of the tensor.
    pub(super) shape: Vec<usize>,
    /// How tensor parallel ranks have split the tensor, and the number of this rank's part.
    pub(super) split: Option<(SplitEntry, usize)>,
    /// Number of copies of the tensor.
    pub(super) copies: usize,
    /// Range of elements, or words of codes, that this rank writes, counted over those of all copies.
    pub(super) range: Range<usize>,
    /// Values of the elements in `range`.
    pub(super) bytes: PartBytes<'a>,
}

/// Bytes of a [`TensorPart`].
pub(super) enum PartBytes<'a> {
    /// Memory of the tensor itself.
    Borrowed(&'a [u8]),
    /// A copy that already exists, and the byte range of the part in it.
    Copied(Bytes, Range<usize>),
}

impl PartBytes<'_> {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Copied(bytes, range) => &bytes[range.clone()],
        }
    }
}

/// A destination of the elements that this rank writes.
pub(super) trait Sink {
    /// Adds a part of a tensor. A part with an empty range adds the tensor to the manifest alone.
    fn tensor(&mut self, part: TensorPart<'_>) -> Result<(), CheckpointError>;

    /// Adds the numbers of an optimizer's state for a parameter.
    fn scalars(&mut self, optimizer: &str, model: &str, path: &str, scalars: Scalars);
}

/// A sink that writes a rank's file and collects the rank's part of the manifest.
pub(super) struct FileSink {
    file: RankFileWriter,
    manifest: Manifest,
    rank: usize,
}

impl FileSink {
    /// Creates the file of a rank in `folder`. `manifest` is the rank's part without tensors.
    pub(super) fn create(
        folder: &Path,
        rank: usize,
        manifest: Manifest,
    ) -> Result<Self, CheckpointError> {
        let paths = manifest.models.values().flat_map(|model| &model.units);
        let paths = paths.flat_map(|unit| &unit.parameters);
        let names: usize = paths.map(|path| path.len() + HEADER_BYTES).sum();
        // The parameter itself, and a few tensors of each optimizer's state: most keep two or
        // three.
        let names = names * (1 + 4 * manifest.optimizers.len());
        let file = RankFileWriter::create(folder.join(rank_file_name(rank)), names)?;
        Ok(Self { file, manifest, rank })
    }

    /// Completes the file and returns the rank's part of the manifest.
    pub(super) fn finish(self) -> Result<Manifest, CheckpointError> {
        let Self { file, mut manifest, rank } = self;
        manifest.files[rank] = file.finish()?;
        Ok(manifest)
    }

    fn parameter(&mut self, optimizer: &str, model: &str, path: &str) -> &mut ParameterEntry {
        let optimizer = self.manifest.optimizers.entry(optimizer.to_string()).or_default();
        let model = optimizer.models.entry(model.to_string()).or_default();
        model.entry(path.to_string()).or_default()
    }
}

impl Sink for FileSink {
    fn tensor(&mut self, part: TensorPart<'_>) -> Result<(), CheckpointError> {
        let key = part.owner.key();
        let Some(dtype) = Dtype::of(part.dtype) else {
            return Err(CheckpointError::UnsupportedDtype { tensor: key, dtype: part.dtype });
        };
        let split = part.split.map(|(split, _)| split);
        let mut tensor = TensorEntry {
            dtype,
            codes: part.codes,
            shape: part.shape,
            copies: part.copies,
            split,
            pieces: Vec::new(),
        };
        if !part.range.is_empty() {
            let checksums = self.file.write(&key, dtype, part.bytes.as_slice())?;
            let (start, end) = (part.range.start, part.range.end);
            let of = part.split.map_or(0, |(_, part)| part);
            tensor.pieces.push(Piece { file: self.rank, part: of, start, end, checksums });
        }
        match part.owner {
            TensorOwner::Model { model, path } => {
                if let Some(entry) = self.manifest.models.get_mut(&model) {
                    entry.tensors.insert(path, tensor);
                }
            }
            TensorOwner::Optimizer { optimizer, model, path, name } => {
                self.parameter(&optimizer, &model, &path).tensors.insert(name, tensor);
            }
        }
        Ok(())
    }

    fn scalars(&mut self, optimizer: &str, model: &str, path: &str, scalars: Scalars) {
        self.parameter(optimizer, model, path).scalars = scalars;
    }
}

/// A sink that copies this rank's elements to host memory, to be written while training continues.
#[derive(Default)]
pub(super) struct MemorySink {
    parts: Vec<TensorPart<'static>>,
    scalars: Vec<(String, String, String, Scalars)>,
}

impl Sink for MemorySink {
    fn tensor(&mut self, part: TensorPart<'_>) -> Result<(), CheckpointError> {
        let bytes = match part.bytes {
            PartBytes::Borrowed(bytes) => {
                PartBytes::Copied(Bytes::from_bytes_vec(bytes.to_vec()), 0..bytes.len())
            }
            PartBytes::Copied(bytes, range) => PartBytes::Copied(bytes, range),
        };
        let TensorPart { owner, dtype, codes, shape, split, copies, range, .. } = part;
        self.parts.push(TensorPart { owner, dtype, codes, shape, split, copies, range, bytes });
        Ok(())
    }

    fn scalars(&mut self, optimizer: &str, model: &str, path: &str, scalars: Scalars) {
        self.scalars.push((optimizer.into(), model.into(), path.into(), scalars));
    }
}

impl MemorySink {
    /// Moves everything to another sink, freeing each part once it has been written.
    pub(super) fn drain(self, sink: &mut dyn Sink) -> Result<(), CheckpointError> {
        for (optimizer, model, path, scalars) in self.scalars {
            sink.scalars(&optimizer, &model, &path, scalars);
        }
        self.parts.into_iter().try_for_each(|part| sink.tensor(part))
    }
}
