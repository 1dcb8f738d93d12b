//! Reading a checkpoint folder: the manifest, and any range of any tensor.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use burn::tensor::TensorData;

use super::io_error::io_error;
use super::manifest::{Dtype, MANIFEST, Manifest, Piece, SplitEntry, TensorEntry, rank_file_name};
use super::rank_file::RankFileReader;
use crate::error::CheckpointError;
use crate::layout::parts_of;

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

    /// Checks that `ranges`, in elements of the flattened tensor, can be read and match the
    /// manifest's checksums. `key` is the tensor's name in the ranks' files.
    pub(super) fn verify(
        &self,
        key: &str,
        tensor: &TensorEntry,
        ranges: &[Range<usize>],
    ) -> Result<(), CheckpointError> {
        let size = tensor.dtype.size();
        // Elements that lie apart in one piece are verified with those between them, once.
        let mut parts: BTreeMap<usize, (&Piece, Range<usize>)> = BTreeMap::new();
        for Overlap { piece, part, .. } in ranges.iter().flat_map(|range| overlaps(tensor, range)) {
            let (_, known) = parts.entry(piece.file).or_insert((piece, part.clone()));
            *known = known.start.min(part.start)..known.end.max(part.end);
        }
        for (piece, part) in parts.into_values() {
            let reader = self.reader(piece.file)?;
            reader.check(key, tensor.dtype, piece)?;
            let bytes = (part.start - piece.start) * size..(part.end - piece.start) * size;
            reader.verify(key, piece, bytes, self.manifest.checksum_block)?;
        }
        Ok(())
    }

    /// Copies `ranges`, in elements of the flattened tensor, to `target`, one after the other. The ranges
    /// must have passed [`verify`](Self::verify).
    pub(super) fn read(
        &self,
        key: &str,
        tensor: &TensorEntry,
        ranges: &[Range<usize>],
        target: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let size = tensor.dtype.size();
        let mut first = 0;
        for range in ranges {
            for Overlap { piece, part, at } in overlaps(tensor, range) {
                let bytes = (part.start - piece.start) * size..(part.end - piece.start) * size;
                let to = (first + at) * size..(first + at + part.len()) * size;
                self.reader(piece.file)?.read(key, bytes, &mut target[to])?;
            }
            first += range.len();
        }
        Ok(())
    }

    /// Reads `ranges`, in elements of the flattened tensor, as a tensor of the given shape. The
    /// ranges must have passed [`verify`](Self::verify).
    pub(super) fn data(
        &self,
        key: &str,
        tensor: &TensorEntry,
        ranges: &[Range<usize>],
        shape: Vec<usize>,
    ) -> Result<TensorData, CheckpointError> {
        let len = ranges.iter().map(|range| range.len()).sum::<usize>();
        // A tensor of codes has elements with the bits of the words.
        if tensor.dtype == Dtype::F32 || tensor.codes.is_some() {
            // A vector of f32 is aligned for f32, so that the tensor takes it without a copy.
            let mut elements = vec![0f32; len];
            self.read(key, tensor, ranges, bytemuck::cast_slice_mut(&mut elements))?;
            return Ok(TensorData::new(elements, shape));
        }
        let mut bytes = vec![0; len * tensor.dtype.size()];
        self.read(key, tensor, ranges, &mut bytes)?;
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

/// Elements of a tensor that one piece holds.
struct Overlap<'a> {
    piece: &'a Piece,
    /// The elements, as the piece counts them.
    part: Range<usize>,
    /// Position of the first of them among the elements that were asked for.
    at: usize,
}

/// Returns the pieces of a tensor that hold elements of `range`, in order.
fn overlaps<'a>(tensor: &'a TensorEntry, range: &Range<usize>) -> Vec<Overlap<'a>> {
    let parts = match tensor.split {
        Some(SplitEntry { dim, parts }) => parts_of(&tensor.shape, (dim, parts), range.clone()),
        None => vec![(0, range.clone())],
    };
    let mut found = Vec::new();
    let mut first = 0;
    for (number, wanted) in parts {
        let pieces = tensor.pieces.iter().filter(|piece| piece.part == number);
        for piece in pieces {
            let part = piece.start.max(wanted.start)..piece.end.min(wanted.end);
            if !part.is_empty() {
                let at = first + part.start - wanted.start;
                found.push(Overlap { piece, part, at });
            }
        }
        first += wanted.len();
    }
    found
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
