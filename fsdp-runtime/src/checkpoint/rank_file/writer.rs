//! Writing a rank's file.
//!
//! A safetensors file begins with the names of all tensors, but the names in an optimizer's state
//! are known only once the state has been read. The writer therefore reserves space for the header,
//! padded with spaces as the format allows, and writes the header last. A background thread flushes
//! a large file to disk while the file is being written.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::header::LENGTH_BYTES;
use crate::checkpoint::io_error::io_error;
use crate::checkpoint::manifest::{BLOCK, Dtype};
use crate::error::CheckpointError;

/// Alignment of the tensor data in the file, in bytes.
const ALIGN: u64 = 64;
/// Number of bytes written between two flushes to disk.
pub(super) const FLUSH: u64 = 32 << 20;

/// A rank's file that is being written.
#[derive(Debug)]
pub(in crate::checkpoint) struct RankFileWriter {
    path: PathBuf,
    file: File,
    /// Number of bytes reserved for the header and the header's length.
    reserved: u64,
    /// Number of bytes of tensor data written.
    written: u64,
    /// The header's JSON, without the closing brace.
    header: String,
    /// Value of `written` when the last flush was requested.
    pub(super) flushed: u64,
    pub(super) flusher: Option<Flusher>,
}

/// A thread that flushes a file to disk on request.
#[derive(Debug)]
pub(super) struct Flusher {
    request: SyncSender<()>,
    thread: JoinHandle<std::io::Result<()>>,
}

impl Flusher {
    fn start(file: &File) -> std::io::Result<Self> {
        let file = file.try_clone()?;
        let (request, requests) = sync_channel(1);
        let flush = move || requests.iter().try_for_each(|()| file.sync_data());
        let thread = std::thread::Builder::new().name("fsdp-flush".into()).spawn(flush)?;
        Ok(Self { request, thread })
    }

    /// Waits for the requested flushes and returns their error. The operating system reports each
    /// write error once only, so an error of these flushes would not appear in a later one.
    fn finish(self) -> std::io::Result<()> {
        drop(self.request);
        let panicked = |_| Err(std::io::Error::other("the flushing thread panicked"));
        self.thread.join().unwrap_or_else(panicked)
    }
}

impl RankFileWriter {
    /// Creates the file and reserves space for about `names` bytes of tensor names and offsets.
    pub(in crate::checkpoint) fn create(
        path: PathBuf,
        names: usize,
    ) -> Result<Self, CheckpointError> {
        let mut file = File::create_new(&path).map_err(io_error("create", &path))?;
        let reserved = ((LENGTH_BYTES + names + 64) as u64).next_multiple_of(ALIGN);
        file.seek(SeekFrom::Start(reserved)).map_err(io_error("write", &path))?;
        let header = String::from("{\"__metadata__\":{\"format\":\"fsdp-burn\"}");
        Ok(Self { path, file, reserved, written: 0, header, flushed: 0, flusher: None })
    }

    /// Appends a piece of a tensor and returns the CRC-32C of each [`BLOCK`] of the bytes.
    pub(in crate::checkpoint) fn write(
        &mut self,
        name: &str,
        dtype: Dtype,
        bytes: &[u8],
    ) -> Result<Vec<u32>, CheckpointError> {
        let mut checksums = Vec::with_capacity(bytes.len().div_ceil(BLOCK));
        // Block by block, so that each block is summed and copied while it is in the processor's
        // cache.
        for block in bytes.chunks(BLOCK) {
            checksums.push(crc32c::crc32c(block));
            self.file.write_all(block).map_err(io_error("write", &self.path))?;
        }
        self.request_flush(bytes.len() as u64).map_err(io_error("write", &self.path))?;
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

    /// Requests a flush if at least [`FLUSH`] bytes were written since the last request. `more` is
    /// the number of bytes that `written` does not count yet.
    fn request_flush(&mut self, more: u64) -> std::io::Result<()> {
        let written = self.written + more;
        if written - self.flushed < FLUSH {
            return Ok(());
        }
        self.flushed = written;
        let flusher = match self.flusher.take() {
            Some(flusher) => flusher,
            None => Flusher::start(&self.file)?,
        };
        // A failure to send needs no action. A full queue means that a flush to come covers these
        // bytes, and `finish` reports the error of a thread that has ended.
        let _ = flusher.request.try_send(());
        self.flusher = Some(flusher);
        Ok(())
    }

    /// Writes the header, waits until the file is on disk, and returns the file's size in bytes.
    pub(in crate::checkpoint) fn finish(mut self) -> Result<u64, CheckpointError> {
        self.header.push('}');
        if (LENGTH_BYTES + self.header.len()) as u64 > self.reserved {
            self = self.relocate()?;
        }
        let header_len = self.reserved as usize - LENGTH_BYTES;
        let mut head = Vec::with_capacity(self.reserved as usize);
        head.extend_from_slice(&(header_len as u64).to_le_bytes());
        head.extend_from_slice(self.header.as_bytes());
        head.resize(self.reserved as usize, b' ');
        let failed = io_error("write", &self.path);
        if let Some(flusher) = self.flusher.take() {
            flusher.finish().map_err(&failed)?;
        }
        self.file.seek(SeekFrom::Start(0)).map_err(&failed)?;
        self.file.write_all(&head).map_err(&failed)?;
        self.file.sync_all().map_err(&failed)?;
        Ok(self.reserved + self.written)
    }

    /// Copies the data to a new file with enough space for the header, which has become longer than
    /// the reserved space.
    fn relocate(mut self) -> Result<Self, CheckpointError> {
        let failed = io_error("write", &self.path);
        let aside = self.path.with_extension("moved");
        std::fs::rename(&self.path, &aside).map_err(&failed)?;
        let mut old = File::open(&aside).map_err(&failed)?;
        old.seek(SeekFrom::Start(self.reserved)).map_err(&failed)?;
        let mut moved = Self::create(self.path.clone(), self.header.len())?;
        std::io::copy(&mut old, &mut moved.file).map_err(&failed)?;
        std::fs::remove_file(&aside).map_err(&failed)?;
        (moved.header, moved.written) = (std::mem::take(&mut self.header), self.written);
        Ok(moved)
    }
}
