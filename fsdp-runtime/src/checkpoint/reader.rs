//! Reading a checkpoint folder: the manifest, and any range of any tensor.

use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use burn::tensor::TensorData;

use super::io_error::io_error;
use super::manifest::{Dtype, MANIFEST, Manifest, Piece, TensorEntry, rank_file_name};
use super::rank_file::RankFileReader;
use crate::error::CheckpointError;

/// A checkpoint folder whose manifest has been read and checked. Ranks' files are opened on first
/// use.
#[derive(Debug)]
pub(super) struct CheckpointReader {
    path: PathBuf,
    manifest: Manifest,
    files: Vec<OnceLock<Result<RankFileReader, CheckpointError>>>,
}

impl CheckpointReader {
    /// Opens the folder at `path`, and reads and checks the manifest.
    pub(super) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = path.join(MANIFEST);
        let mut text = Vec::new();
        match File::open(&file) {
            Ok(mut opened) => opened.read_to_end(&mut text).map_err(io_error("read", &file))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(without_manifest(path, &file, error));
            }
            Err(error) => return Err(io_error("read", &file)(error)),
        };
        let manifest = Manifest::parse(&text, &file.display().to_string())?;
        let files = manifest.files.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { path: path.to_path_buf(), manifest, files })
    }

    /// Returns the manifest.
    pub(super) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the folder's path, for error messages.
    pub(super) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Checks that `range`, in elements of the flattened tensor, can be read and matches the
    /// manifest's checksums. `key` is the tensor's name in the ranks' files.
    pub(super) fn verify(
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

    /// Copies `range`, in elements of the flattened tensor, to `target`. The range must have passed
    /// [`verify`](Self::verify).
    pub(super) fn read(
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

    /// Reads `range`, in elements of the flattened tensor, as a tensor of the given shape. The
    /// range must have passed [`verify`](Self::verify).
    pub(super) fn data(
        &self,
        key: &str,
        tensor: &TensorEntry,
        range: Range<usize>,
        shape: Vec<usize>,
    ) -> Result<TensorData, CheckpointError> {
        // A tensor of codes has elements with the bits of the words.
        if tensor.dtype == Dtype::F32 || tensor.codes.is_some() {
            // A vector of f32 is aligned for f32, so that the tensor takes it without a copy.
            let mut elements = vec![0f32; range.len()];
            self.read(key, tensor, range, bytemuck::cast_slice_mut(&mut elements))?;
            return Ok(TensorData::new(elements, shape));
        }
        let mut bytes = vec![0; range.len() * tensor.dtype.size()];
        self.read(key, tensor, range, &mut bytes)?;
        Ok(TensorData::from_bytes_vec(bytes, shape, tensor.dtype.burn()))
    }

    /// Returns the reader of a rank's file, which the first call opens.
    fn reader(&self, rank: usize) -> Result<&RankFileReader, CheckpointError> {
        let open = || {
            RankFileReader::open(self.path.join(rank_file_name(rank)), self.manifest.files[rank])
        };
        self.files[rank].get_or_init(open).as_ref().map_err(Clone::clone)
    }
}

/// Returns the pieces of a tensor that overlap `range`, each with the overlap.
fn overlaps<'a>(
    tensor: &'a TensorEntry,
    range: &'a Range<usize>,
) -> impl Iterator<Item = (&'a Piece, Range<usize>)> {
    let part = |piece: &Piece| piece.start.max(range.start)..piece.end.min(range.end);
    tensor.pieces.iter().map(move |piece| (piece, part(piece))).filter(|(_, part)| !part.is_empty())
}

/// Returns the error for a folder without a manifest: torn if it holds files of a save, else not a
/// checkpoint.
fn without_manifest(path: &Path, file: &Path, error: std::io::Error) -> CheckpointError {
    let is_rank_file = |name: &str| name.starts_with("rank-");
    let names = match path.read_dir() {
        Ok(entries) => entries.flatten().map(|entry| entry.file_name()).collect::<Vec<_>>(),
        Err(_) => return io_error("read", path)(error),
    };
    let ours = names.iter().filter_map(|name| name.to_str()).any(is_rank_file);
    let marked =
        path.file_name().and_then(|name| name.to_str()).is_some_and(|n| n.contains(".tmp-"));
    if ours || marked {
        return CheckpointError::Torn { folder: path.display().to_string() };
    }
    let reason = "there is no such file, and no other file of a checkpoint in its folder".into();
    CheckpointError::NotAManifest { file: file.display().to_string(), reason }
}
