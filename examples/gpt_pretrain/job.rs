//! Inputs of a run, read and checked before a rank starts.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, from_pretrained};
use tempfile::{TempDir, TempPath};

use crate::arch::Arch;
use crate::batch::Blocks;
use crate::bpe::Bpe;
use crate::checkpoints::CheckpointArgs;
use crate::cli::Cli;
use crate::common::lora::{Lora, load_adapters};
use crate::common::memory::RunMemory;
use crate::common::tensorboard::TensorBoard;
use crate::data::Data;
use crate::generate::GenerateArgs;
use crate::logger::Logger;
use crate::model::{Gpt, GptConfig};
use crate::peft::{AdapterExport, import};
use crate::pretrained::{Gpt2Config, convert};
use crate::recipe::Recipe;
use crate::sharding::Sharding;

/// Linear layers with adapters, as in the paper of LoRA.
const LORA_TARGETS: [&str; 2] = ["query", "value"];

/// Model, sharding and hyperparameters: the inputs of a run without the text.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Sizes of the model.
    pub arch: Arch,
    /// Maximum length of a text, in word pieces.
    pub positions: usize,
    /// Whether the GELU is its tanh approximation.
    pub tanh_gelu: bool,
    /// Adapters that are trained in place of the weights.
    pub lora: Option<Lora>,
    /// Directory of the adapters to start from, with the names of the model here.
    pub adapters: Option<Arc<TempDir>>,
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
    pub bigram_perplexity: Option<f64>,
    /// Tokenizer, where there is one.
    pub bpe: Option<Bpe>,
    /// Where to save the adapters after the training.
    pub export: Option<AdapterExport>,
    /// Pretrained weights, in a temporary file.
    pub weights: Option<Arc<TempPath>>,
    /// Texts to continue after the training.
    pub generate: GenerateArgs,
    /// When to save checkpoints, and which one to resume from.
    pub checkpoints: CheckpointArgs,
    /// Log of rank 0.
    pub logger: Logger,
    /// Event file of rank 0.
    pub board: TensorBoard,
    /// Memory over time.
    pub memory: RunMemory,
    /// Most bytes that the model may take on a rank's device.
    pub memory_limit: Option<usize>,
}

/// Checks that each rank has whole heads, and equal parts of a sample.
fn check_parts(sharding: &Sharding, arch: Arch, recipe: &Recipe) -> Result<()> {
    let Sharding { tensor_parallel, context_parallel, .. } = *sharding;
    ensure!(
        arch.heads.is_multiple_of(tensor_parallel),
        "--tp {tensor_parallel}: the model has {} heads, which that many ranks cannot share",
        arch.heads
    );
    let blocks = sharding.blocks();
    ensure!(
        recipe.tokens_per_sample.is_multiple_of(blocks),
        "--cp {context_parallel}: --tokens-per-sample {} is no multiple of {blocks}",
        recipe.tokens_per_sample
    );
    Ok(())
}

impl Setup {
    /// Returns the setup that the arguments ask for.
    ///
    /// # Errors
    ///
    /// If the configuration of the pretrained model or the adapters cannot be read or are not
    /// supported, or if samples are longer than the model takes.
    pub fn new(cli: &Cli) -> Result<Self> {
        let config = cli.pretrained.as_deref().map(Gpt2Config::read).transpose()?;
        let mut recipe = cli.recipe();
        let mut positions = recipe.tokens_per_sample;
        if let Some(config) = &config {
            positions = config.n_positions;
            recipe.tokens_per_sample = cli.tokens_per_sample.unwrap_or(positions);
            ensure!(
                recipe.tokens_per_sample <= positions,
                "--tokens-per-sample {}, where the pretrained model takes {positions}",
                recipe.tokens_per_sample
            );
        }
        let sharding = cli.sharding();
        check_parts(&sharding, config.as_ref().map_or(cli.arch, Gpt2Config::arch), &recipe)?;
        let adapters = cli.lora.adapters.as_deref().map(import).transpose()?;
        let mut lora = cli.lora.clone();
        lora.adapters = adapters.as_ref().map(|folder| folder.path().to_path_buf());
        Ok(Self {
            arch: config.as_ref().map_or(cli.arch, Gpt2Config::arch),
            positions,
            tanh_gelu: config.as_ref().is_some_and(Gpt2Config::tanh_gelu),
            lora: lora.resolve(&LORA_TARGETS)?,
            adapters: adapters.map(Arc::new),
            sharding,
            recipe,
        })
    }

    /// Builds the model. Its parameters are not initialised yet.
    ///
    /// # Errors
    ///
    /// If no linear layer has the name of an adapter's target.
    pub fn model(&self, device: &Device) -> Result<Gpt> {
        let Self { arch, positions, tanh_gelu, .. } = *self;
        let dropout = self.recipe.dropout;
        let model = GptConfig { arch, positions, dropout, tanh_gelu }.init(device);
        match &self.lora {
            Some(lora) => lora.config.apply(model).context("--lora"),
            None => Ok(model),
        }
    }

    /// Returns the options to shard the model with.
    pub fn options(&self) -> FsdpOptions {
        let options = self.sharding.options().with_seed(self.recipe.seed);
        match &self.lora {
            Some(lora) => options.with_storage(StoragePolicy::new().with_frozen(lora.storage)),
            None => options,
        }
    }
}

impl Job {
    /// Builds the model and shards it over all ranks. Its weights are initialised, read from a
    /// pretrained model, or left uninitialised if a checkpoint is loaded next.
    ///
    /// # Errors
    ///
    /// If the model cannot be sharded as the setup asks, the pretrained weights do not fit it, or a
    /// peer fails.
    pub fn shard(&self, worker: &Worker, resumes: bool) -> Result<Fsdp<Gpt>> {
        let (model, options) = (self.setup.model(worker.device())?, self.setup.options());
        match &self.weights {
            Some(weights) if !resumes => {
                let weights: &Path = weights;
                let load = LoadOptions::new().with_new_adapters();
                let (mut model, _) = from_pretrained(model, worker, options, weights, &load)
                    .context("cannot start from the weights of --pretrained")?;
                if let Some(folder) = &self.setup.adapters {
                    load_adapters(&mut model, folder.path())?;
                }
                Ok(model)
            }
            _ => Ok(fully_shard(model, worker, options.with_deferred_init(resumes))?),
        }
    }

    /// Reads the data. Under `verbose` prints their size.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or if the text is too short for one sample.
    pub fn new(cli: &Cli, setup: Setup, verbose: bool) -> Result<Self> {
        ensure!(
            setup.lora.is_some() || cli.save_adapters.is_none(),
            "--save-adapters, and the run trains none; add --lora 8"
        );
        ensure!(
            (cli.lora.lora_ranks.is_empty() && cli.lora.lora_alphas.is_empty())
                || cli.save_adapters.is_none(),
            "--save-adapters writes adapters of one rank and alpha; leave --lora-ranks and --lora-alphas out"
        );
        ensure!(
            cli.lora.lora_modules_to_save.is_empty() || cli.save_adapters.is_none(),
            "--save-adapters writes adapters alone; leave --lora-modules-to-save out"
        );
        ensure!(
            cli.lora.lora_layers.is_empty() || cli.save_adapters.is_none(),
            "--save-adapters writes adapters of all blocks; leave --lora-layers out"
        );
        let export = match (&cli.save_adapters, &cli.pretrained) {
            (Some(folder), Some(base)) => {
                Some(AdapterExport::new(folder, base, setup.arch.layers)?)
            }
            _ => None,
        };
        let weights = cli.pretrained.as_deref().map(convert).transpose()?;
        let data = Data::read(cli, setup.arch.vocabulary)?;
        let name = data.name;
        if verbose {
            eprintln!(
                "{name}: {} word pieces to train on, {} held out, {} kinds",
                data.train.len(),
                data.held_out.len(),
                data.vocabulary
            );
        }
        let blocks = |pieces, purpose: &str| {
            Blocks::new(pieces, setup.recipe.tokens_per_sample)
                .with_context(|| format!("{name} is too short to {purpose}"))
        };
        Ok(Self {
            train: blocks(data.train, "train on")?,
            held_out: blocks(data.held_out, "evaluate on")?,
            bigram_perplexity: data.bigram_perplexity,
            bpe: data.bpe,
            export,
            weights: weights.map(Arc::new),
            generate: cli.generate.clone(),
            setup,
            checkpoints: cli.checkpoints.clone(),
            logger: Logger::new(cli.log_format, cli.output.quiet, cli.log.open()?),
            board: cli.board.open()?,
            memory: RunMemory::default(),
            memory_limit: cli.memory_limit,
        })
    }
}
