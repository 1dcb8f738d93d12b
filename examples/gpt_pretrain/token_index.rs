//! The index of a file of word pieces, in fairseq's format `mmap`. All numbers are little-endian:
//!
//! | bytes of `.idx` | content |
//! |---|---|
//! | 9 | `MMIDIDX` and two zeros |
//! | 8 | version, 1 |
//! | 1 | type of the ids: 1 `u8`, 2 `i8`, 3 `i16`, 4 `i32`, 5 `i64`, 8 `u16`, 9 `u32`, 10 `u64` |
//! | 8 | number of texts |
//! | 4 each | lengths of the texts |
//! | 8 each | offsets of the texts in `.bin`, in bytes |
//!
//! Megatron-LM has the number of documents after the number of texts, and at the end the first text of
//! each document, 8 bytes each. Such an index is read, too; the documents are not used.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

/// First bytes of an index.
pub const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
/// Version of the format.
pub const VERSION: u64 = 1;
/// Bytes of an index before the lengths.
const HEADER: u64 = 26;
/// Bytes of the length and the offset of a text.
const PER_TEXT: u64 = 12;

/// Type of the ids in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdType {
    /// 1 byte.
    U8,
    /// 1 byte, signed.
    I8,
    /// 2 bytes, signed.
    I16,
    /// 4 bytes, signed.
    I32,
    /// 8 bytes, signed.
    I64,
    /// 2 bytes.
    U16,
    /// 4 bytes.
    U32,
    /// 8 bytes.
    U64,
}

/// Every type, with fairseq's number of it.
const TYPES: [(u8, IdType); 8] = [
    (1, IdType::U8),
    (2, IdType::I8),
    (3, IdType::I16),
    (4, IdType::I32),
    (5, IdType::I64),
    (8, IdType::U16),
    (9, IdType::U32),
    (10, IdType::U64),
];

/// What is wrong with an index, or with the word pieces beside it.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// A file that cannot be read.
    #[error("cannot read the index")]
    Io(#[from] io::Error),
    /// A file that ends within the header.
    #[error("the index is cut off: it has {bytes} bytes, and its header {HEADER}")]
    CutOff { bytes: u64 },
    /// A file of fairseq's, in another format.
    #[error("an index of fairseq's --dataset-impl {format}; preprocess with --dataset-impl mmap")]
    OtherFormat { format: &'static str },
    /// A file that is no index.
    #[error("not an index of fairseq's format `mmap`: it begins with {found:?}, not {MAGIC:?}")]
    Magic { found: [u8; 9] },
    /// An index of another version.
    #[error("an index of version {found}, where {VERSION} is known")]
    Version { found: u64 },
    /// Ids of a type that is none of integers.
    #[error("ids of type {found}, where the integers 1, 2, 3, 4, 5, 8, 9 and 10 are known")]
    IdType { found: u8 },
    /// An index of another size than its texts have.
    #[error("{texts} texts do not fit {bytes} bytes of the index; it is cut off, or damaged")]
    Texts { texts: u64, bytes: u64 },
    /// A negative length.
    #[error("text {text} has the length {length}")]
    Length { text: u64, length: i32 },
    /// A text that does not begin where the one before it ends.
    #[error("text {text} begins at byte {found}, where the texts before it end at byte {expected}")]
    Offset { text: u64, found: u64, expected: u64 },
    /// A `.bin` of another size.
    #[error(
        "the .bin beside it has {bytes} bytes, where the index has texts up to byte {end}; \
         preprocess the text again"
    )]
    Data { bytes: u64, end: u64 },
}

impl IdType {
    /// Returns the narrowest type for ids below `vocabulary` that every version of fairseq reads:
    /// older ones have no `u32`.
    pub fn of(vocabulary: usize) -> Self {
        if vocabulary <= 1 << 16 { Self::U16 } else { Self::I32 }
    }

    /// Returns fairseq's number of the type.
    pub fn code(self) -> u8 {
        let known = TYPES.iter().find(|(_, ids)| *ids == self);
        known.expect("every type is in the table").0
    }

    /// Returns the bytes of an id.
    pub fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 | Self::U32 => 4,
            Self::I64 | Self::U64 => 8,
        }
    }

    /// Appends ids, which fit, in this type.
    pub fn write(self, ids: &[u32], to: &mut Vec<u8>) {
        let size = self.size();
        to.extend(ids.iter().flat_map(|id| u64::from(*id).to_le_bytes().into_iter().take(size)));
    }

    fn from_code(code: u8) -> Option<Self> {
        TYPES.iter().find(|(known, _)| *known == code).map(|(_, ids)| *ids)
    }

    /// Returns ids. One that is negative or too large for `u32` becomes `u32::MAX`.
    pub fn read(self, bytes: &[u8]) -> Vec<u32> {
        let is_signed = matches!(self, Self::I8 | Self::I16 | Self::I32 | Self::I64);
        let id = |bytes: &[u8]| {
            let is_negative = is_signed && bytes.last().is_some_and(|byte| *byte >= 0x80);
            let value = bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
            if is_negative { u32::MAX } else { u32::try_from(value).unwrap_or(u32::MAX) }
        };
        bytes.chunks_exact(self.size()).map(id).collect()
    }
}

/// Returns the type of the ids, and the number of bytes that the `.bin` must have.
///
/// # Errors
///
/// If the file cannot be read, or is not such an index.
pub fn read_index(path: &Path) -> Result<(IdType, u64), IndexError> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let mut head = [0; HEADER as usize];
    let known = usize::try_from(bytes).map_or(head.len(), |bytes| bytes.min(head.len()));
    file.read_exact(&mut head[..known])?;
    check_format(&head[..known])?;
    if known < head.len() {
        return Err(IndexError::CutOff { bytes });
    }
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| head[at + byte]));
    if number(9) != VERSION {
        return Err(IndexError::Version { found: number(9) });
    }
    let ids = IdType::from_code(head[17]).ok_or(IndexError::IdType { found: head[17] })?;
    let texts = number(18);
    let lengths = start_of_lengths(&mut file, texts, bytes)?;
    Ok((ids, end_of_texts(path, ids, lengths, texts)?))
}

/// Checks the first bytes of an index, which may be cut off.
fn check_format(head: &[u8]) -> Result<(), IndexError> {
    let others = [(&b"TNTIDX\0\0"[..], "lazy or cached"), (b"HUFFIDX", "huffman")];
    if let Some((_, format)) = others.into_iter().find(|(magic, _)| head.starts_with(magic)) {
        return Err(IndexError::OtherFormat { format });
    }
    if head.len() >= MAGIC.len() && !head.starts_with(&MAGIC) {
        let found = std::array::from_fn(|at| head[at]);
        return Err(IndexError::Magic { found });
    }
    Ok(())
}

/// Returns the byte at which the lengths begin: after the header, or after Megatron-LM's number of
/// documents. The two are told apart by the size of the index.
fn start_of_lengths(file: &mut File, texts: u64, bytes: u64) -> Result<u64, IndexError> {
    let of_texts = texts.checked_mul(PER_TEXT).and_then(|bytes| bytes.checked_add(HEADER));
    if of_texts == Some(bytes) {
        return Ok(HEADER);
    }
    let mut documents = [0; 8];
    if bytes >= HEADER + 8 {
        file.seek(SeekFrom::Start(HEADER))?;
        file.read_exact(&mut documents)?;
    }
    let documents = u64::from_le_bytes(documents).checked_mul(8);
    let all = of_texts
        .zip(documents)
        .and_then(|(texts, documents)| texts.checked_add(documents)?.checked_add(8));
    match all {
        Some(all) if all == bytes => Ok(HEADER + 8),
        _ => Err(IndexError::Texts { texts, bytes }),
    }
}

/// Returns the byte of the `.bin` at which the last text ends. Checks that each text begins where the
/// one before it ends.
fn end_of_texts(path: &Path, ids: IdType, start: u64, texts: u64) -> Result<u64, IndexError> {
    let at = |byte: u64| {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(byte))?;
        io::Result::Ok(BufReader::new(file))
    };
    let (mut lengths, mut offsets) = (at(start)?, at(start + 4 * texts)?);
    let mut end = 0;
    for text in 0..texts {
        let (mut length, mut offset) = ([0; 4], [0; 8]);
        lengths.read_exact(&mut length)?;
        offsets.read_exact(&mut offset)?;
        let (length, found) = (i32::from_le_bytes(length), u64::from_le_bytes(offset));
        if found != end {
            return Err(IndexError::Offset { text, found, expected: end });
        }
        let length = u64::try_from(length).map_err(|_| IndexError::Length { text, length })?;
        end += length * ids.size() as u64;
    }
    Ok(end)
}
