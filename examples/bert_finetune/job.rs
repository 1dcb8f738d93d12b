//! Inputs of a run, read and checked before a rank starts.

use std::path::PathBuf;

use anyhow::Result;
use fsdp_runtime::optim::GradScalerConfig;
use fsdp_runtime::prelude::*;

use crate::batch::Padding;
use crate::bert_config::BertConfig;
use crate::cli::{Cli, Recipe};
use crate::common::device::DeviceName;
use crate::common::launch_settings::LaunchSettings;
use crate::common::log_file::LogFile;
use crate::common::lora::Lora;
use crate::common::memory::RunMemory;
use crate::common::saver::CheckpointPlan;
use crate::common::tensorboard::TensorBoard;
use crate::corpus::Corpus;
use crate::export::Export;
use crate::lora;
use crate::tokenizer::{BertTokenizer, Encoded};

/// Returns the default of `--pad-to-multiple-of`. The tensor cores of a GPU take 8 elements at a time.
const fn default_multiple(device: DeviceName) -> usize {
    match device {
        DeviceName::Auto if cfg!(feature = "cuda") => 8,
        DeviceName::Wgpu | DeviceName::Cuda(_) => 8,
        DeviceName::Auto | DeviceName::Flex | DeviceName::Cpu => 1,
    }
}

/// Inputs of a run, the same on every rank.
#[derive(Clone, Debug)]
pub struct Job {
    /// Examples to train and evaluate on.
    pub dataset: Dataset,
    /// Shape of the model.
    pub config: BertConfig,
    /// Directory of the pretrained weights to start from.
    pub pretrained: Option<PathBuf>,
    /// Adapters that are trained in place of the weights.
    pub lora: Option<Lora>,
    /// Directory of the adapters to start from; new ones without it.
    pub adapters: Option<PathBuf>,
    /// Sharding strategy. It replaces the one in `options`.
    pub strategy: ShardingStrategy,
    /// Other sharding options: those of the configuration file, or the defaults.
    pub options: FsdpOptions,
    /// Loss scaling, for training in float16.
    pub scaler: Option<GradScalerConfig>,
    /// Hyperparameters.
    pub recipe: Recipe,
    /// Interval of checkpoints, and the checkpoint to resume from.
    pub checkpoints: CheckpointPlan,
    /// Directory and form of the exported model.
    pub export: Option<Export>,
    /// Whether to print no progress.
    pub quiet: bool,
    /// File that rank 0 appends lines of progress to.
    pub log_file: LogFile,
    /// Event file of rank 0.
    pub board: TensorBoard,
    /// Memory over time.
    pub memory: RunMemory,
}

/// Corpus converted to word-piece ids.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// One line about the data, to be shown to the user.
    pub description: String,
    /// Examples to train on.
    pub train: Vec<Encoded>,
    /// Held-out examples to evaluate on.
    pub test: Vec<Encoded>,
    /// Number of classes.
    pub classes: usize,
    /// How batches are padded.
    pub padding: Padding,
}

impl Job {
    /// Reads the corpus, the tokenizer and the model's configuration.
    ///
    /// # Errors
    ///
    /// If one of them cannot be read, or if they do not fit together.
    pub fn new(cli: &Cli, settings: &LaunchSettings) -> Result<Self> {
        let recipe = cli.recipe();
        let lora = lora::resolve(&cli.lora)?;
        let corpus = match &cli.data {
            Some(path) => Corpus::read(path)?,
            None => Corpus::embedded()?,
        };
        let (tokenizer, config) = match &cli.pretrained {
            Some(directory) => (
                BertTokenizer::read(directory, recipe.max_length)?,
                BertConfig::read(&directory.join("config.json"))?,
            ),
            None => {
                let tokenizer = BertTokenizer::train(&corpus.train, recipe.max_length)?;
                let config = BertConfig::small(tokenizer.vocab_size(), recipe.max_length);
                (tokenizer, config)
            }
        };
        config.check_input(tokenizer.vocab_size(), recipe.max_length)?;
        let padding = Padding {
            token: tokenizer.pad(),
            multiple_of: cli.pad_to_multiple_of.unwrap_or(default_multiple(settings.device)),
            max_length: recipe.max_length,
        };
        let pretrained = cli.pretrained.as_deref();
        let export =
            |folder: &PathBuf| Export::new(folder, &config, corpus.classes, &tokenizer, pretrained);
        Ok(Self {
            export: cli.save_pretrained.as_ref().map(export).transpose()?,
            dataset: Dataset::new(&corpus, &tokenizer, padding)?,
            config: config.with_dropout(cli.dropout),
            pretrained: cli.pretrained.clone(),
            lora,
            adapters: cli.lora.adapters.clone(),
            strategy: settings.strategy,
            options: settings.options.clone(),
            scaler: settings.scaler.clone(),
            recipe,
            checkpoints: cli.checkpoint_plan(),
            quiet: cli.output.quiet,
            log_file: cli.log.open()?,
            board: cli.board.open()?,
            memory: cli.memory.start()?,
        })
    }
}

impl Dataset {
    /// Converts a corpus to word-piece ids.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails on a text.
    pub fn new(corpus: &Corpus, tokenizer: &BertTokenizer, padding: Padding) -> Result<Self> {
        let description = format!(
            "{}: {} examples to train on, {} held out, {} classes, {} word pieces",
            corpus.name,
            corpus.train.len(),
            corpus.test.len(),
            corpus.classes,
            tokenizer.vocab_size()
        );
        Ok(Self {
            description,
            train: tokenizer.encode(&corpus.train)?,
            test: tokenizer.encode(&corpus.test)?,
            classes: corpus.classes,
            padding,
        })
    }
}
