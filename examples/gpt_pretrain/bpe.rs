//! Byte-pair encoding like GPT-2's. It works on bytes, so that it can encode any text.
//!
//! The word pieces are learned from the training text, and cached in a file for the next run on it;
//! or they are GPT-2's own, from its files.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use tokenizers::decoders::byte_level::ByteLevel as Decoder;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, EncodeInput, Tokenizer};

use crate::common::tokenizers::tokenizer_error;

/// Number of word pieces of one byte. Every byte is one.
const BYTES: usize = 256;
/// Version of the cache. Increase it when a change here, or in the tokenizers crate, changes the
/// file or the word pieces that a text gives.
const FORMAT: u32 = 2;
/// Minimum count in the training text for a pair to become a word piece.
const MIN_COUNT: u64 = 2;

/// GPT-2's word piece between two texts.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// Converts text to word-piece ids.
#[derive(Clone, Debug)]
pub struct Bpe {
    inner: Tokenizer,
}

/// Files of GPT-2's word pieces, by fairseq's names.
#[derive(Args, Clone, Debug, Default)]
pub struct Gpt2Files {
    /// GPT-2's `vocab.json`, also called encoder.json; needs --gpt2-vocab-bpe
    #[arg(long, value_name = "FILE", requires = "gpt2_vocab_bpe")]
    pub gpt2_encoder_json: Option<PathBuf>,

    /// GPT-2's `merges.txt`, also called vocab.bpe; needs --gpt2-encoder-json
    #[arg(long, value_name = "FILE", requires = "gpt2_encoder_json")]
    pub gpt2_vocab_bpe: Option<PathBuf>,
}

impl Gpt2Files {
    /// Reads the word pieces, if the files are given.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or if the two do not fit together.
    pub fn read(&self) -> Result<Option<Bpe>> {
        let files = self.gpt2_encoder_json.as_ref().zip(self.gpt2_vocab_bpe.as_ref());
        files.map(|(vocabulary, merges)| Bpe::gpt2(vocabulary, merges)).transpose()
    }
}

impl Bpe {
    /// Reads the word pieces of a text from the cache in `folder`. Without a cached file, learns
    /// them with [`train`](Self::train) and writes the file. If it cannot be written, prints a
    /// warning.
    ///
    /// # Errors
    ///
    /// If the text cannot be processed.
    pub fn cached(text: &str, vocabulary: usize, folder: Option<&Path>) -> Result<Self> {
        let Some(folder) = folder else { return Self::train(text, vocabulary) };
        let file = folder.join(format!("bpe-{}.json", fingerprint(text, vocabulary)));
        // A file that is missing or damaged is written again.
        if let Ok(inner) = Tokenizer::from_file(&file) {
            return Ok(Self { inner });
        }
        let learned = Self::train(text, vocabulary)?;
        if let Err(error) = learned.save(&file) {
            eprintln!("the word pieces are not cached in {}: {error:#}", file.display());
        }
        Ok(learned)
    }

    /// Reads GPT-2's word pieces: `vocab.json` and `merges.txt`.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or if the two do not fit together.
    pub fn gpt2(vocabulary: &Path, merges: &Path) -> Result<Self> {
        let name = |path: &Path| path.to_string_lossy().into_owned();
        let model = BPE::from_file(&name(vocabulary), &name(merges)).build();
        let model = model.map_err(tokenizer_error).with_context(|| {
            format!("cannot read {} and {}", vocabulary.display(), merges.display())
        })?;
        let mut inner = Tokenizer::new(model);
        inner.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)));
        inner.with_decoder(Some(Decoder::default()));
        if inner.token_to_id(END_OF_TEXT).is_some() {
            inner.add_special_tokens(&[AddedToken::from(END_OF_TEXT, true)]);
        }
        Ok(Self { inner })
    }

    /// Reads the word pieces from a `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn read(file: &Path) -> Result<Self> {
        let inner = Tokenizer::from_file(file).map_err(tokenizer_error);
        Ok(Self { inner: inner.with_context(|| format!("cannot read {}", file.display()))? })
    }

    /// Writes the word pieces to a file. The file is renamed into place, so that no other process
    /// reads an incomplete one.
    pub fn save(&self, file: &Path) -> Result<()> {
        let text = self.inner.to_string(false).map_err(tokenizer_error)?;
        let folder = file.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let mut new = tempfile::NamedTempFile::new_in(folder)?;
        new.write_all(text.as_bytes())?;
        new.persist(file)?;
        Ok(())
    }

    /// Learns at most `vocabulary` word pieces from a text. The result depends on the text only.
    ///
    /// # Errors
    ///
    /// If the text cannot be processed.
    pub fn train(text: &str, vocabulary: usize) -> Result<Self> {
        ensure!(
            vocabulary > BYTES,
            "a vocabulary of {vocabulary} is too small: {BYTES} word pieces are single bytes"
        );
        let mut trainer: TrainerWrapper = BpeTrainer::builder()
            .vocab_size(vocabulary)
            .min_frequency(MIN_COUNT)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build()
            .into();
        let mut inner = Tokenizer::new(BPE::default());
        inner.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)));
        inner.with_decoder(Some(Decoder::default()));
        inner.train(&mut trainer, lines(text)).map_err(tokenizer_error)?;
        Ok(Self { inner })
    }

    /// Returns the number of different word pieces.
    pub fn vocabulary(&self) -> usize {
        self.inner.get_vocab_size(false)
    }

    /// Converts a text to word-piece ids.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails on it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let inputs: Vec<EncodeInput<'_>> = match self.is_gpt2() {
            true => paragraphs(text).map(EncodeInput::from).collect(),
            false => lines(text).map(EncodeInput::from).collect(),
        };
        let encodings = self.inner.encode_batch_fast(inputs, false).map_err(tokenizer_error)?;
        Ok(encodings.iter().flat_map(|encoding| encoding.get_ids().iter().copied()).collect())
    }

    /// Converts word-piece ids to a text.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails on them.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(tokenizer_error)
    }

    /// Returns whether the word pieces are GPT-2's, which join white space over line breaks.
    pub fn is_gpt2(&self) -> bool {
        self.end_of_text().is_some()
    }

    /// Returns the id between two texts, if there is one.
    pub fn end_of_text(&self) -> Option<u32> {
        self.inner.token_to_id(END_OF_TEXT)
    }
}

/// Returns a 128-bit hash of all that the word pieces depend on, in hexadecimal.
fn fingerprint(text: &str, vocabulary: usize) -> String {
    let half = |seed: u64| {
        let mut hasher = DefaultHasher::new();
        (seed, FORMAT, MIN_COUNT, vocabulary, text).hash(&mut hasher);
        hasher.finish()
    };
    format!("{:016x}{:016x}", half(0), half(1))
}

/// Splits a text into lines with their line breaks. The tokenizer encodes them in parallel.
fn lines(text: &str) -> impl Iterator<Item = &str> + Send {
    text.split_inclusive('\n')
}

/// Splits a text before each line break that follows something else than white space. No word piece
/// of GPT-2's goes over such a place.
fn paragraphs(text: &str) -> impl Iterator<Item = &str> {
    let mut start = 0;
    let mut last = ' ';
    let mut places = Vec::new();
    for (at, char) in text.char_indices() {
        if char == '\n' && !last.is_whitespace() {
            places.push(start..at);
            start = at;
        }
        last = char;
    }
    places.push(start..text.len());
    places.into_iter().filter(|range| !range.is_empty()).map(|range| &text[range])
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "the white whale, the white squall\n\nthe whale’s way — the white way\n";

    #[test]
    fn any_text_comes_back() {
        let bpe = Bpe::train(TEXT, 300).unwrap();
        for text in [TEXT, "Unseen: 鯨 \u{7f}\t\0  “quoted”\r\n"] {
            let ids = bpe.encode(text).unwrap();
            assert!(ids.iter().all(|id| (*id as usize) < bpe.vocabulary()));
            assert_eq!(bpe.decode(&ids).unwrap(), text);
        }
        assert!(bpe.encode(TEXT).unwrap().len() < TEXT.len() / 2, "frequent words are one piece");
    }

    #[test]
    fn the_same_text_gives_the_same_pieces() {
        let text = crate::text::Text::embedded().unwrap().held_out;
        let ids = || Bpe::train(&text, 1000).unwrap().encode(&text).unwrap();
        assert_eq!(ids(), ids());
    }

    #[test]
    fn the_pieces_of_a_text_are_cached() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("new");
        let ids = |text: &str, size| {
            Bpe::cached(text, size, Some(&folder)).unwrap().encode(TEXT).unwrap()
        };
        let first = ids(TEXT, 300);
        let files = || {
            let paths = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
            paths.collect::<Vec<_>>()
        };
        let [file] = &files()[..] else { panic!("{:?}", files()) };
        // The cached file is used: here that of another text.
        Bpe::train("a a", 300).unwrap().save(file).unwrap();
        assert_ne!(ids(TEXT, 300), first);
        std::fs::write(file, "torn").unwrap();
        assert_eq!(ids(TEXT, 300), first, "learned again");
        assert_eq!(ids(TEXT, 300), first, "and cached again");
        ids("another text", 300);
        ids(TEXT, 301);
        assert_eq!(files().len(), 3);
        // A file is in place of the folder.
        let learned = Bpe::cached(TEXT, 300, Some(file)).unwrap();
        assert_eq!(learned.encode(TEXT).unwrap(), first);
    }

    #[test]
    fn bytes_are_there_before_any_pair() {
        assert_eq!(Bpe::train("a", 300).unwrap().vocabulary(), BYTES);
        assert!(Bpe::train("a", 256).is_err());
    }
}
