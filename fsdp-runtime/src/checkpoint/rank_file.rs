//! One rank's safetensors file: flat pieces of tensors, written in one pass and read in parts.
//!
//! safetensors puts the names first, but an optimizer's are known only once its state was read. So
//! room for them is left, filled with spaces as the format allows, and the header is written last.
//! A large file is on its way to the disk while it is written: a thread beside flushes what there is.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use memmap2::{Mmap, MmapOptions};
use serde::Deserialize;

use super::io;
use super::manifest::{BLOCK, Dtype, Piece};
use crate::error::CheckpointError;

/// The bytes before a safetensors header: its length.
const LENGTH: usize = 8;
/// Data begin at a multiple of this many bytes.
const ALIGN: u64 = 64;
/// Bytes after which what was written is flushed to the disk.
const FLUSH: u64 = 32 << 20;

/// A rank's file while it is written.
#[derive(Debug)]
pub(crate) struct Writer {
    path: PathBuf,
    file: File,
    room: u64,
    written: u64,
    header: String,
    /// Bytes written when the last flush was asked for.
    flushed: u64,
    flusher: Option<Flusher>,
}

/// A thread that flushes a file while it is written.
#[derive(Debug)]
struct Flusher {
    ask: SyncSender<()>,
    thread: JoinHandle<std::io::Result<()>>,
}

impl Flusher {
    fn start(file: &File) -> std::io::Result<Self> {
        let file = file.try_clone()?;
        let (ask, asked) = sync_channel(1);
        let flush = move || asked.iter().try_for_each(|()| file.sync_data());
        let thread = std::thread::Builder::new().name("fsdp-flush".into()).spawn(flush)?;
        Ok(Self { ask, thread })
    }

    /// Waits for the flushes asked for. The system tells each error once: here those of theirs.
    fn finish(self) -> std::io::Result<()> {
        drop(self.ask);
        let panicked = |_| Err(std::io::Error::other("the thread that flushed it panicked"));
        self.thread.join().unwrap_or_else(panicked)
    }
}

impl Writer {
    /// Creates the file, with room for about `names` bytes of names and their places.
    pub(crate) fn create(path: PathBuf, names: usize) -> Result<Self, CheckpointError> {
        let mut file = File::create_new(&path).map_err(io("create", &path))?;
        let room = ((LENGTH + names + 64) as u64).next_multiple_of(ALIGN);
        file.seek(SeekFrom::Start(room)).map_err(io("write", &path))?;
        let header = String::from("{\"__metadata__\":{\"format\":\"fsdp-burn\"}");
        Ok(Self { path, file, room, written: 0, header, flushed: 0, flusher: None })
    }

    /// Appends a piece and returns its checksums.
    pub(crate) fn write(
        &mut self,
        name: &str,
        dtype: Dtype,
        bytes: &[u8],
    ) -> Result<Vec<u32>, CheckpointError> {
        let mut checksums = Vec::with_capacity(bytes.len().div_ceil(BLOCK));
        // Block by block, so that each is summed and copied while it is in the cache.
        for block in bytes.chunks(BLOCK) {
            checksums.push(crc32c::crc32c(block));
            self.file.write_all(block).map_err(io("write", &self.path))?;
        }
        self.flush(bytes.len() as u64).map_err(io("write", &self.path))?;
        let end = self.written + bytes.len() as u64;
        let name = serde_json::to_string(name).expect("a string serialises");
        self.header.push_str(&format!(
            ",{name}:{{\"dtype\":\"{dtype:?}\",\"shape\":[{}],\"data_offsets\":[{},{end}]}}",
            bytes.len() / dtype.size(),
            self.written
        ));
        self.written = end;
        Ok(checksums)
    }

    /// Asks for a flush once enough was written after the last; `more` bytes are not counted yet.
    fn flush(&mut self, more: u64) -> std::io::Result<()> {
        let written = self.written + more;
        if written - self.flushed < FLUSH {
            return Ok(());
        }
        self.flushed = written;
        let flusher = match self.flusher.take() {
            Some(flusher) => flusher,
            None => Flusher::start(&self.file)?,
        };
        // One that is still at it flushes this too, or the end does. One that failed says so there.
        let _ = flusher.ask.try_send(());
        self.flusher = Some(flusher);
        Ok(())
    }

    /// Writes the header, waits until all is on the disk, and returns the file's length.
    pub(crate) fn finish(mut self) -> Result<u64, CheckpointError> {
        self.header.push('}');
        if (LENGTH + self.header.len()) as u64 > self.room {
            self = self.relocate()?;
        }
        let room = self.room as usize - LENGTH;
        let mut head = Vec::with_capacity(self.room as usize);
        head.extend_from_slice(&(room as u64).to_le_bytes());
        head.extend_from_slice(self.header.as_bytes());
        head.resize(self.room as usize, b' ');
        let failed = io("write", &self.path);
        if let Some(flusher) = self.flusher.take() {
            flusher.finish().map_err(&failed)?;
        }
        self.file.seek(SeekFrom::Start(0)).map_err(&failed)?;
        self.file.write_all(&head).map_err(&failed)?;
        self.file.sync_all().map_err(&failed)?;
        Ok(self.room + self.written)
    }

    /// Moves the data to a file with more room: the names were longer than was guessed.
    fn relocate(mut self) -> Result<Self, CheckpointError> {
        let failed = io("write", &self.path);
        let aside = self.path.with_extension("moved");
        std::fs::rename(&self.path, &aside).map_err(&failed)?;
        let mut old = File::open(&aside).map_err(&failed)?;
        old.seek(SeekFrom::Start(self.room)).map_err(&failed)?;
        let mut moved = Self::create(self.path.clone(), self.header.len())?;
        std::io::copy(&mut old, &mut moved.file).map_err(&failed)?;
        std::fs::remove_file(&aside).map_err(&failed)?;
        (moved.header, moved.written) = (std::mem::take(&mut self.header), self.written);
        Ok(moved)
    }
}

/// A rank's file to read from. Only the parts asked for are mapped, each for as long as it is read.
#[derive(Debug)]
pub(crate) struct Reader {
    path: PathBuf,
    file: File,
    tensors: HashMap<String, Stored>,
}

#[derive(Clone, Debug)]
struct Stored {
    dtype: String,
    numel: u64,
    /// Bytes in the file.
    bytes: Range<u64>,
}

impl Reader {
    /// Opens a file of `len` bytes and checks its header.
    pub(crate) fn open(path: PathBuf, len: u64) -> Result<Self, CheckpointError> {
        let failed = io("read", &path);
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
        let head = map(&file, &path, 0..len.min(LENGTH as u64))?;
        let length = <[u8; LENGTH]>::try_from(&head[..])
            .map_err(|_| damaged(&path, "it is too short for a header".into()))?;
        let data = (LENGTH as u64).checked_add(u64::from_le_bytes(length));
        let Some(data) = data.filter(|&data| data <= len) else {
            return Err(damaged(&path, "its header is longer than the file".into()));
        };
        let header = map(&file, &path, LENGTH as u64..data)?;
        let tensors = parse(&header, data..len).map_err(|reason| damaged(&path, reason))?;
        drop(header);
        Ok(Self { path, file, tensors })
    }

    /// Checks that a piece of the manifest lies here as it says.
    pub(crate) fn check(
        &self,
        name: &str,
        dtype: Dtype,
        piece: &Piece,
    ) -> Result<(), CheckpointError> {
        let Some(stored) = self.tensors.get(name) else {
            return Err(self.damaged(format!("it lacks `{name}`")));
        };
        if stored.dtype != format!("{dtype:?}") || stored.numel != piece.range().len() as u64 {
            return Err(self.damaged(format!(
                "`{name}` is {} elements of {}, its manifest says {} of {dtype:?}",
                stored.numel,
                stored.dtype,
                piece.range().len()
            )));
        }
        Ok(())
    }

    /// Compares the checksums of the blocks that hold `range`, in bytes of the piece. The piece was
    /// checked before, here and in [`read`](Self::read).
    pub(crate) fn verify(
        &self,
        name: &str,
        piece: &Piece,
        range: Range<usize>,
        block: u64,
    ) -> Result<(), CheckpointError> {
        let stored = self.stored(name)?;
        let len = stored.bytes.end - stored.bytes.start;
        for (index, expected) in piece.checksums.iter().enumerate() {
            let start = index as u64 * block;
            let end = (start + block).min(len);
            if end <= range.start as u64 || start >= range.end as u64 {
                continue;
            }
            let map =
                map(&self.file, &self.path, stored.bytes.start + start..stored.bytes.start + end)?;
            if crc32c::crc32c(&map) != *expected {
                return Err(self.damaged(format!(
                    "the checksum of `{name}`, bytes {start} to {end}, is not the manifest's"
                )));
            }
        }
        Ok(())
    }

    /// Copies `range`, in bytes of the piece, to `target`, which is as long.
    pub(crate) fn read(
        &self,
        name: &str,
        range: Range<usize>,
        target: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let start = self.stored(name)?.bytes.start;
        let map =
            map(&self.file, &self.path, start + range.start as u64..start + range.end as u64)?;
        target.copy_from_slice(&map);
        Ok(())
    }

    fn stored(&self, name: &str) -> Result<&Stored, CheckpointError> {
        self.tensors.get(name).ok_or_else(|| self.damaged(format!("it lacks `{name}`")))
    }

    fn damaged(&self, reason: String) -> CheckpointError {
        damaged(&self.path, reason)
    }
}

fn damaged(path: &Path, reason: String) -> CheckpointError {
    CheckpointError::Damaged { file: path.display().to_string(), reason }
}

/// Maps part of a file that is known to be long enough.
fn map(file: &File, path: &Path, range: Range<u64>) -> Result<Mmap, CheckpointError> {
    let len = usize::try_from(range.end - range.start)
        .map_err(|_| damaged(path, "it does not fit the address space".into()))?;
    // SAFETY: the map is read here alone, and dropped before the next. That nobody truncates a
    // checkpoint while it is read is the user's part, as with every memory-mapped reader.
    unsafe { MmapOptions::new().offset(range.start).len(len).map(file) }.map_err(io("read", path))
}

/// The tensors of a safetensors header, whose data lie at `data`.
fn parse(header: &[u8], data: Range<u64>) -> Result<HashMap<String, Stored>, String> {
    #[derive(Deserialize)]
    struct Info {
        dtype: String,
        shape: Vec<u64>,
        data_offsets: (u64, u64),
    }
    let fields: HashMap<String, serde_json::Value> = serde_json::from_slice(header)
        .map_err(|error| format!("its header is not safetensors': {error}"))?;
    let mut tensors = HashMap::with_capacity(fields.len());
    for (name, value) in fields {
        if name == "__metadata__" {
            continue;
        }
        let info: Info = serde_json::from_value(value)
            .map_err(|error| format!("its header, `{name}`: {error}"))?;
        let outside = || format!("its header places `{name}` outside of the file");
        let place = |offset: u64| data.start.checked_add(offset).filter(|&at| at <= data.end);
        let (start, end) = info.data_offsets;
        let bytes = place(start).ok_or_else(outside)?..place(end).ok_or_else(outside)?;
        let numel = info.shape.iter().try_fold(1u64, |numel, &dim| numel.checked_mul(dim));
        let size = serde_json::from_value::<Dtype>(info.dtype.clone().into()).map(Dtype::size);
        let needed = size.ok().zip(numel).and_then(|(size, numel)| numel.checked_mul(size as u64));
        match (numel, needed) {
            (Some(numel), Some(needed)) if bytes.start.checked_add(needed) == Some(bytes.end) => {
                tensors.insert(name, Stored { dtype: info.dtype, numel, bytes });
            }
            _ => return Err(format!("its header gives `{name}` a wrong dtype, shape or place")),
        }
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(elements: usize, checksums: Vec<u32>) -> Piece {
        Piece { file: 0, start: 0, end: elements, checksums }
    }

    #[test]
    fn what_is_written_is_read_and_safetensors_reads_it_too() {
        let folder = tempfile::tempdir().unwrap();
        // With too little room for the names, and with enough.
        for names in [0, 4096] {
            let path = folder.path().join(format!("{names}.safetensors"));
            let mut writer = Writer::create(path.clone(), names).unwrap();
            let large: Vec<u8> = (0..BLOCK * 2 + 40).map(|i| (i * 7) as u8).collect();
            let sums = writer.write("model/a/\"quoted\"", Dtype::F32, &large).unwrap();
            writer.write("b", Dtype::U8, &[1, 2, 3]).unwrap();
            let len = writer.finish().unwrap();

            let bytes = std::fs::read(&path).unwrap();
            assert_eq!(bytes.len() as u64, len);
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(file.tensor("model/a/\"quoted\"").unwrap().data(), large);
            assert_eq!(file.tensor("b").unwrap().data(), [1, 2, 3]);

            let reader = Reader::open(path, len).unwrap();
            let piece = piece(large.len() / 4, sums);
            reader.check("model/a/\"quoted\"", Dtype::F32, &piece).unwrap();
            assert!(reader.check("b", Dtype::F32, &piece).is_err());
            let range = BLOCK - 8..BLOCK + 8;
            reader.verify("model/a/\"quoted\"", &piece, range.clone(), BLOCK as u64).unwrap();
            let mut read = vec![0; 16];
            reader.read("model/a/\"quoted\"", range.clone(), &mut read).unwrap();
            assert_eq!(read, large[range]);
        }
    }

    #[test]
    fn a_file_that_is_flushed_while_it_is_written_holds_everything() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large.safetensors");
        let mut writer = Writer::create(path.clone(), 100).unwrap();
        let part: Vec<u8> = (0..FLUSH as usize / 2 + 5).map(|i| (i % 251) as u8).collect();
        let sums: Vec<_> =
            ["a", "b", "c"].map(|name| writer.write(name, Dtype::U8, &part).unwrap()).into();
        assert!(writer.flusher.is_some() && writer.flushed > 0);
        let len = writer.finish().unwrap();
        let reader = Reader::open(path, len).unwrap();
        for (name, sums) in ["a", "b", "c"].into_iter().zip(sums) {
            let piece = piece(part.len(), sums);
            reader.verify(name, &piece, 0..part.len(), BLOCK as u64).unwrap();
            let mut read = vec![0; part.len()];
            reader.read(name, 0..part.len(), &mut read).unwrap();
            assert!(read == part, "`{name}`");
        }
    }

    #[test]
    fn a_flipped_byte_is_found_in_its_block_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let mut writer = Writer::create(path.clone(), 100).unwrap();
        let sums = writer.write("a", Dtype::U8, &vec![5; BLOCK * 2]).unwrap();
        let len = writer.finish().unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let reader = Reader::open(path, len).unwrap();
        let piece = piece(BLOCK * 2, sums);
        reader.verify("a", &piece, 0..BLOCK, BLOCK as u64).unwrap();
        let error = reader.verify("a", &piece, 0..BLOCK + 1, BLOCK as u64).unwrap_err();
        assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
    }

    #[test]
    fn headers_that_point_outside_are_refused() {
        for header in [
            r#"{"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}"#,
            r#"{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}}"#,
            r#"{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}"#,
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}"#,
            r#"{"a":{"dtype":"X","shape":[2],"data_offsets":[0,2]}}"#,
            r#"{"a":3}"#,
            "[]",
        ] {
            assert!(parse(header.as_bytes(), 100..104).is_err(), "{header}");
        }
        let good = r#"{"a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]}}"#;
        assert_eq!(parse(good.as_bytes(), 100..104).unwrap()["a"].bytes, 100..104);
    }
}
