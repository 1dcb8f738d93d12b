//! File of tokenized conversations, read through a memory map. All numbers are little-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `LLMTOKEN` |
//! | 4 | version, 1 |
//! | 4 | CRC-32C of all bytes after this number |
//! | 8 | number of conversations `n` |
//! | 8 | number of tokens `t` |
//! | 8 | bytes of the report `r` |
//! | 32 | key: SHA-256 over data, tokenizer and options |
//! | 56 | zeros |
//! | 4 `t` | ids |
//! | 0 or 4 | zeros up to a multiple of 8 |
//! | 8 (`n` + 1) | first token of each conversation, and `t` |
//! | `t` / 8, rounded up | one bit for each token: whether it counts, lowest bit first |
//! | `r` | [`Report`](super::report::Report) as JSON |

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;
use tempfile::NamedTempFile;

use super::encode::Encoded;
use super::report::Report;

const MAGIC: [u8; 8] = *b"LLMTOKEN";
const VERSION: u32 = 1;
// Ids are read where they are.
const _: () = assert!(cfg!(target_endian = "little"), "the ids in a file are little-endian");
/// Bytes before the ids.
const HEADER: usize = 128;
/// Bytes of the header that the checksum does not cover.
const UNCHECKED: usize = 16;

/// What is wrong with a file of tokens.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A file that cannot be read or written.
    #[error("cannot access the file")]
    Io(#[from] io::Error),
    /// A file that is no file of tokens, or one of another version.
    #[error("not a file of tokens of version {VERSION}")]
    Format,
    /// A file of other data, of another tokenizer or of other options.
    #[error("made of other data, another tokenizer or other options")]
    Key,
    /// A file of another size than its header says.
    #[error("it has {found} bytes, and its header says {expected}; it is cut off")]
    Size {
        /// Bytes that the file has.
        found: u64,
        /// Bytes that it should have.
        expected: u64,
    },
    /// A file whose contents changed.
    #[error("the checksum is wrong; the file is damaged")]
    Checksum,
    /// A file whose contents contradict each other.
    #[error("its offsets or its report are not valid")]
    Contents,
}

/// Writes a file of tokens. Ids go to the file at once, and one bit per token stays in memory.
#[derive(Debug)]
pub struct CacheWriter {
    file: BufWriter<NamedTempFile>,
    offsets: Vec<u64>,
    bits: Vec<u8>,
    checksum: u32,
    /// Bytes after the header.
    written: usize,
}

impl CacheWriter {
    /// Creates a temporary file, in `folder` or else in the system's.
    ///
    /// # Errors
    ///
    /// If the file cannot be created.
    pub fn new(folder: Option<&Path>) -> io::Result<Self> {
        let file = match folder {
            Some(folder) => NamedTempFile::new_in(folder)?,
            None => NamedTempFile::new()?,
        };
        let mut file = BufWriter::with_capacity(1 << 20, file);
        file.write_all(&[0; HEADER])?;
        Ok(Self { file, offsets: vec![0], bits: Vec::new(), checksum: 0, written: 0 })
    }

    /// Adds a conversation.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn push(&mut self, encoded: &Encoded) -> io::Result<()> {
        let start = self.tokens();
        let bytes: Vec<u8> = encoded.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.write(&bytes)?;
        let end = start + encoded.ids.len();
        self.offsets.push(end as u64);
        self.bits.resize(end.div_ceil(8), 0);
        for (token, _) in encoded.counted.iter().enumerate().filter(|(_, counted)| **counted) {
            let at = start + token;
            self.bits[at / 8] |= 1 << (at % 8);
        }
        Ok(())
    }

    /// Completes the file. It takes the name `path` when its contents are on disk, so that a file
    /// of this name is always complete. Without a name it is deleted when it is closed.
    ///
    /// # Errors
    ///
    /// If the file cannot be written or read.
    pub fn finish(
        mut self,
        report: &Report,
        key: &[u8; 32],
        path: Option<&Path>,
    ) -> Result<CacheFile, CacheError> {
        let tokens = self.tokens();
        self.write(&vec![0; tokens % 2 * 4])?;
        let offsets: Vec<u8> =
            self.offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
        self.write(&offsets)?;
        let bits = std::mem::take(&mut self.bits);
        self.write(&bits)?;
        let report = serde_json::to_vec(report).map_err(io::Error::other)?;
        self.write(&report)?;
        let counts = [self.offsets.len() - 1, tokens, report.len()].map(|count| count as u64);
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[16..40].copy_from_slice(counts.map(u64::to_le_bytes).as_flattened());
        header[40..72].copy_from_slice(key);
        let start = crc32c::crc32c(&header[UNCHECKED..]);
        let checksum = crc32c::crc32c_combine(start, self.checksum, self.written);
        header[12..16].copy_from_slice(&checksum.to_le_bytes());
        let mut file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&header)?;
        file.as_file().sync_all()?;
        let file = match path {
            Some(path) => file.persist(path).map_err(|error| error.error)?,
            None => file.reopen()?,
        };
        CacheFile::of(&file, key)
    }

    fn tokens(&self) -> usize {
        self.offsets.last().map_or(0, |end| *end as usize)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.checksum = crc32c::crc32c_append(self.checksum, bytes);
        self.written += bytes.len();
        self.file.write_all(bytes)
    }
}

/// File of tokens that is mapped into memory.
#[derive(Debug)]
pub struct CacheFile {
    map: Mmap,
    conversations: usize,
    tokens: usize,
    report: Report,
}

/// Ranges of the bytes of a file.
struct Layout {
    offsets: Range<usize>,
    bits: Range<usize>,
    report: Range<usize>,
}

impl CacheFile {
    /// Opens a file that was written with this key, and checks all of it.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, has another key, or is damaged.
    pub fn open(path: &Path, key: &[u8; 32]) -> Result<Self, CacheError> {
        Self::of(&File::open(path)?, key)
    }

    fn of(file: &File, key: &[u8; 32]) -> Result<Self, CacheError> {
        // SAFETY: a file of tokens is written under a temporary name and never changed after that;
        // a new one replaces the name, not the contents.
        let map = unsafe { Mmap::map(file)? };
        if map.len() < HEADER || map[..8] != MAGIC || map[8..12] != VERSION.to_le_bytes() {
            return Err(CacheError::Format);
        }
        if map[40..72] != *key {
            return Err(CacheError::Key);
        }
        let count = |at: usize| u64_at(&map, at);
        let (conversations, tokens, report_bytes) = (count(16), count(24), count(32));
        let expected = size(conversations, tokens, report_bytes).ok_or(CacheError::Checksum)?;
        if expected != map.len() as u64 {
            return Err(CacheError::Size { found: map.len() as u64, expected });
        }
        if crc32c::crc32c(&map[UNCHECKED..]).to_le_bytes() != map[12..16] {
            return Err(CacheError::Checksum);
        }
        // All counts are below the size of the file, which is in memory.
        let (conversations, tokens) = (conversations as usize, tokens as usize);
        let mut file = Self { map, conversations, tokens, report: Report::default() };
        let layout = file.layout();
        file.report =
            serde_json::from_slice(&file.map[layout.report]).map_err(|_| CacheError::Contents)?;
        let ends = (0..conversations).all(|index| !file.range(index).is_empty());
        if !ends || file.offset(0) != 0 || file.offset(conversations) != tokens {
            return Err(CacheError::Contents);
        }
        Ok(file)
    }

    /// Returns the number of conversations.
    pub fn conversations(&self) -> usize {
        self.conversations
    }

    /// Returns the report of the rows that are not used.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Returns the tokens of a conversation, as a range of all tokens.
    pub fn range(&self, conversation: usize) -> Range<usize> {
        self.offset(conversation)..self.offset(conversation + 1)
    }

    /// Returns the ids of all tokens.
    pub fn ids(&self) -> &[u32] {
        let bytes = &self.map[HEADER..HEADER + 4 * self.tokens];
        // SAFETY: each pattern of 4 bytes is a valid `u32`. A map begins at a page, and the ids at
        // a multiple of 4, so that the bytes before and after the aligned ones are none.
        let (before, ids, after) = unsafe { bytes.align_to::<u32>() };
        debug_assert!(before.is_empty() && after.is_empty());
        ids
    }

    /// Returns one bit for each token, lowest bit first: whether it counts.
    pub fn bits(&self) -> &[u8] {
        &self.map[self.layout().bits]
    }

    fn offset(&self, conversation: usize) -> usize {
        u64_at(&self.map, self.layout().offsets.start + 8 * conversation) as usize
    }

    fn layout(&self) -> Layout {
        let offsets = HEADER + (4 * self.tokens).next_multiple_of(8);
        let bits = offsets + 8 * (self.conversations + 1);
        let report = bits + self.tokens.div_ceil(8);
        Layout { offsets: offsets..bits, bits: bits..report, report: report..self.map.len() }
    }
}

/// Returns the bytes of a file with these counts, or `None` if no file can have them.
fn size(conversations: u64, tokens: u64, report: u64) -> Option<u64> {
    let ids = tokens.checked_mul(4)?.checked_next_multiple_of(8)?;
    let offsets = conversations.checked_add(1)?.checked_mul(8)?;
    (HEADER as u64)
        .checked_add(ids)?
        .checked_add(offsets)?
        .checked_add(tokens.div_ceil(8))?
        .checked_add(report)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
