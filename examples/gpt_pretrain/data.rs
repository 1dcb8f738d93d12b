//! Data of a run as word pieces: a text that is encoded at the start, or a directory of preprocessed
//! word pieces, which are read where they are needed.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::bigram::Bigram;
use crate::bpe::Bpe;
use crate::cli::Cli;
use crate::dictionary;
use crate::pretrained::tokenizer;
use crate::text::Text;
use crate::tokens::Tokens;

/// File of the vocabulary in a directory that fairseq-preprocess has written.
const DICTIONARY: &str = "dict.txt";
/// File of the tokenizer in a directory that `gpt_pretrain preprocess` has written.
pub const TOKENIZER: &str = "tokenizer.json";

/// Data of a run.
#[derive(Clone, Debug)]
pub struct Data {
    /// Name, to be shown to the user.
    pub name: String,
    /// Word pieces to train on.
    pub train: Tokens,
    /// Word pieces to evaluate on.
    pub held_out: Tokens,
    /// Number of different word pieces.
    pub vocabulary: usize,
    /// Tokenizer, where there is one.
    pub bpe: Option<Bpe>,
    /// Perplexity of a bigram model on the held-out text, as a baseline; only for a text in memory.
    pub bigram_perplexity: Option<f64>,
}

impl Data {
    /// Reads the data that the arguments name, in at most `vocabulary` different word pieces.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or if the data have more different word pieces.
    pub fn read(cli: &Cli, vocabulary: usize) -> Result<Self> {
        match cli.data() {
            [] => Self::encode(Text::embedded()?, cli, vocabulary),
            [folder] if folder.is_dir() => Self::open(folder, vocabulary),
            files => Self::encode(Text::read(files)?, cli, vocabulary),
        }
    }

    fn encode(text: Text, cli: &Cli, vocabulary: usize) -> Result<Self> {
        let bpe = match (cli.gpt2.read()?, &cli.pretrained) {
            (Some(bpe), _) => bpe,
            (None, Some(folder)) => tokenizer(folder)?,
            (None, None) => Bpe::cached(&text.train, vocabulary, cli.bpe_cache().as_deref())?,
        };
        check_vocabulary(bpe.vocabulary(), vocabulary, &text.name)?;
        let (train, held_out) = (bpe.encode(&text.train)?, bpe.encode(&text.held_out)?);
        let bigram = Bigram::train(&train, bpe.vocabulary());
        Ok(Self {
            bigram_perplexity: Some(bigram.perplexity(&held_out)),
            name: text.name,
            train: train.into(),
            held_out: held_out.into(),
            vocabulary: bpe.vocabulary(),
            bpe: Some(bpe),
        })
    }

    /// Opens a directory of preprocessed word pieces: `train` and `valid` with `.bin` and `.idx`,
    /// and `tokenizer.json` or fairseq's `dict.txt`.
    fn open(folder: &Path, vocabulary: usize) -> Result<Self> {
        let tokenizer = folder.join(TOKENIZER);
        let bpe = tokenizer.is_file().then(|| Bpe::read(&tokenizer)).transpose()?;
        let found = match &bpe {
            Some(bpe) => bpe.vocabulary(),
            None => dictionary::vocabulary(&folder.join(DICTIONARY)).with_context(|| {
                format!(
                    "{}; a directory of data has {TOKENIZER} of `gpt_pretrain preprocess`, or \
                     fairseq's {DICTIONARY}",
                    folder.join(DICTIONARY).display()
                )
            })?,
        };
        check_vocabulary(found, vocabulary, &folder.display().to_string())?;
        Ok(Self {
            name: folder.display().to_string(),
            train: Tokens::open(&folder.join("train"), vocabulary)?,
            held_out: Tokens::open(&folder.join("valid"), vocabulary)?,
            vocabulary: found,
            bpe,
            bigram_perplexity: None,
        })
    }
}

fn check_vocabulary(found: usize, vocabulary: usize, name: &str) -> Result<()> {
    ensure!(
        found <= vocabulary,
        "{name} has {found} kinds of word pieces, and the model {vocabulary}; choose a larger --arch, \
         or learn fewer"
    );
    Ok(())
}
