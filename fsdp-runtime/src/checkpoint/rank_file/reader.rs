//! Reading byte ranges of a rank's file.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, MmapOptions};

use super::header::{LENGTH_BYTES, TensorHeader, parse_header};
use crate::checkpoint::io_error::io_error;
use crate::checkpoint::manifest::{Dtype, Piece};
use crate::error::CheckpointError;

/// A rank's file to read from. Each call memory-maps only the byte range that it reads.
#[derive(Debug)]
pub(in crate::checkpoint) struct RankFileReader {
    path: PathBuf,
    file: File,
    tensors: HashMap<String, TensorHeader>,
}

impl RankFileReader {
    /// Opens a file that must have `len` bytes, and checks the header.
    pub(in crate::checkpoint) fn open(path: PathBuf, len: u64) -> Result<Self, CheckpointError> {
        let failed = io_error("read", &path);
        let file = match File::open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(CheckpointError::MissingFile { file: path.display().to_string() });
            }
            file => file.map_err(&failed)?,
        };
        let found = file.metadata().map_err(&failed)?.len();
        if found != len {
            let reason = format!("it has {found} bytes, its manifest says {len}");
            return Err(damaged(&path, reason));
        }
        let head = map(&file, &path, 0..len.min(LENGTH_BYTES as u64))?;
        let header_len = <[u8; LENGTH_BYTES]>::try_from(&head[..])
            .map_err(|_| damaged(&path, "it is too short for a header".into()))?;
        let data = (LENGTH_BYTES as u64).checked_add(u64::from_le_bytes(header_len));
        let Some(data) = data.filter(|&data| data <= len) else {
            return Err(damaged(&path, "its header is longer than the file".into()));
        };
        let header = map(&file, &path, LENGTH_BYTES as u64..data)?;
        let tensors = parse_header(&header, data..len).map_err(|reason| damaged(&path, reason))?;
        drop(header);
        Ok(Self { path, file, tensors })
    }

    /// Checks that the file has the tensor `name` with the dtype and length of the manifest's
    /// `piece`.
    pub(in crate::checkpoint) fn check(
        &self,
        name: &str,
        dtype: Dtype,
        piece: &Piece,
    ) -> Result<(), CheckpointError> {
        let TensorHeader { dtype: found, numel, .. } = self.tensor(name)?;
        let expected = piece.range().len();
        if *found != format!("{dtype:?}") || *numel != expected as u64 {
            return Err(self.damaged(format!(
                "`{name}` is {numel} elements of {found}, its manifest says {expected} of {dtype:?}"
            )));
        }
        Ok(())
    }

    /// Compares the checksums of the blocks that `range`, in bytes of the piece, touches. `block`
    /// is the number of bytes of a checksum. The piece must have passed [`check`](Self::check).
    pub(in crate::checkpoint) fn verify(
        &self,
        name: &str,
        piece: &Piece,
        range: Range<usize>,
        block: u64,
    ) -> Result<(), CheckpointError> {
        let bytes = &self.tensor(name)?.bytes;
        let len = bytes.end - bytes.start;
        for (index, expected) in piece.checksums.iter().enumerate() {
            let start = index as u64 * block;
            let end = (start + block).min(len);
            if end <= range.start as u64 || start >= range.end as u64 {
                continue;
            }
            let map = map(&self.file, &self.path, bytes.start + start..bytes.start + end)?;
            if crc32c::crc32c(&map) != *expected {
                return Err(self.damaged(format!(
                    "the checksum of `{name}`, bytes {start} to {end}, differs from the manifest's"
                )));
            }
        }
        Ok(())
    }

    /// Copies `range`, in bytes of the piece, to `target`, which must have the same length. The
    /// range must have passed [`verify`](Self::verify).
    pub(in crate::checkpoint) fn read(
        &self,
        name: &str,
        range: Range<usize>,
        target: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let start = self.tensor(name)?.bytes.start;
        let map =
            map(&self.file, &self.path, start + range.start as u64..start + range.end as u64)?;
        target.copy_from_slice(&map);
        Ok(())
    }

    fn tensor(&self, name: &str) -> Result<&TensorHeader, CheckpointError> {
        self.tensors.get(name).ok_or_else(|| self.damaged(format!("it lacks `{name}`")))
    }

    fn damaged(&self, reason: String) -> CheckpointError {
        damaged(&self.path, reason)
    }
}

fn damaged(path: &Path, reason: String) -> CheckpointError {
    CheckpointError::Damaged { file: path.display().to_string(), reason }
}

/// Maps a byte range of a file that is known to be long enough.
fn map(file: &File, path: &Path, range: Range<u64>) -> Result<Mmap, CheckpointError> {
    let len = usize::try_from(range.end - range.start)
        .map_err(|_| damaged(path, "it does not fit the address space".into()))?;
    // SAFETY: the map is only read, by the caller alone, and is dropped before the caller returns.
    // The user must not truncate a checkpoint while it is read, as with every memory-mapped reader.
    unsafe { MmapOptions::new().offset(range.start).len(len).map(file) }
        .map_err(io_error("read", path))
}
