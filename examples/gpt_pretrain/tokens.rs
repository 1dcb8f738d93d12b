//! Word pieces of a text: in memory, or in a file that is read where it is needed, so that it may be
//! larger than memory.
//!
//! A file has fairseq's format `mmap`: `train.bin` has the ids one after the other, and `train.idx`,
//! which [`token_index`](crate::token_index) describes, their type and the lengths of the texts.
//!
//! Texts are read as one, which is fairseq's `--sample-break-mode none`.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail};

use crate::token_index::{IdType, IndexError, read_index};

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
        let context = || index.display().to_string();
        let (ids, end) = read_index(&index).with_context(context)?;
        let open = || format!("cannot open {}", data.display());
        let file = File::open(&data).with_context(open)?;
        let bytes = file.metadata().with_context(open)?.len();
        if bytes != end {
            return Err(IndexError::Data { bytes, end }).with_context(context);
        }
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
