//! Command-line arguments, and the training recipe with the defaults of arguments that are not given.
//!
//! All constants of the training recipe are in this file.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Parser, ValueEnum};

use crate::common::args::{OutputArgs, RankArgs};
use crate::common::checkpoints::{ResumeFrom, SaveArgs};
use crate::common::launch_settings::{LaunchInputs, LaunchSettings};
use crate::common::learning_rate::LrScheduler;
use crate::common::log_file::LogArgs;
use crate::common::lora::LoraArgs;
use crate::common::memory::MemoryArgs;
use crate::common::parse::{bounded_count, learning_rate, number, positive, probability};
use crate::common::plan::PlanArgs;
use crate::common::saver::CheckpointPlan;
use crate::common::tensorboard::TensorBoardArgs;
use crate::common::trace::TraceArgs;
use crate::common::training::total_steps;
use crate::generate::GenerateArgs;
use crate::model::CausalLm;

/// Classes of transformers whose place `DecoderLayer` takes.
const DECODER_LAYERS: [&str; 4] =
    ["LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"];

/// Fine-tunes a language model of the Llama family on conversations, in full or with LoRA adapters. Its
/// parameters, gradients and optimizer state are sharded over ranks.
///
/// Without arguments: trains a tiny model on the conversations in this repository, on two ranks.
#[derive(Parser, Clone, Debug)]
#[command(name = "llm_finetune")]
#[command(group = clap::ArgGroup::new("saving").multiple(true))]
pub struct Cli {
    /// Directory of the model to start from, as Hugging Face has it: `config.json`, safetensors (one file,
    /// or several and their index), `tokenizer.json`, and the chat template. Without weights the model is
    /// initialised [default: the tiny model in this repository, with new weights]
    #[arg(id = "pretrained", long = "model", value_name = "DIR")]
    pub model: Option<PathBuf>,

    #[command(flatten)]
    pub data: DataArgs,

    #[command(flatten)]
    pub lora: LoraArgs,

    /// Configuration file of `fsdp config` or Accelerate; arguments override it [default: the file that
    /// `fsdp launch` passes on, if any]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    #[command(flatten)]
    pub ranks: RankArgs,

    /// Seconds to wait for a rank in a collective, after which the run ends with an error
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub timeout: u64,

    #[command(flatten)]
    pub training: TrainingArgs,

    /// Gather parameters and compute in bfloat16; stored parameters and the optimizer state stay in f32
    #[arg(long)]
    pub bf16: bool,

    /// Tensor parallel ranks: each has a part of every matrix and of the heads, and they take the same rows.
    /// The number divides those of the ranks and of the key and value heads [default: that of the
    /// configuration file, or 1]
    #[arg(
        long = "tp",
        value_name = "N",
        value_parser = positive,
        conflicts_with = "chat"
    )]
    pub tensor_parallel: Option<usize>,

    /// Split the positions of a row over the tensor parallel ranks in norms, residuals and the inputs that
    /// --recompute keeps
    #[arg(long, requires = "tensor_parallel")]
    pub sequence_parallel: bool,

    /// Context parallel ranks: each has a part of every row, for conversations that are too long for one rank.
    /// Rows have a multiple of twice as many tokens [default: that of the configuration file, or 1]
    #[arg(
        long = "cp",
        value_name = "N",
        value_parser = positive,
        conflicts_with = "chat"
    )]
    pub context_parallel: Option<usize>,

    /// Pass keys and values from one context parallel rank to the next, in place of gathering those of whole
    /// rows: less memory, and more exchanges [default: as the configuration file says]
    #[arg(long = "cp-ring")]
    pub context_ring: bool,

    /// Keep only the input of each layer for backward, and recompute its other activations there
    #[arg(long)]
    pub recompute: bool,

    /// Store parameters, gradients and optimizer state in host memory, and run the optimizer there
    #[arg(long)]
    pub cpu_offload: bool,

    /// Directory to write the trained model to, in the format that transformers loads; with --lora or
    /// --adapters, the adapters alone, in PEFT's
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,

    /// Write the model with its adapters added to the weights, in place of the adapters alone
    #[arg(long, requires = "save")]
    pub merge_adapters: bool,

    /// Type of the numbers in the files of --save
    #[arg(long, value_name = "TYPE", requires = "save")]
    pub save_dtype: Option<SaveType>,

    /// Directory to save checkpoints in: at the end, on Ctrl-C, and every --save-every steps
    #[arg(long, value_name = "DIR", group = "saving")]
    pub save_dir: Option<PathBuf>,

    /// Number of steps between two checkpoints
    #[arg(long, value_name = "N", value_parser = positive, requires = "saving")]
    pub save_every: Option<usize>,

    /// Number of newest checkpoints to keep [default: all]
    #[arg(long, value_name = "N", value_parser = positive, requires = "saving")]
    pub keep_last: Option<usize>,

    /// Directory to resume from: a checkpoint, or a directory of checkpoints, of which the newest complete
    /// one is loaded; --world-size and --strategy may differ from the saved run's. `auto`: the newest
    /// complete checkpoint in --save-dir, or a new run if there is none
    #[arg(long, value_name = "DIR|auto", group = "saving", requires_if("auto", "save_dir"))]
    pub resume: Option<ResumeFrom>,

    #[command(flatten)]
    pub saves: SaveArgs,

    #[command(flatten)]
    pub generate: GenerateArgs,

    #[command(flatten)]
    pub output: OutputArgs,

    #[command(flatten)]
    pub log: LogArgs,

    #[command(flatten)]
    pub trace: TraceArgs,

    #[command(flatten)]
    pub memory: MemoryArgs,

    #[command(flatten)]
    pub plan: PlanArgs,

    #[command(flatten)]
    pub board: TensorBoardArgs,
}

/// Conversations, and how they become rows of a batch.
#[derive(Args, Clone, Debug)]
pub struct DataArgs {
    /// Files of conversations to train on: JSON lines or Parquet with `messages`, with `prompt` and
    /// `completion`, or with `text` [default: those in this repository]
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub data: Vec<PathBuf>,

    /// Files of conversations to evaluate on [default: a part of --data]
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub eval_data: Vec<PathBuf>,

    /// Fraction of --data that is held out for the evaluation; 0 for no evaluation
    #[arg(long, value_name = "F", default_value = "0.05", value_parser = probability)]
    #[arg(conflicts_with = "eval_data")]
    pub eval_fraction: f64,

    /// Maximum number of tokens in a row; longer conversations are reported and left out [default: that of
    /// the model, at most 1024]
    #[arg(long, value_name = "N", value_parser = bounded_count)]
    pub max_length: Option<usize>,

    /// How conversations are put into rows: `none` pads each to a row of its own; `first-fit` puts several
    /// into rows of --max-length, where they do not see each other, longest first; `in-order` does so in the
    /// order of the file
    #[arg(long, value_name = "HOW", value_enum, default_value_t)]
    pub packing: PackingName,

    /// Pad all rows to --max-length, in place of the longest row of a batch
    #[arg(long)]
    pub pad_to_max_length: bool,

    /// Cut longer conversations at the end, in place of leaving them out
    #[arg(long)]
    pub truncate: bool,

    /// Train on all tokens, in place of those of the assistant
    #[arg(long)]
    pub train_on_prompt: bool,

    /// End the run at the first conversation that cannot be used
    #[arg(long)]
    pub strict: bool,

    /// Train on the conversations in the order of the file
    #[arg(long)]
    pub no_shuffle: bool,

    /// Directory to cache the tokens of a file in, or `none` to make them in every run [default: fsdp-burn
    /// in the user's cache directory]
    #[arg(long, value_name = "DIR")]
    pub token_cache: Option<PathBuf>,
}

/// Hyperparameters.
#[derive(Args, Clone, Debug)]
pub struct TrainingArgs {
    /// Number of passes over the data [default: 1; 4 for the tiny model]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub epochs: Option<usize>,

    /// Number of training steps; without --epochs, as many epochs as the steps need
    #[arg(long, value_name = "N", value_parser = positive)]
    pub steps: Option<usize>,

    /// Step after which to stop early; the learning rates remain those of the whole run
    #[arg(long, value_name = "N", value_parser = positive)]
    pub stop_after: Option<usize>,

    /// Rows in a micro-batch, per rank
    #[arg(long, value_name = "N", default_value = "4", value_parser = positive)]
    pub batch_size: usize,

    /// Number of micro-batches of a step
    #[arg(long, visible_alias = "gradient-accumulation-steps", value_name = "N")]
    #[arg(default_value = "1", value_parser = positive)]
    pub accumulate: usize,

    /// Peak learning rate [default: 2e-5; 2e-4 with adapters; 3e-3 for the tiny model]
    #[arg(long, value_name = "RATE", value_parser = learning_rate)]
    pub learning_rate: Option<f64>,

    /// How the learning rate falls after the warm-up
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    pub lr_scheduler: LrScheduler,

    /// Fraction of the steps in which the learning rate rises
    #[arg(long, value_name = "F", default_value = "0.03", value_parser = probability)]
    pub warmup: f64,

    /// Weight decay of matrices; biases and norms have none
    #[arg(long, value_name = "RATE", default_value = "0", value_parser = from_zero)]
    pub weight_decay: f64,

    /// Upper bound of the 2-norm of all gradients together; 0 for no bound
    #[arg(long, value_name = "NORM", default_value = "1", value_parser = from_zero)]
    pub clip_norm: f64,

    /// Seed of new weights, of dropout, of the held-out part and of the order of the rows
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,

    /// Number of steps between two evaluations, besides those at the ends of epochs
    #[arg(long, value_name = "N", value_parser = positive)]
    pub eval_every: Option<usize>,

    /// Number of evaluations in a row without a lower loss, after which the run ends
    #[arg(long, value_name = "N", value_parser = positive)]
    pub patience: Option<usize>,
}

/// How conversations are put into rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum PackingName {
    /// A conversation in each row, padded.
    #[default]
    None,
    /// Several conversations in a row, longest first.
    FirstFit,
    /// Several conversations in a row, in their order.
    InOrder,
}

/// Type of the numbers in saved files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SaveType {
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

/// Hyperparameters of a run: the arguments, with defaults for those that are not given.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Number of passes over the data; `None` if only `steps` limits the run.
    pub epochs: Option<usize>,
    /// Maximum number of steps.
    pub steps: Option<usize>,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// The other hyperparameters, whose defaults do not depend on the model.
    pub args: TrainingArgs,
}

/// Defaults of the tiny model, which is trained from new weights.
const TINY: (usize, f64) = (4, 3e-3);
/// Number of epochs and learning rate of a pretrained model.
const FULL: (usize, f64) = (1, 2e-5);
/// Number of epochs and learning rate of adapters, which start at zero and are few.
const LORA: (usize, f64) = (1, 2e-4);
/// Maximum length, unless the model's is smaller.
const MAX_LENGTH: usize = 1024;

fn from_zero(text: &str) -> Result<f64, String> {
    number(text, |number| number >= 0.0 && number.is_finite(), "a number from 0")
}

impl Cli {
    /// Returns the settings of the launch and of sharding.
    ///
    /// # Errors
    ///
    /// If the configuration file cannot be read or does not fit the started processes.
    pub fn launch_settings(&self) -> Result<LaunchSettings> {
        LaunchSettings::new::<CausalLm>(LaunchInputs {
            config: self.config.as_deref(),
            ranks: &self.ranks,
            timeout: self.timeout,
            output: self.output,
            classes: &DECODER_LAYERS.map(|class| (class, "DecoderLayer")),
            cuts_rows: true,
        })
    }

    /// Returns the hyperparameters of the run.
    pub fn recipe(&self) -> Recipe {
        let (epochs, rate) = match (&self.model, self.lora.is_on()) {
            (None, _) => TINY,
            (Some(_), false) => FULL,
            (Some(_), true) => LORA,
        };
        let args = self.training.clone();
        Recipe {
            epochs: args.epochs.or(args.steps.is_none().then_some(epochs)),
            steps: args.steps,
            learning_rate: args.learning_rate.unwrap_or(rate),
            args,
        }
    }

    /// Returns the maximum number of tokens in a row of a model that takes `positions`.
    pub fn max_length(&self, positions: usize) -> usize {
        self.data.max_length.unwrap_or(MAX_LENGTH.min(positions))
    }

    /// Returns when to save checkpoints and which one to resume from.
    pub fn checkpoint_plan(&self) -> CheckpointPlan {
        let plan = CheckpointPlan::new(self.save_dir.clone(), self.resume.clone());
        let saves = self.saves;
        CheckpointPlan { every: self.save_every, keep_last: self.keep_last, saves, ..plan }
    }
}

impl Recipe {
    /// Returns the number of steps of a run whose epochs have `per_epoch` steps each.
    pub fn total_steps(&self, per_epoch: usize) -> usize {
        total_steps(self.epochs, self.steps, per_epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("llm_finetune").chain(flags.split_whitespace()))
    }

    #[test]
    fn defaults_depend_on_what_is_trained() {
        let of = |flags: &str| {
            let recipe = parse(flags).unwrap().recipe();
            (recipe.epochs, recipe.learning_rate)
        };
        assert_eq!(of(""), (Some(4), 3e-3));
        assert_eq!(of("--model dir"), (Some(1), 2e-5));
        assert_eq!(of("--model dir --lora 8"), (Some(1), 2e-4));
        assert_eq!(of("--model dir --steps 20"), (None, 2e-5));
        let length = |flags: &str| parse(flags).unwrap().max_length(256);
        assert_eq!((length(""), length("--max-length 40")), (256, 40));
    }

    #[test]
    fn an_invalid_value_is_refused_with_the_valid_ones() {
        for (flags, expected) in [
            ("--batch-size 0", "a whole number from 1"),
            ("--learning-rate nan", "a number above 0"),
            ("--warmup 1", "from 0 to below 1"),
            ("--packing best", "first-fit"),
            ("--lr-scheduler step", "cosine"),
            ("--resume auto", "--save-dir"),
            ("--lora 8", "--model"),
            ("--temperature=-1 --chat", "a number from 0"),
            ("--eval-data a --eval-fraction 0.1", "cannot be used with"),
        ] {
            let message = parse(flags).unwrap_err().to_string();
            assert!(message.contains(expected), "{flags}: {message}");
        }
    }
}
