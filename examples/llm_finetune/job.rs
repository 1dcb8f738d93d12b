//! Inputs of a run, read and checked before a rank starts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use fsdp_runtime::optim::GradScalerConfig;
use fsdp_runtime::prelude::*;

use crate::cli::{Cli, Recipe, SaveType};
use crate::common::launch_settings::LaunchSettings;
use crate::common::log_file::LogFile;
use crate::common::lora::Lora;
use crate::common::memory::RunMemory;
use crate::common::saver::CheckpointPlan;
use crate::common::tensorboard::TensorBoard;
use crate::config::ModelConfig;
use crate::conversations::{Split, read};
use crate::data::ChatTokenizer;
use crate::export::{Export, files_of};
use crate::generate::GenerateArgs;
use crate::sharding;
use crate::tiny;

/// Number of positions for generation, unless the model has fewer.
const POSITIONS: usize = 4096;
/// Names of files of weights.
const WEIGHTS: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

/// Inputs of a run, the same on every rank.
#[derive(Clone)]
pub struct Job {
    /// Sizes and settings of the model.
    pub config: ModelConfig,
    /// Number of positions that the model is built for.
    pub positions: usize,
    /// Directory of the weights to start from; new weights without it.
    pub weights: Option<PathBuf>,
    /// Adapters that are trained in place of the weights.
    pub lora: Option<Lora>,
    /// Directory of the adapters to start from; new ones without it.
    pub adapters: Option<PathBuf>,
    /// Name of the sharding strategy.
    pub strategy: String,
    /// Options to shard the model with.
    pub options: FsdpOptions,
    /// Loss scaling, for training in float16.
    pub scaler: Option<GradScalerConfig>,
    /// Hyperparameters.
    pub recipe: Recipe,
    /// Tokenizer, with its chat template.
    pub tokenizer: Arc<ChatTokenizer>,
    /// Conversations to train on.
    pub train: Arc<Split>,
    /// Conversations to evaluate on, if there are any.
    pub eval: Option<Arc<Split>>,
    /// Whether each epoch has an order of its own.
    pub shuffles: bool,
    /// Lines about the data, to be shown to the user.
    pub description: String,
    /// Perplexity of a bigram model on the held-out conversations, as a baseline.
    pub bigram_perplexity: Option<f64>,
    /// Interval of checkpoints, and the checkpoint to resume from.
    pub checkpoints: CheckpointPlan,
    /// What `--save` writes.
    pub export: Option<Export>,
    /// Messages to answer after the training.
    pub generate: GenerateArgs,
    /// Number of tensor parallel ranks.
    pub tensor_parallel: usize,
    /// Number of ranks that have parts of the same rows.
    pub context_parallel: usize,
    /// Whether to print no progress.
    pub quiet: bool,
    /// File that rank 0 appends lines of progress to.
    pub log_file: LogFile,
    /// Event file of rank 0.
    pub board: TensorBoard,
    /// Memory over time.
    pub memory: RunMemory,
}

/// The model of a run, without its weights.
pub struct Model {
    /// Sizes and settings.
    pub config: ModelConfig,
    /// Tokenizer, with its chat template.
    pub tokenizer: ChatTokenizer,
    /// Names and contents of the files next to the weights.
    pub files: Vec<(String, Vec<u8>)>,
    /// Directory of the weights, if there are any.
    pub weights: Option<PathBuf>,
}

impl Model {
    /// Reads the model of a directory, or the tiny one.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, has a setting that is not supported, or does not fit another one.
    pub fn read(folder: Option<&Path>) -> Result<Self> {
        let Some(folder) = folder else { return tiny::model() };
        let weights = WEIGHTS.iter().any(|name| folder.join(name).is_file());
        let model = Self {
            config: ModelConfig::read(folder)?,
            tokenizer: ChatTokenizer::from_folder(folder).context("--model")?,
            files: files_of(folder)?,
            weights: weights.then(|| folder.to_path_buf()),
        };
        let (ids, known) = (model.tokenizer.vocab_size(), model.config.vocab_size);
        ensure!(
            ids <= known,
            "{}: the tokenizer has {ids} tokens, and the model {known}",
            folder.display()
        );
        Ok(model)
    }
}

/// Checks that each tensor parallel rank has whole heads.
fn check_heads(ranks: usize, config: &ModelConfig) -> Result<()> {
    let heads = [config.num_attention_heads, config.num_key_value_heads];
    let divides = |ranks: usize| heads.iter().all(|heads| heads.is_multiple_of(ranks));
    let possible: Vec<String> =
        (1..=heads[1]).filter(|ranks| divides(*ranks)).map(|ranks| ranks.to_string()).collect();
    ensure!(
        divides(ranks),
        "--tp {ranks}: the model has {} heads of queries and {} of keys and values, which {} can share",
        heads[0],
        heads[1],
        possible.join(", ")
    );
    Ok(())
}

impl Job {
    /// Reads the model's configuration, the tokenizer and the conversations.
    ///
    /// # Errors
    ///
    /// If one of them cannot be read, or if they do not fit together.
    pub fn new(cli: &Cli, settings: &LaunchSettings) -> Result<Self> {
        let Model { config, tokenizer, files, weights } = Model::read(cli.model.as_deref())?;
        let known = config.max_position_embeddings;
        let max_length = cli.max_length(known);
        ensure!(max_length <= known, "--max-length {max_length}, where the model takes {known}");
        let tensor_parallel = sharding::tensor_parallel(cli, settings);
        check_heads(tensor_parallel, &config)?;
        let context_parallel = sharding::context_parallel(cli, settings);
        let blocks = match context_parallel {
            1 => 1,
            ranks => 2 * ranks,
        };
        let blocks = blocks * if cli.sequence_parallel { tensor_parallel } else { 1 };
        let lora = cli.lora.resolve(&[])?;
        let export = cli.save.as_ref().map(|folder| {
            let base = lora.as_ref().filter(|_| !cli.merge_adapters).and(cli.model.clone());
            Export::new(folder, cli.save_dtype.unwrap_or(SaveType::F32), files, base)
        });
        let data = read(cli, &tokenizer, max_length, blocks)?;
        Ok(Self {
            export: export.transpose()?,
            positions: known.min(max_length.max(POSITIONS)),
            config,
            weights,
            strategy: settings.strategy.to_string(),
            options: sharding::options(cli, settings, lora.as_ref()),
            lora,
            adapters: cli.lora.adapters.clone(),
            scaler: settings.scaler.clone(),
            recipe: cli.recipe(),
            tokenizer: Arc::new(tokenizer),
            train: Arc::new(data.train),
            eval: data.eval.map(Arc::new),
            shuffles: !cli.data.no_shuffle,
            description: data.description,
            bigram_perplexity: data.bigram_perplexity,
            checkpoints: cli.checkpoint_plan(),
            generate: cli.generate.clone(),
            tensor_parallel,
            context_parallel,
            quiet: cli.output.quiet,
            log_file: cli.log.open()?,
            board: cli.board.open()?,
            memory: cli.memory.start()?,
        })
    }
}
