//! Command-line arguments, with fairseq's names.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use fsdp_runtime::launch::env::RankEnv;
use fsdp_runtime::prelude::{FsdpOptions, ShardingStrategy};

use crate::arch::Arch;
use crate::bpe::Gpt2Files;
use crate::checkpoints::CheckpointArgs;
use crate::common::args::{OutputArgs, RankArgs};
use crate::common::cache_folder::cache_folder;
use crate::common::log_file::LogArgs;
use crate::common::lora::LoraArgs;
use crate::common::memory::MemoryArgs;
use crate::common::parse::{bounded_count, learning_rate, number, positive, probability};
use crate::common::plan::PlanArgs;
use crate::common::tensorboard::TensorBoardArgs;
use crate::common::trace::TraceArgs;
use crate::fairseq::FairseqArgs;
use crate::generate::GenerateArgs;
use crate::learning_rate::LrScheduler;
use crate::logger::LogFormat;
use crate::preprocess::PreprocessArgs;
use crate::recipe::{Defaults, GPT3, Recipe, TINY};
use crate::sharding::{ActivationPolicy, Precision, Sharding};

/// Pretrains a GPT whose parameters, gradients and optimizer state are sharded over ranks.
///
/// Without arguments: pretrains a tiny GPT on Moby-Dick, on two ranks.
#[derive(Parser, Clone, Debug)]
#[command(name = "gpt_pretrain", args_override_self = true)]
#[command(args_conflicts_with_subcommands = true, subcommand_precedence_over_arg = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Data to train on: a directory that `gpt_pretrain preprocess` or fairseq-preprocess has written,
    /// or UTF-8 text files [default: the embedded book]
    #[arg(value_name = "DATA", conflicts_with = "data")]
    pub input: Vec<PathBuf>,

    /// Size of the model: tiny, small, 1.3B, 2.7B, 6.7B, 13B, or fairseq's name of it
    #[arg(long, value_name = "NAME", default_value = "tiny")]
    pub arch: Arch,

    /// Directory of a pretrained GPT-2 in Hugging Face's format, in place of --arch: `config.json`,
    /// `model.safetensors` (or several files and their index), and `vocab.json` with `merges.txt`, or
    /// `tokenizer.json`. Its weights are copied to a temporary file
    #[arg(long, value_name = "DIR", conflicts_with = "arch")]
    pub pretrained: Option<PathBuf>,

    #[command(flatten)]
    pub lora: LoraArgs,

    /// Directory to write the trained adapters to, in PEFT's format for GPT-2; only with --lora or
    /// --adapters
    #[arg(long, value_name = "DIR", requires = "pretrained")]
    pub save_adapters: Option<PathBuf>,

    #[command(flatten)]
    pub ranks: RankArgs,

    /// Configuration file with Accelerate's keys; flags override it [default: the one of `fsdp
    /// launch`, if there is one]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Seconds to wait for a rank in a collective, after which the run ends with an error
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub timeout: u64,

    /// Sharding options of the configuration file.
    #[arg(skip)]
    pub file_options: Option<FsdpOptions>,

    /// Whether the configuration file turns on the comparison of collectives.
    #[arg(skip)]
    pub debug: bool,

    /// Tensor parallel ranks: each has a part of the heads and of the feed-forward layers, and they take the same
    /// samples. The number divides those of the ranks and of the heads [default: that of the configuration file,
    /// or 1]
    #[arg(long = "tp", value_name = "N", value_parser = positive)]
    pub tensor_parallel: Option<usize>,

    /// Context parallel ranks: each has a part of every sample, for samples that are too long for one rank. A
    /// sample has a multiple of twice as many word pieces [default: that of the configuration file, or 1]
    #[arg(long = "cp", value_name = "N", value_parser = positive)]
    pub context_parallel: Option<usize>,

    /// Pass keys and values from one context parallel rank to the next, in place of gathering those of whole
    /// samples: less memory, and more exchanges [default: as the configuration file says]
    #[arg(long = "cp-ring")]
    pub context_ring: bool,

    /// Keep gathered parameters from forward to backward, which is faster and takes more memory
    #[arg(long)]
    pub no_reshard_after_forward: bool,

    /// Gather parameters and compute in bfloat16; the optimizer state stays in f32
    #[arg(long, conflicts_with = "fp16")]
    pub bf16: bool,

    /// Gather parameters and compute in float16, with dynamic loss scaling; the optimizer state
    /// stays in f32
    #[arg(long)]
    pub fp16: bool,

    /// Initial loss scale under --fp16
    #[arg(long, value_name = "SCALE", default_value = "128", value_parser = loss_scale)]
    pub fp16_init_scale: f32,

    /// Loss scale below which a run under --fp16 ends with an error, because its loss has exploded
    #[arg(long, value_name = "SCALE", default_value = "1e-4", value_parser = loss_scale)]
    pub min_loss_scale: f32,

    /// Store parameters, gradients and optimizer state in host memory, and run the optimizer there
    #[arg(long)]
    pub cpu_offload: bool,

    /// Keep only the input of each block for backward, and recompute its other activations there
    #[arg(long)]
    pub checkpoint_activations: bool,

    /// Recompute activations as --checkpoint-activations does, and store the inputs in host memory
    #[arg(long)]
    pub offload_activations: bool,

    /// Number of batches whose gradients are added up to one update; with several numbers, one for
    /// each epoch, of which the last holds for all further ones
    #[arg(long, value_name = "N,..", default_value = "1", value_delimiter = ',')]
    #[arg(value_parser = bounded_count)]
    pub update_freq: Vec<usize>,

    /// Word pieces in a sample [default: 128 for tiny, that of the model with --pretrained, otherwise 2048]
    #[arg(long, value_name = "N", value_parser = bounded_count)]
    pub tokens_per_sample: Option<usize>,

    /// Samples in a batch, per rank [default: 4 for tiny, otherwise 8]
    #[arg(long, value_name = "N", value_parser = bounded_count)]
    pub batch_size: Option<usize>,

    /// Peak learning rate [default: 4e-3 for tiny, otherwise 1e-4]
    #[arg(long, value_name = "RATE", value_parser = learning_rate)]
    pub lr: Option<f64>,

    /// How the learning rate falls after the warm-up: polynomial_decay, cosine or inverse_sqrt
    #[arg(long, value_name = "NAME", default_value = "polynomial_decay")]
    pub lr_scheduler: LrScheduler,

    /// Number of updates in which the learning rate rises [default: 100 for tiny, otherwise 0]
    #[arg(long, value_name = "N")]
    pub warmup_updates: Option<usize>,

    /// Maximum number of updates [default: 1500 for tiny, otherwise that of --max-epoch]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_update: Option<usize>,

    /// Maximum number of passes over the text [default: 1, or as --max-update says]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_epoch: Option<usize>,

    /// Number of epochs between two evaluations; the end of the run is evaluated in any case
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive)]
    pub validate_interval: usize,

    /// Number of batches per rank in the evaluation [default: all of the held-out text]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_valid_steps: Option<usize>,

    /// Update at which the learning rate reaches 0 [default: the last one]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub total_num_update: Option<usize>,

    /// Upper bound of the 2-norm of all gradients together; 0 for no bound [default: 1 for tiny,
    /// otherwise 0]
    #[arg(long, value_name = "NORM", value_parser = from_zero)]
    pub clip_norm: Option<f64>,

    /// Weight decay of matrices; biases and norms have none [default: 0.1 for tiny, otherwise 0]
    #[arg(long, value_name = "RATE", value_parser = from_zero)]
    pub weight_decay: Option<f64>,

    /// The two betas of AdamW [default: (0.9,0.98) for tiny, otherwise (0.9,0.999)]
    #[arg(long, value_name = "(B1,B2)", value_parser = betas)]
    pub adam_betas: Option<(f32, f32)>,

    /// Number that AdamW adds to the denominator
    #[arg(long, value_name = "EPS", default_value = "1e-8", value_parser = from_zero)]
    pub adam_eps: f64,

    /// Dropout probability of the embeddings and of the attention's and feed-forward block's output
    #[arg(long, value_name = "P", default_value = "0", value_parser = probability)]
    pub dropout: f64,

    /// Seed of the initial weights, of dropout, of the order of the samples and of --generate
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub seed: u64,

    /// UTF-8 text files to train on, joined in order; the last tenth is held out. The same as DATA
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub data: Vec<PathBuf>,

    #[command(flatten)]
    pub gpt2: Gpt2Files,

    /// Directory to cache the word pieces learned from a text in, or `none` to learn them in every
    /// run [default: fsdp-burn in the user's cache directory]
    #[arg(long, value_name = "FOLDER")]
    pub bpe_cache: Option<PathBuf>,

    /// Number of updates between two log lines [default: 20 for tiny, otherwise 100]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub log_interval: Option<usize>,

    /// Form of the log lines
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    pub log_format: LogFormat,

    /// Device memory that a rank may use, such as 4GiB: of the forecast, and of what is counted in
    /// training [default: the memory of the GPU, for the forecast]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub memory_limit: Option<usize>,

    #[command(flatten)]
    pub checkpoints: CheckpointArgs,

    #[command(flatten)]
    pub generate: GenerateArgs,

    #[command(flatten)]
    pub fairseq: FairseqArgs,

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

/// What the program does besides training.
#[derive(Subcommand, Clone, Debug)]
pub enum Command {
    /// Converts texts to word pieces, and writes them to files that DATA may name
    Preprocess(PreprocessArgs),
}

impl Cli {
    /// Returns the number of ranks: that of the arguments, of the started processes, or the
    /// device's default. `started` is this process's place among the started processes.
    pub fn world_size(&self, started: Option<&RankEnv>) -> usize {
        let started = || started.map(|place| place.world.size());
        let given = self.ranks.world_size.or_else(started);
        given.unwrap_or_else(|| self.ranks.device.default_ranks())
    }

    /// Returns the sharding strategy that the arguments name, if they do.
    pub fn strategy(&self) -> Option<ShardingStrategy> {
        self.ranks.strategy.or_else(|| self.fairseq.strategy())
    }

    /// Returns the paths of the data to train on; none for the embedded book.
    pub fn data(&self) -> &[PathBuf] {
        if self.input.is_empty() { &self.data } else { &self.input }
    }

    fn defaults(&self) -> Defaults {
        if self.arch.is_tiny() && self.pretrained.is_none() { TINY } else { GPT3 }
    }

    /// Returns how the model is sharded.
    pub fn sharding(&self) -> Sharding {
        Sharding {
            file_options: self.file_options.clone().unwrap_or_default(),
            strategy: self.strategy().unwrap_or(ShardingStrategy::FullShard),
            tensor_parallel: self.tensor_parallel.unwrap_or(1),
            context_parallel: self.context_parallel.unwrap_or(1),
            context_ring: self.context_ring,
            reshard_after_forward: !self.no_reshard_after_forward,
            cpu_offload: self.cpu_offload,
            precision: match (self.bf16, self.fp16) {
                (true, _) => Precision::Bf16,
                (_, true) => Precision::Fp16 {
                    init_scale: self.fp16_init_scale,
                    min_scale: self.min_loss_scale,
                },
                _ => Precision::Full,
            },
            activations: match (self.checkpoint_activations, self.offload_activations) {
                (_, true) => ActivationPolicy::RecomputeFromHost,
                (true, false) => ActivationPolicy::Recompute,
                (false, false) => ActivationPolicy::KeepAll,
            },
        }
    }

    /// Returns the hyperparameters of the run.
    pub fn recipe(&self) -> Recipe {
        let defaults = self.defaults();
        Recipe {
            update_freq: self.update_freq.clone(),
            tokens_per_sample: self.tokens_per_sample.unwrap_or(defaults.tokens_per_sample),
            batch_size: self.batch_size.unwrap_or(defaults.batch_size),
            lr: self.lr.unwrap_or(defaults.lr),
            lr_scheduler: self.lr_scheduler,
            warmup_updates: self.warmup_updates.unwrap_or(defaults.warmup_updates),
            max_update: self
                .max_update
                .or(defaults.max_update.filter(|_| self.max_epoch.is_none())),
            max_epoch: self.max_epoch,
            total_num_update: self.total_num_update,
            clip_norm: self.clip_norm.unwrap_or(defaults.clip_norm),
            weight_decay: self.weight_decay.unwrap_or(defaults.weight_decay) as f32,
            adam_betas: self.adam_betas.unwrap_or(defaults.adam_betas),
            adam_eps: self.adam_eps as f32,
            dropout: self.dropout,
            seed: self.seed,
            log_interval: self.log_interval.unwrap_or(defaults.log_interval),
            validate_interval: self.validate_interval,
            max_valid_steps: self.max_valid_steps.unwrap_or(usize::MAX),
        }
    }

    /// Returns the directory that word pieces are cached in, if they are.
    pub fn bpe_cache(&self) -> Option<PathBuf> {
        cache_folder(self.bpe_cache.as_deref())
    }
}

/// Parses a loss scale, above 0.
fn loss_scale(text: &str) -> Result<f32, String> {
    let is_valid = |scale| scale > 0.0 && scale <= f64::from(f32::MAX);
    Ok(number(text, is_valid, "a number above 0, such as 128")? as f32)
}

/// Parses a finite number from 0.
fn from_zero(text: &str) -> Result<f64, String> {
    number(text, |number| number >= 0.0 && number.is_finite(), "a number from 0")
}

/// Parses AdamW's betas as fairseq writes them, `(0.9, 0.98)`, or without brackets.
fn betas(text: &str) -> Result<(f32, f32), String> {
    let bare = text.trim().trim_start_matches('(').trim_end_matches(')');
    let beta = |text: &str| text.trim().parse().ok().filter(|beta| (0.0..1.0).contains(beta));
    let found = bare.split_once(',').and_then(|(one, two)| beta(one).zip(beta(two)));
    found.ok_or_else(|| "expected two numbers from 0 to below 1, such as (0.9,0.98)".into())
}

/// Parses a number of bytes, with or without a unit.
fn bytes(text: &str) -> Result<usize, String> {
    const UNITS: [(&str, f64); 6] = [
        ("KiB", 1024.0),
        ("MiB", 1_048_576.0),
        ("GiB", 1_073_741_824.0),
        ("KB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
    ];
    let known = UNITS.iter().find_map(|(unit, size)| Some((text.strip_suffix(unit)?, *size)));
    let (digits, size) = known.unwrap_or((text, 1.0));
    let is_valid = |number: f64| number > 0.0 && number.is_finite();
    let expected = "a size above 0 such as 4GiB, 500MB or 1000000";
    Ok((number(digits.trim(), is_valid, expected)? * size) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("gpt_pretrain").chain(flags.split_whitespace()))
    }

    #[test]
    fn sizes_have_units() {
        for (text, expected) in
            [("4GiB", 4 << 30), ("1.5 KB", 1500), ("500MB", 500_000_000), ("1024", 1024)]
        {
            assert_eq!(bytes(text), Ok(expected));
        }
        for wrong in ["", "GiB", "-1GiB", "4TB", "nan"] {
            assert!(bytes(wrong).unwrap_err().contains("4GiB"), "{wrong}");
        }
    }

    #[test]
    fn an_invalid_value_is_refused_with_the_valid_ones() {
        for (flags, expected) in [
            ("--batch-size 0", "a whole number from 1"),
            ("--lr 0", "a number above 0"),
            ("--dropout 1", "from 0 to below 1"),
            ("--adam-betas 0.9", "two numbers"),
            ("--adam-betas 0.9,1", "two numbers"),
            ("--arch 7B", "6.7B"),
            ("--lr-scheduler linear", "polynomial_decay"),
            ("--clip-norm=-1", "a number from 0"),
            ("--fp16-init-scale 0", "a number above 0"),
            ("--fp16 --bf16", "cannot be used with"),
            ("--update-freq 4,0", "a whole number from 1"),
            ("--optimizer adafactor", "adam, cpu_adam"),
            ("--task translation", "language_modeling"),
            ("--ddp-backend slowmo", "fully_sharded"),
            ("--resume auto", "--save-dir"),
            ("--save-dir a --resume b --restore-file c", "cannot be used with"),
            ("--keep-interval-updates 2", "--save-interval-updates"),
            ("folder --data file", "cannot be used with"),
        ] {
            let message = parse(flags).unwrap_err().to_string();
            assert!(message.contains(expected), "{flags}: {message}");
        }
    }
}
