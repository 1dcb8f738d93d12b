//! Inputs of a run, read and checked before a rank starts.

use anyhow::{Context, Result};
use burn::tensor::Device;
use fsdp_runtime::prelude::FsdpOptions;

use crate::arch::Arch;
use crate::batch::Blocks;
use crate::bigram::Bigram;
use crate::bpe::Bpe;
use crate::cli::Cli;
use crate::common::log_file::LogFile;
use crate::model::{Gpt, GptConfig};
use crate::recipe::Recipe;
use crate::sharding::Sharding;
use crate::text::Text;

/// Model, sharding and hyperparameters: the inputs of a run without the text.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Sizes of the model.
    pub arch: Arch,
    /// Settings of sharding.
    pub sharding: Sharding,
    /// Hyperparameters.
    pub recipe: Recipe,
}

/// Inputs of a run, the same on every rank.
#[derive(Clone, Debug)]
pub struct Job {
    /// Model, sharding and hyperparameters.
    pub setup: Setup,
    /// Text to train on.
    pub train: Blocks,
    /// Text to evaluate on.
    pub held_out: Blocks,
    /// Perplexity of a bigram model on the held-out text, as a baseline.
    pub bigram_perplexity: f64,
    /// Whether rank 0 prints log lines.
    pub log: bool,
    /// File that rank 0 appends log lines to.
    pub log_file: LogFile,
}

impl Setup {
    /// Returns the setup that the arguments ask for.
    pub fn new(cli: &Cli) -> Self {
        Self { arch: cli.arch, sharding: cli.sharding(), recipe: cli.recipe() }
    }

    /// Builds the model. Its parameters are not initialised yet.
    pub fn model(&self, device: &Device) -> Gpt {
        let Recipe { tokens_per_sample: positions, dropout, .. } = self.recipe;
        GptConfig { arch: self.arch, positions, dropout }.init(device)
    }

    /// Returns the options to shard the model with.
    pub fn options(&self) -> FsdpOptions {
        self.sharding.options().with_seed(self.recipe.seed)
    }
}

impl Job {
    /// Reads the text, trains the tokenizer and converts the text to word pieces. Under `verbose`
    /// prints their number.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or if the text is too short for one sample.
    pub fn new(cli: &Cli, setup: Setup, verbose: bool) -> Result<Self> {
        let text = match cli.data.as_slice() {
            [] => Text::embedded()?,
            files => Text::read(files)?,
        };
        let bpe = Bpe::cached(&text.train, setup.arch.vocabulary, cli.bpe_cache().as_deref())?;
        let (train, held_out) = (bpe.encode(&text.train)?, bpe.encode(&text.held_out)?);
        if verbose {
            eprintln!(
                "{}: {} word pieces to train on, {} held out, {} kinds",
                text.name,
                train.len(),
                held_out.len(),
                bpe.vocabulary()
            );
        }
        let bigram = Bigram::train(&train, bpe.vocabulary());
        let bigram_perplexity = bigram.perplexity(&held_out);
        let blocks = |pieces, purpose: &str| {
            Blocks::new(pieces, setup.recipe.tokens_per_sample)
                .with_context(|| format!("{} is too short to {purpose}", text.name))
        };
        Ok(Self {
            train: blocks(train, "train on")?,
            held_out: blocks(held_out, "hold a tenth of it out")?,
            bigram_perplexity,
            setup,
            log: !cli.output.quiet,
            log_file: cli.log.open()?,
        })
    }
}
