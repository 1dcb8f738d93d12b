//! Byte-pair encoding as GPT-2's: over bytes, so that any text can be written in it, and learnt from
//! the training text when the program first starts with it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::Path;

use anyhow::{Result, anyhow, ensure};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{EncodeInput, Tokenizer};

/// Every byte has a piece.
const BYTES: usize = 256;
/// Counted up when a text comes to have other pieces, by another tokenizer for one.
const FORMAT: u32 = 1;
/// A pair seen less often becomes no piece.
const MIN_COUNT: u64 = 2;

/// Cuts text into word pieces.
pub struct Bpe {
    inner: Tokenizer,
}

impl Bpe {
    /// As [`train`](Self::train), or as an earlier start has learnt from the same text and kept in
    /// `folder`. A folder that cannot be written to is told, and no error.
    ///
    /// # Errors
    ///
    /// As [`train`](Self::train).
    pub fn cached(text: &str, vocabulary: usize, folder: Option<&Path>) -> Result<Self> {
        let Some(folder) = folder else { return Self::train(text, vocabulary) };
        let file = folder.join(format!("bpe-{}.json", fingerprint(text, vocabulary)));
        // What cannot be read is learnt again, and written over.
        if let Ok(inner) = Tokenizer::from_file(&file) {
            return Ok(Self { inner });
        }
        let learnt = Self::train(text, vocabulary)?;
        if let Err(error) = learnt.keep(&file) {
            eprintln!("the word pieces are not kept in {}: {error:#}", file.display());
        }
        Ok(learnt)
    }

    /// Writes the pieces to a file, which is there as a whole or not at all.
    fn keep(&self, file: &Path) -> Result<()> {
        let text = self.inner.to_string(false).map_err(library)?;
        let folder = file.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let mut new = tempfile::NamedTempFile::new_in(folder)?;
        new.write_all(text.as_bytes())?;
        new.persist(file)?;
        Ok(())
    }

    /// Learns at most `vocabulary` pieces from a text. The same text gives the same pieces.
    ///
    /// # Errors
    ///
    /// If the text cannot be processed.
    pub fn train(text: &str, vocabulary: usize) -> Result<Self> {
        ensure!(
            vocabulary > BYTES,
            "a vocabulary of {vocabulary} has no room beside {BYTES} bytes"
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
        inner.train(&mut trainer, lines(text)).map_err(library)?;
        Ok(Self { inner })
    }

    /// Number of pieces.
    pub fn vocabulary(&self) -> usize {
        self.inner.get_vocab_size(false)
    }

    /// A text in pieces.
    ///
    /// # Errors
    ///
    /// If the tokenizer refuses it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let inputs: Vec<EncodeInput<'_>> = lines(text).map(EncodeInput::from).collect();
        let encodings = self.inner.encode_batch_fast(inputs, false).map_err(library)?;
        Ok(encodings.iter().flat_map(|encoding| encoding.get_ids().iter().copied()).collect())
    }
}

/// What the pieces are a function of, in 128 bits.
fn fingerprint(text: &str, vocabulary: usize) -> String {
    let half = |seed: u64| {
        let mut hasher = DefaultHasher::new();
        (seed, FORMAT, MIN_COUNT, vocabulary, text).hash(&mut hasher);
        hasher.finish()
    };
    format!("{:016x}{:016x}", half(0), half(1))
}

fn lines(text: &str) -> impl Iterator<Item = &str> + Send {
    text.split_inclusive('\n')
}

fn library(error: tokenizers::Error) -> anyhow::Error {
    anyhow!("tokenizer: {error}")
}

#[cfg(test)]
mod tests {
    use tokenizers::decoders::byte_level::ByteLevel as Decoder;

    use super::*;

    const TEXT: &str = "the white whale, the white squall\n\nthe whale’s way — the white way\n";

    #[test]
    fn any_text_comes_back() {
        let mut bpe = Bpe::train(TEXT, 300).unwrap();
        bpe.inner.with_decoder(Some(Decoder::default()));
        for text in [TEXT, "Unseen: 鯨 \u{7f}\t\0  “quoted”\r\n"] {
            let ids = bpe.encode(text).unwrap();
            assert!(ids.iter().all(|id| (*id as usize) < bpe.vocabulary()));
            assert_eq!(bpe.inner.decode(&ids, false).unwrap(), text);
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
    fn the_pieces_of_a_text_are_kept() {
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
        // What is kept is what is used: here that of another text.
        Bpe::train("a a", 300).unwrap().keep(file).unwrap();
        assert_ne!(ids(TEXT, 300), first);
        std::fs::write(file, "torn").unwrap();
        assert_eq!(ids(TEXT, 300), first, "learnt again");
        assert_eq!(ids(TEXT, 300), first, "and kept again");
        ids("another text", 300);
        ids(TEXT, 301);
        assert_eq!(files().len(), 3);
        // A file in the folder's place.
        let learnt = Bpe::cached(TEXT, 300, Some(file)).unwrap();
        assert_eq!(learnt.encode(TEXT).unwrap(), first);
    }

    #[test]
    fn bytes_are_there_before_any_pair() {
        assert_eq!(Bpe::train("a", 300).unwrap().vocabulary(), BYTES);
        assert!(Bpe::train("a", 256).is_err());
    }
}
