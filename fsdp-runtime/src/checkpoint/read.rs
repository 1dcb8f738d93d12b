//! A checkpoint folder to read from: its manifest, and any range of any tensor in it.

use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use burn::tensor::TensorData;

use super::io;
use super::manifest::{Dtype, MANIFEST, Manifest, Piece, TensorEntry, rank_file};
use super::rank_file::Reader;
use crate::error::CheckpointError;

/// A checkpoint whose manifest was read and found sound.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    manifest: Manifest,
    files: Vec<OnceLock<Result<Reader, CheckpointError>>>,
}

impl Folder {
    /// Reads and checks the manifest.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = path.join(MANIFEST);
        let mut text = Vec::new();
        match File::open(&file) {
            Ok(mut opened) => opened.read_to_end(&mut text).map_err(io("read", &file))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(without_manifest(path, &file, error));
            }
            Err(error) => return Err(io("read", &file)(error)),
        };
        let manifest = Manifest::parse(&text, &file.display().to_string())?;
        let files = manifest.files.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { path: path.to_path_buf(), manifest, files })
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The folder's name, for messages.
    pub(crate) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Checks that `range`, in elements, of a tensor can be read and has the manifest's checksums.
    pub(crate) fn verify(
        &self,
        key: &str,
        tensor: &TensorEntry,
        range: Range<usize>,
    ) -> Result<(), CheckpointError> {
        let size = tensor.dtype.size();
        for (piece, part) in overlaps(tensor, &range) {
            let reader = self.reader(piece.file)?;
            reader.check(key, tensor.dtype, piece)?;
            let bytes = (part.start - piece.start) * size..(part.end - piece.start) * size;
            reader.verify(key, piece, bytes, self.manifest.checksum_block)?;
        }
        Ok(())
    }

    /// Copies `range`, in elements, of a tensor that was verified.
    pub(crate) fn read(
        &self,
        key: &str,
        tensor: &TensorEntry,
        range: Range<usize>,
        target: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let size = tensor.dtype.size();
        for (piece, part) in overlaps(tensor, &range) {
            let bytes = (part.start - piece.start) * size..(part.end - piece.start) * size;
            let to = (part.start - range.start) * size..(part.end - range.start) * size;
            self.reader(piece.file)?.read(key, bytes, &mut target[to])?;
        }
        Ok(())
    }

    /// `range`, in elements, of a tensor that was verified, in the given shape.
    pub(crate) fn data(
        &self,
        key: &str,
        tensor: &TensorEntry,
        range: Range<usize>,
        shape: Vec<usize>,
    ) -> Result<TensorData, CheckpointError> {
        if tensor.dtype == Dtype::F32 {
            // Aligned as f32, so that the tensor keeps this very memory.
            let mut elements = vec![0f32; range.len()];
            self.read(key, tensor, range, bytemuck::cast_slice_mut(&mut elements))?;
            return Ok(TensorData::new(elements, shape));
        }
        let mut bytes = vec![0; range.len() * tensor.dtype.size()];
        self.read(key, tensor, range, &mut bytes)?;
        Ok(TensorData::from_bytes_vec(bytes, shape, tensor.dtype.burn()))
    }

    /// A rank's file, opened once.
    fn reader(&self, rank: usize) -> Result<&Reader, CheckpointError> {
        let open = || Reader::open(self.path.join(rank_file(rank)), self.manifest.files[rank]);
        self.files[rank].get_or_init(open).as_ref().map_err(Clone::clone)
    }
}

/// The pieces of a tensor that hold part of a range, and that part.
fn overlaps<'a>(
    tensor: &'a TensorEntry,
    range: &'a Range<usize>,
) -> impl Iterator<Item = (&'a Piece, Range<usize>)> {
    let part = |piece: &Piece| piece.start.max(range.start)..piece.end.min(range.end);
    tensor.pieces.iter().map(move |piece| (piece, part(piece))).filter(|(_, part)| !part.is_empty())
}

/// What a folder without a manifest is.
fn without_manifest(path: &Path, file: &Path, error: std::io::Error) -> CheckpointError {
    let is_rank_file = |name: &str| name.starts_with("rank-");
    let names = match path.read_dir() {
        Ok(entries) => entries.flatten().map(|entry| entry.file_name()).collect::<Vec<_>>(),
        Err(_) => return io("read", path)(error),
    };
    let ours = names.iter().filter_map(|name| name.to_str()).any(is_rank_file);
    let marked =
        path.file_name().and_then(|name| name.to_str()).is_some_and(|n| n.contains(".tmp-"));
    if ours || marked {
        return CheckpointError::Torn { folder: path.display().to_string() };
    }
    let reason = "there is no such file, and nothing else of a checkpoint in its folder".into();
    CheckpointError::NotAManifest { file: file.display().to_string(), reason }
}
