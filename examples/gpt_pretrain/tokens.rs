//! Word pieces of a text: in memory, or in a file that is read where it is needed, so that it may be
//! larger than memory.
//!
//! A file has fairseq's format `mmap`: `train.bin` has the ids one after the other, and `train.idx`
//! their type and the number and lengths of the texts. All numbers are little-endian:
//!
//! | bytes of `.idx` | content |
//! |---|---|
//! | 9 | `MMIDIDX` and two zeros |
//! | 8 | version, 1 |
//! | 1 | type of the ids: 1 for `u8`, 3 for `i16`, 4 for `i32`, 8 for `u16` |
//! | 8 | number of texts |
//! | 4 each | lengths of the texts |
//! | 8 each | offsets of the texts in `.bin`, in bytes |
//!
//! Texts are read as one, which is fairseq's `--sample-break-mode none`.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};

/// First bytes of an index.
pub const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
/// Version of the format.
pub const VERSION: u64 = 1;
/// Bytes of an index before the lengths.
const HEADER: u64 = 26;

/// Type of the ids in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdType {
    /// 1 byte.
    U8,
    /// 2 bytes, signed.
    I16,
    /// 4 bytes, signed.
    I32,
    /// 2 bytes.
    U16,
}

/// Word pieces of a text.
#[derive(Clone, Debug)]
pub enum Tokens {
    /// In memory.
    Memory(Arc<[u32]>),
    /// In a file.
    File(Arc<TokenFile>),
}

/// File of word pieces. Clones of an [`Arc`] of it share the open file.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    file: Mutex<File>,
    ids: IdType,
    /// Number of word pieces.
    len: usize,
    /// Number of different word pieces; the ids are below it.
    vocabulary: usize,
}

impl IdType {
    /// Returns the narrowest type for ids below `vocabulary`.
    pub fn of(vocabulary: usize) -> Self {
        if vocabulary <= 1 << 16 { Self::U16 } else { Self::I32 }
    }

    /// Returns fairseq's number of the type.
    pub fn code(self) -> u8 {
        match self {
            Self::U8 => 1,
            Self::I16 => 3,
            Self::I32 => 4,
            Self::U16 => 8,
        }
    }

    /// Returns the bytes of an id.
    pub fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 => 4,
        }
    }

    /// Appends ids in this type.
    pub fn write(self, ids: &[u32], to: &mut Vec<u8>) {
        match self {
            Self::U8 => to.extend(ids.iter().map(|id| *id as u8)),
            Self::I16 | Self::U16 => {
                to.extend(ids.iter().flat_map(|id| (*id as u16).to_le_bytes()));
            }
            Self::I32 => to.extend(ids.iter().flat_map(|id| id.to_le_bytes())),
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        [Self::U8, Self::I16, Self::I32, Self::U16].into_iter().find(|ids| ids.code() == code)
    }

    /// Returns ids. A negative one becomes a large one.
    fn read(self, bytes: &[u8]) -> Vec<u32> {
        let two = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
        match self {
            Self::U8 => bytes.iter().map(|byte| u32::from(*byte)).collect(),
            Self::U16 => bytes.chunks_exact(2).map(|bytes| u32::from(two(bytes))).collect(),
            Self::I16 => bytes.chunks_exact(2).map(|bytes| two(bytes) as i16 as u32).collect(),
            Self::I32 => {
                let four =
                    |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                bytes.chunks_exact(4).map(four).collect()
            }
        }
    }
}

impl From<Vec<u32>> for Tokens {
    fn from(ids: Vec<u32>) -> Self {
        Self::Memory(ids.into())
    }
}

impl Tokens {
    /// Opens `path` with `.bin` and `.idx`, whose ids are below `vocabulary`.
    ///
    /// # Errors
    ///
    /// If one of the two cannot be read, is not in fairseq's format, or does not fit the other.
    pub fn open(path: &Path, vocabulary: usize) -> Result<Self> {
        let (index, data) = (path.with_extension("idx"), path.with_extension("bin"));
        let (ids, end) = read_index(&index).with_context(|| format!("{}", index.display()))?;
        let open = || format!("cannot open {}", data.display());
        let file = File::open(&data).with_context(open)?;
        let bytes = file.metadata().with_context(open)?.len();
        ensure!(
            bytes == end,
            "{} has {bytes} bytes, where {} has texts up to byte {end}; preprocess the text again",
            data.display(),
            index.display()
        );
        let len = usize::try_from(bytes)? / ids.size();
        let file = TokenFile { path: data, file: Mutex::new(file), ids, len, vocabulary };
        Ok(Self::File(Arc::new(file)))
    }

    /// Returns the number of word pieces.
    pub fn len(&self) -> usize {
        match self {
            Self::Memory(ids) => ids.len(),
            Self::File(file) => file.len,
        }
    }

    /// Returns some of the word pieces.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or if an id in it is too large.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<u32>> {
        match self {
            Self::Memory(ids) => Ok(ids[range].to_vec()),
            Self::File(file) => file.read(range),
        }
    }
}

impl TokenFile {
    fn read(&self, range: Range<usize>) -> Result<Vec<u32>> {
        let size = self.ids.size();
        let mut bytes = vec![0; range.len() * size];
        // One lock for the position and the read after it.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start((range.start * size) as u64))
            .and_then(|_| file.read_exact(&mut bytes))
            .with_context(|| format!("cannot read {}", self.path.display()))?;
        drop(file);
        let ids = self.ids.read(&bytes);
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocabulary) {
            bail!(
                "{} has the id {id}, where the vocabulary has {} word pieces",
                self.path.display(),
                self.vocabulary
            );
        }
        Ok(ids)
    }
}

/// Returns the type of the ids, and the number of bytes that the `.bin` must have.
fn read_index(path: &Path) -> Result<(IdType, u64)> {
    let file = File::open(path).context("cannot open the index")?;
    let bytes = file.metadata()?.len();
    let mut file = BufReader::new(file);
    let mut head = [0; HEADER as usize];
    file.read_exact(&mut head).context("the index is cut off")?;
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| head[at + byte]));
    ensure!(
        head[..9] == MAGIC && number(9) == VERSION,
        "not an index of fairseq's format `mmap`; preprocess with --dataset-impl mmap"
    );
    let Some(ids) = IdType::from_code(head[17]) else {
        bail!("ids of type {}, where 1, 3, 4 and 8 are known", head[17]);
    };
    let texts = number(18);
    let expected = texts.checked_mul(12).and_then(|bytes| bytes.checked_add(HEADER));
    ensure!(expected == Some(bytes), "{texts} texts do not fit {bytes} bytes of the index");
    if texts == 0 {
        return Ok((ids, 0));
    }
    let (mut length, mut offset) = ([0; 4], [0; 8]);
    file.seek(SeekFrom::Start(HEADER + 4 * (texts - 1)))?;
    file.read_exact(&mut length)?;
    file.seek(SeekFrom::End(-8))?;
    file.read_exact(&mut offset)?;
    let last = u64::from(u32::from_le_bytes(length)) * ids.size() as u64;
    let end = u64::from_le_bytes(offset).checked_add(last).context("an offset is too large")?;
    Ok((ids, end))
}
