//! WordPiece tokenizer: read from a model's directory, or trained on the training split.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainer};
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{
    AddedToken, EncodeInput, Model, NormalizedString, Normalizer, OffsetReferential, OffsetType,
    PreTokenizedString, PreTokenizer, Tokenizer, Trainer, TruncationParams,
};

use crate::common::tokenizers::tokenizer_error;
use crate::corpus::Example;

/// Special tokens. They have the ids 0 to 4 in a trained vocabulary.
const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
/// Maximum size of a trained vocabulary.
const VOCABULARY: usize = 8_000;
/// Minimum count in the training split for a character, or a pair of word pieces, to become a word
/// piece.
const MIN_COUNT: u64 = 2;
/// Minimum of `--max-length`: three special tokens and one word piece.
const SHORTEST: usize = 4;

/// Example converted to word-piece ids, not padded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Word-piece ids of `[CLS] first [SEP]` or `[CLS] first [SEP] second [SEP]`.
    pub ids: Vec<u32>,
    /// Token types, one per word piece: 0 in the first segment, 1 in the second.
    pub types: Vec<u32>,
    /// Class, counted from 0.
    pub label: usize,
}

/// Converts text to word-piece ids.
pub struct BertTokenizer {
    inner: Tokenizer,
    pad: u32,
}

impl BertTokenizer {
    /// Reads `tokenizer.json` from a model's directory or, if there is none, `vocab.txt`.
    ///
    /// # Errors
    ///
    /// If neither file exists, or if the file is malformed or lacks a special token.
    pub fn read(directory: &Path, max_length: usize) -> Result<Self> {
        let json = directory.join("tokenizer.json");
        if json.is_file() {
            let tokenizer = Tokenizer::from_file(&json)
                .map_err(|error| anyhow!("wrong tokenizer {}: {error}", json.display()))?;
            return Self::finish(tokenizer, max_length)
                .with_context(|| format!("wrong tokenizer {}", json.display()));
        }
        let path = directory.join("vocab.txt");
        if !path.is_file() {
            bail!("{} holds neither tokenizer.json nor vocab.txt", directory.display());
        }
        let text = fs::read(&path)
            .with_context(|| format!("cannot read the vocabulary {}", path.display()))?;
        let normalizer = normalizer(lower_case(directory)?);
        WordPiece::read_bytes(&text)
            .and_then(|vocabulary| WordPiece::builder().vocab(vocabulary).build())
            .map_err(tokenizer_error)
            .and_then(|model| assemble(model, normalizer))
            .and_then(|tokenizer| Self::finish(tokenizer, max_length))
            .with_context(|| format!("wrong vocabulary {}", path.display()))
    }

    /// Trains a vocabulary on a training split. The result depends on the split only.
    ///
    /// # Errors
    ///
    /// If the text cannot be processed, or `max_length` is too short.
    pub fn train(examples: &[Example], max_length: usize) -> Result<Self> {
        let model = train_model(examples)?;
        Self::finish(assemble(model, normalizer(true))?, max_length)
    }

    /// Sets the maximum length, and removes the padding and truncation that a saved tokenizer may
    /// have.
    fn finish(mut tokenizer: Tokenizer, max_length: usize) -> Result<Self> {
        ensure!(max_length >= SHORTEST, "--max-length {max_length} is below {SHORTEST}");
        let pad = tokenizer.token_to_id("[PAD]").context("it has no piece `[PAD]`")?;
        // The default strategy truncates the longer sentence of a pair first.
        let truncation = TruncationParams { max_length, ..Default::default() };
        tokenizer.with_padding(None).with_truncation(Some(truncation)).map_err(tokenizer_error)?;
        Ok(Self { inner: tokenizer, pad })
    }

    /// Returns the number of word pieces in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Returns the id of the padding token.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// Returns the contents of `tokenizer.json`, without this run's maximum length.
    ///
    /// # Errors
    ///
    /// If the tokenizer cannot be serialized.
    pub fn to_json(&self) -> Result<String> {
        let mut inner = self.inner.clone();
        inner.with_truncation(None).map_err(tokenizer_error)?;
        inner.to_string(true).map_err(tokenizer_error)
    }

    /// Returns the contents of `vocab.txt`: one word piece per line, in the order of ids.
    pub fn vocabulary(&self) -> String {
        let mut pieces: Vec<(u32, String)> =
            self.inner.get_vocab(true).into_iter().map(|(piece, id)| (id, piece)).collect();
        pieces.sort();
        pieces.into_iter().map(|(_, piece)| piece + "\n").collect()
    }

    /// Converts examples to word-piece ids, in order.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails on a text.
    pub fn encode(&self, examples: &[Example]) -> Result<Vec<Encoded>> {
        let inputs = examples.iter().map(|example| match &example.second {
            None => EncodeInput::from(example.first.as_str()),
            Some(second) => EncodeInput::from((example.first.as_str(), second.as_str())),
        });
        let encodings = self
            .inner
            .encode_batch_fast(inputs.collect(), true)
            .map_err(tokenizer_error)?
            .into_iter();
        let encoded = encodings.zip(examples).map(|(encoding, example)| Encoded {
            ids: encoding.get_ids().to_vec(),
            types: encoding.get_type_ids().to_vec(),
            label: example.label,
        });
        Ok(encoded.collect())
    }
}

/// Builds BERT's tokenizer for a vocabulary.
fn assemble(model: WordPiece, normalizer: BertNormalizer) -> Result<Tokenizer> {
    let id = |piece: &str| {
        model.token_to_id(piece).with_context(|| format!("it has no piece `{piece}`"))
    };
    id("[UNK]")?;
    let template = TemplateProcessing::builder()
        .try_single("[CLS] $A [SEP]")
        .and_then(|template| template.try_pair("[CLS] $A [SEP] $B:1 [SEP]:1"))
        .map_err(|error| anyhow!(error))?
        .special_tokens(vec![("[CLS]", id("[CLS]")?), ("[SEP]", id("[SEP]")?)])
        .build()?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer
        .with_normalizer(Some(normalizer))
        .with_pre_tokenizer(Some(BertPreTokenizer))
        .with_post_processor(Some(template));
    Ok(tokenizer)
}

/// Returns BERT's text normalization.
fn normalizer(lower_case: bool) -> BertNormalizer {
    BertNormalizer::new(true, true, None, lower_case)
}

/// Returns `do_lower_case` of the `tokenizer_config.json` next to a `vocab.txt`. Default: true.
fn lower_case(directory: &Path) -> Result<bool> {
    let path = directory.join("tokenizer_config.json");
    if !path.is_file() {
        return Ok(true);
    }
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let json: serde_json::Value =
        serde_json::from_str(&text).with_context(|| format!("wrong {}", path.display()))?;
    Ok(json["do_lower_case"].as_bool().unwrap_or(true))
}

/// Trains WordPiece on the words of the examples.
fn train_model(examples: &[Example]) -> Result<WordPiece> {
    let mut words = BTreeMap::<String, u64>::new();
    for example in examples {
        for text in [Some(&example.first), example.second.as_ref()].into_iter().flatten() {
            for word in split(text)? {
                *words.entry(word).or_default() += 1;
            }
        }
    }
    let mut characters = BTreeMap::<char, u64>::new();
    for (word, count) in &words {
        word.chars().for_each(|character| *characters.entry(character).or_default() += count);
    }
    characters.retain(|_, count| *count >= MIN_COUNT);
    words.retain(|word, _| word.chars().all(|character| characters.contains_key(&character)));

    // The trainer would number the continuing characters in the order of a hash map, and break ties
    // between merges by these numbers. As special tokens they have the same numbers in every run.
    let continuing = characters.keys().map(|character| format!("##{character}"));
    let pieces = SPECIAL.iter().map(ToString::to_string).chain(continuing);
    let mut trainer = WordPieceTrainer::builder()
        .vocab_size(VOCABULARY)
        .min_frequency(MIN_COUNT)
        .show_progress(false)
        .special_tokens(pieces.map(|piece| AddedToken::from(piece, true)).collect())
        .build();
    let repeated = words.iter().flat_map(|(word, count)| (0..*count).map(move |_| word));
    trainer.feed(repeated, |word| Ok(vec![word.to_string()])).map_err(tokenizer_error)?;
    let mut model = WordPiece::default();
    trainer.train(&mut model).map_err(tokenizer_error)?;
    Ok(model)
}

/// Splits text into the words that are then split into word pieces.
fn split(text: &str) -> Result<Vec<String>> {
    let mut normalized = NormalizedString::from(text);
    normalizer(true).normalize(&mut normalized).map_err(tokenizer_error)?;
    let mut words = PreTokenizedString::from(normalized);
    BertPreTokenizer.pre_tokenize(&mut words).map_err(tokenizer_error)?;
    let words = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
    Ok(words.into_iter().map(|(word, _, _)| word.to_string()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECES: &str = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\nsat\n##s\ndog\n,\n";

    fn example(first: &str, second: Option<&str>) -> Example {
        Example { label: 1, first: first.into(), second: second.map(Into::into) }
    }

    fn from_vocabulary(text: &str, max_length: usize) -> Result<BertTokenizer> {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("vocab.txt"), text).unwrap();
        BertTokenizer::read(directory.path(), max_length)
    }

    #[test]
    fn single_sentences_and_pairs() {
        let tokenizer = from_vocabulary(PIECES, 16).unwrap();
        let text = [example("The CATS, sát", None), example("the cat", Some("dogs ran"))];
        let encoded = tokenizer.encode(&text).unwrap();
        assert_eq!(encoded[0].ids, [2, 5, 6, 8, 10, 7, 3]);
        assert_eq!(encoded[0].types, [0; 7]);
        assert_eq!(encoded[1].ids, [2, 5, 6, 3, 9, 8, 1, 3]);
        assert_eq!(encoded[1].types, [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!((tokenizer.pad(), tokenizer.vocab_size(), encoded[1].label), (0, 11, 1));
    }

    #[test]
    fn the_longer_of_a_pair_is_cut_first() {
        let tokenizer = from_vocabulary(PIECES, 7).unwrap();
        let text = [example("cat cat cat cat cat cat", Some("dog"))];
        assert_eq!(tokenizer.encode(&text).unwrap()[0].ids, [2, 6, 6, 6, 3, 9, 3]);
    }

    #[test]
    fn a_tokenizer_json_is_the_same_and_its_padding_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let mut inner = from_vocabulary(PIECES, 16).unwrap().inner;
        inner.with_padding(Some(tokenizers::PaddingParams {
            strategy: tokenizers::PaddingStrategy::Fixed(99),
            ..Default::default()
        }));
        inner.save(directory.path().join("tokenizer.json"), false).unwrap();
        let tokenizer = BertTokenizer::read(directory.path(), 16).unwrap();
        assert_eq!(tokenizer.encode(&[example("cat", None)]).unwrap()[0].ids, [2, 6, 3]);
    }

    #[test]
    fn training_twice_gives_one_vocabulary() {
        let text = [
            example("The unwanted winner wins winning money, won by one.", Some("Résumé résumé")),
            example("money for the winner: one million won, one by one", None),
        ];
        let vocabulary = train_model(&text).unwrap().get_vocab();
        for _ in 0..5 {
            assert_eq!(train_model(&text).unwrap().get_vocab(), vocabulary);
        }
        let mut ids: Vec<_> = vocabulary.values().copied().collect();
        ids.sort_unstable();
        assert!(ids.iter().copied().eq(0..vocabulary.len() as u32));
        assert_eq!(SPECIAL.map(|piece| vocabulary[piece]), [0, 1, 2, 3, 4]);
        assert!(vocabulary.contains_key("money") && vocabulary.contains_key("resume"));
    }

    #[test]
    fn a_wrong_directory_or_vocabulary_is_a_clear_error() {
        let message = |result: Result<BertTokenizer>| format!("{:#}", result.err().unwrap());
        let empty = tempfile::tempdir().unwrap();
        let neither = message(BertTokenizer::read(empty.path(), 16));
        assert!(neither.contains("neither tokenizer.json nor vocab.txt"), "{neither}");
        let missing = message(from_vocabulary("[PAD]\n[UNK]\n[CLS]\n", 16));
        assert!(missing.contains("vocab.txt: it has no piece `[SEP]`"), "{missing}");
        assert!(message(from_vocabulary(PIECES, 3)).contains("--max-length 3 is below 4"));
        fs::write(empty.path().join("tokenizer.json"), "{").unwrap();
        assert!(message(BertTokenizer::read(empty.path(), 16)).contains("tokenizer.json"));
    }
}
