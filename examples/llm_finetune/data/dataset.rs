//! Tokenized conversations, all of a file or some of them.

use std::sync::Arc;

use anyhow::{Result, ensure};

use super::cache_file::CacheFile;
use super::prepare::{CacheUse, PrepareOptions, prepare};
use super::report::Report;
use super::tokenizer::ChatTokenizer;

/// Tokenized conversations, in the order of the data. A text, or a prompt with its completion, is a
/// conversation, too. Clones share the tokens.
#[derive(Clone, Debug)]
pub struct Dataset {
    file: Arc<CacheFile>,
    /// Conversations of the file that belong to this data set.
    chosen: Arc<[u32]>,
    report: Arc<Report>,
    cache_use: CacheUse,
}

/// Tokens of a conversation.
#[derive(Clone, Copy, Debug)]
pub struct Conversation<'a> {
    /// Ids of the tokens.
    pub ids: &'a [u32],
    bits: &'a [u8],
    /// First token, among all tokens of the file.
    start: usize,
}

impl Dataset {
    /// Reads the tokens of data files from the cache, or tokenizes the files.
    ///
    /// Processes that prepare the same data at once write the same file; each of them is complete.
    ///
    /// # Errors
    ///
    /// If the data cannot be read, the cache cannot be written, no row can be used, or a row is not
    /// valid under `strict` (a [`DataError`](super::prepare::DataError)).
    pub fn prepare(options: &PrepareOptions, tokenizer: &ChatTokenizer) -> Result<Self> {
        let (file, report, cache_use) = prepare(options, tokenizer)?;
        Self::of_file(file, report, cache_use)
    }

    /// Creates the data set of all conversations of a file.
    pub(super) fn of_file(file: CacheFile, report: Report, cache_use: CacheUse) -> Result<Self> {
        let conversations = u32::try_from(file.conversations());
        ensure!(conversations.is_ok(), "{} conversations are more than 2^32", file.conversations());
        let chosen = (0..conversations.unwrap_or_default()).collect();
        Ok(Self { file: file.into(), chosen, report: report.into(), cache_use })
    }

    /// Returns the number of conversations.
    pub fn len(&self) -> usize {
        self.chosen.len()
    }

    /// Returns a conversation.
    ///
    /// # Panics
    ///
    /// If `index` is not below [`len`](Self::len).
    pub fn get(&self, index: usize) -> Conversation<'_> {
        let range = self.range(index);
        let start = range.start;
        Conversation { ids: &self.file.ids()[range], bits: self.file.bits(), start }
    }

    /// Returns the number of tokens of a conversation.
    ///
    /// # Panics
    ///
    /// If `index` is not below [`len`](Self::len).
    pub fn length(&self, index: usize) -> usize {
        self.range(index).len()
    }

    fn range(&self, index: usize) -> std::ops::Range<usize> {
        self.file.range(self.chosen[index] as usize)
    }

    /// Returns the conversations, in order.
    pub fn iter(&self) -> impl Iterator<Item = Conversation<'_>> {
        (0..self.len()).map(|index| self.get(index))
    }

    /// Returns the number of all tokens.
    pub fn tokens(&self) -> usize {
        (0..self.len()).map(|index| self.length(index)).sum()
    }

    /// Returns the number of tokens that count for the loss.
    pub fn counted(&self) -> usize {
        self.iter().map(|conversation| conversation.counted()).sum()
    }

    /// Returns the report of the rows that are not used. It is that of all data, also after a
    /// split.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Returns whether the tokens came from the cache.
    pub fn cache_use(&self) -> &CacheUse {
        &self.cache_use
    }

    /// Returns some of the conversations, in the given order.
    ///
    /// # Panics
    ///
    /// If an index is not below [`len`](Self::len).
    pub fn subset(&self, indices: &[usize]) -> Self {
        let chosen = indices.iter().map(|index| self.chosen[*index]).collect();
        Self { chosen, ..self.clone() }
    }
}

impl Conversation<'_> {
    /// Returns whether a token counts for the loss, as the target of the token before it.
    pub fn is_counted(&self, token: usize) -> bool {
        let at = self.start + token;
        self.bits[at / 8] >> (at % 8) & 1 == 1
    }

    /// Returns the number of tokens that count.
    pub fn counted(&self) -> usize {
        (0..self.ids.len()).filter(|token| self.is_counted(*token)).count()
    }
}
