//! The command line, in fairseq's words, and the recipe it resolves to where a flag is left out.
//!
//! Every constant of the training recipe stands in this file.

use std::path::PathBuf;

use clap::Parser;
use fsdp_runtime::env::{EnvError, RankEnv};
use fsdp_runtime::prelude::{Engine, ShardingStrategy};

use crate::arch::{Arch, KeptBlocks};
use crate::device::DeviceName;
use crate::schedule::{LrScheduler, Schedule};
use crate::train::Setup;

/// Pretrains a GPT whose weights, gradients and optimizer state are sharded over ranks.
///
/// Without flags: a tiny GPT reads Moby-Dick on two ranks.
#[derive(Parser, Clone, Debug)]
#[command(name = "gpt_pretrain")]
pub struct Cli {
    /// Size of the model: tiny, small, 1.3B, 2.7B, 6.7B, 13B, or fairseq's name for it
    #[arg(long, value_name = "NAME", default_value = "tiny")]
    pub arch: Arch,

    /// How many ranks share the model [default: 2 threads, or one a GPU]
    #[arg(long, value_name = "N", value_parser = size)]
    pub world_size: Option<usize>,

    /// What is sharded: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2
    #[arg(long, value_name = "NAME", default_value = "FULL_SHARD")]
    pub strategy: ShardingStrategy,

    /// Keep gathered parameters from forward to backward: faster, and more memory
    #[arg(long)]
    pub no_reshard_after_forward: bool,

    /// Gather parameters and compute in bfloat16, half the bytes of f32; the optimizer stays in f32
    #[arg(long, conflicts_with = "fp16")]
    pub bf16: bool,

    /// The same in float16, with a loss scale that adapts itself
    #[arg(long)]
    pub fp16: bool,

    /// Loss scale to begin with under --fp16
    #[arg(long, value_name = "SCALE", default_value = "128", value_parser = scale)]
    pub fp16_init_scale: f32,

    /// Loss scale below which a run under --fp16 ends: its loss has exploded
    #[arg(long, value_name = "SCALE", default_value = "1e-4", value_parser = scale)]
    pub min_loss_scale: f32,

    /// Keep parameters, gradients and optimizer state in the host's memory, and step there
    #[arg(long)]
    pub cpu_offload: bool,

    /// Keep a block's input alone for its backward, and run its forward again there
    #[arg(long)]
    pub checkpoint_activations: bool,

    /// The same, with those inputs in the host's memory
    #[arg(long)]
    pub offload_activations: bool,

    /// Batches whose gradients are added up to one update
    #[arg(long, value_name = "N", default_value = "1", value_parser = size)]
    pub update_freq: usize,

    /// Word pieces in a sample
    #[arg(long, value_name = "N", value_parser = size)]
    pub tokens_per_sample: Option<usize>,

    /// Samples in a batch, per rank
    #[arg(long, value_name = "N", value_parser = size)]
    pub batch_size: Option<usize>,

    /// Peak learning rate
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub lr: Option<f64>,

    /// How the learning rate falls: polynomial_decay, cosine or inverse_sqrt
    #[arg(long, value_name = "NAME", default_value = "polynomial_decay")]
    pub lr_scheduler: LrScheduler,

    /// Updates in which the learning rate rises
    #[arg(long, value_name = "N")]
    pub warmup_updates: Option<usize>,

    /// Updates after which to stop; by default one pass over the text, and two minutes of the tiny model
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_update: Option<usize>,

    /// Batches of held-out text to evaluate; by default all
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_valid_steps: Option<usize>,

    /// Update at which the learning rate has fallen to 0; by default the last one
    #[arg(long, value_name = "N", value_parser = positive)]
    pub total_num_update: Option<usize>,

    /// Bound on the norm of all gradients together; 0 for none
    #[arg(long, value_name = "NORM", default_value = "1", value_parser = from_zero)]
    pub clip_norm: f64,

    /// Decay of the matrices' weights; norms and biases do not decay
    #[arg(long, value_name = "RATE", default_value = "0.1", value_parser = from_zero)]
    pub weight_decay: f64,

    /// Adam's two betas
    #[arg(long, value_name = "(B1,B2)", default_value = "(0.9,0.98)", value_parser = betas)]
    pub adam_betas: (f32, f32),

    /// Dropout probability, of the embeddings and of what each half of a block adds
    #[arg(long, value_name = "P", default_value = "0", value_parser = probability)]
    pub dropout: f64,

    /// Seed of the initial weights, of dropout and of the order of the samples
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub seed: u64,

    /// Own text, UTF-8, one file after the other; the last tenth is held out
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub data: Vec<PathBuf>,

    /// Folder for the word pieces learnt from a text, so that the next start finds them; `none` to learn
    /// them at every start [default: fsdp-burn in the user's cache]
    #[arg(long, value_name = "FOLDER")]
    pub bpe_cache: Option<PathBuf>,

    /// How ranks communicate: auto, local, mpi or nccl
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub engine: Engine,

    /// Where to compute: auto, flex, cpu, wgpu, cuda or cuda:N
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub device: DeviceName,

    /// Updates from one log line to the next
    #[arg(long, value_name = "N", default_value = "20", value_parser = positive)]
    pub log_interval: usize,

    /// Memory of its device that a rank may use, such as 4GiB, in place of what is there
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub memory_limit: Option<usize>,

    /// Print the result as one JSON object, on the last line of standard output
    #[arg(long)]
    pub json: bool,

    /// No progress and no log lines, only the result
    #[arg(long)]
    pub quiet: bool,
}

/// How to train: what the flags say, and the defaults where they say nothing.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Batches to an update.
    pub update_freq: usize,
    /// Length of a sample.
    pub tokens_per_sample: usize,
    /// Samples in a batch, per rank.
    pub batch_size: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Its fall.
    pub lr_scheduler: LrScheduler,
    /// Updates of its rise.
    pub warmup_updates: usize,
    /// Updates in all; `None` for one pass over the text.
    pub max_update: Option<usize>,
    /// Update at which the rate is 0; `None` for the last one.
    pub total_num_update: Option<usize>,
    /// Bound on the gradients' norm; 0 for none.
    pub clip_norm: f64,
    /// AdamW's weight decay.
    pub weight_decay: f32,
    /// AdamW's betas.
    pub adam_betas: (f32, f32),
    /// Dropout probability.
    pub dropout: f64,
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// Updates to a log line.
    pub log_interval: usize,
    /// What is gathered and computed in.
    pub precision: Precision,
    /// Batches to evaluate.
    pub max_valid_steps: usize,
    /// What blocks keep for their backward.
    pub kept_blocks: KeptBlocks,
}

/// The type in which parameters are gathered and computed with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Precision {
    /// `f32`.
    Full,
    /// `bf16`.
    Bf16,
    /// `f16`, with a loss scale that begins so.
    Fp16 {
        /// The first scale.
        init_scale: f32,
        /// The least scale.
        min_scale: f32,
    },
}

struct Defaults {
    tokens_per_sample: usize,
    batch_size: usize,
    lr: f64,
    warmup_updates: usize,
    max_update: Option<usize>,
}

/// Of the tiny model: two minutes on two cores.
const TINY: Defaults = Defaults {
    tokens_per_sample: 128,
    batch_size: 4,
    lr: 4e-3,
    warmup_updates: 100,
    max_update: Some(1500),
};
/// Of the GPT-3 sizes: those of fairseq's example.
const GPT3: Defaults = Defaults {
    tokens_per_sample: 2048,
    batch_size: 8,
    lr: 1e-4,
    warmup_updates: 5,
    max_update: None,
};

impl Cli {
    /// How many ranks there are: as asked, or as many as processes were started.
    ///
    /// # Errors
    ///
    /// If the environment half says which of them this process is.
    pub fn world_size(&self) -> Result<usize, EnvError> {
        if let Some(asked) = self.world_size {
            return Ok(asked);
        }
        Ok(RankEnv::read()?.map_or_else(|| self.device.ranks(), |place| place.world.size()))
    }

    /// The model and its training, as these flags ask for them.
    pub fn setup(&self) -> Setup {
        Setup {
            arch: self.arch,
            strategy: self.strategy,
            reshard_after_forward: !self.no_reshard_after_forward,
            cpu_offload: self.cpu_offload,
            recipe: self.recipe(),
        }
    }

    /// Where word pieces are kept, if anywhere.
    pub fn bpe_cache(&self) -> Option<PathBuf> {
        let home = || std::env::home_dir().map(|home| home.join(".cache"));
        match &self.bpe_cache {
            Some(none) if none.as_os_str() == "none" => None,
            Some(folder) => Some(folder.clone()),
            None => {
                let cache = std::env::var_os("XDG_CACHE_HOME").filter(|folder| !folder.is_empty());
                Some(cache.map(PathBuf::from).or_else(home)?.join("fsdp-burn"))
            }
        }
    }

    /// The recipe these flags ask for.
    pub fn recipe(&self) -> Recipe {
        let defaults = if self.arch.is_tiny() { TINY } else { GPT3 };
        Recipe {
            update_freq: self.update_freq,
            tokens_per_sample: self.tokens_per_sample.unwrap_or(defaults.tokens_per_sample),
            batch_size: self.batch_size.unwrap_or(defaults.batch_size),
            lr: self.lr.unwrap_or(defaults.lr),
            lr_scheduler: self.lr_scheduler,
            warmup_updates: self.warmup_updates.unwrap_or(defaults.warmup_updates),
            max_update: self.max_update.or(defaults.max_update),
            total_num_update: self.total_num_update,
            clip_norm: self.clip_norm,
            weight_decay: self.weight_decay as f32,
            adam_betas: self.adam_betas,
            dropout: self.dropout,
            seed: self.seed,
            log_interval: self.log_interval,
            max_valid_steps: self.max_valid_steps.unwrap_or(usize::MAX),
            kept_blocks: match (self.checkpoint_activations, self.offload_activations) {
                (_, true) => KeptBlocks::OnHost,
                (true, false) => KeptBlocks::Inputs,
                (false, false) => KeptBlocks::Whole,
            },
            precision: match (self.bf16, self.fp16) {
                (true, _) => Precision::Bf16,
                (_, true) => Precision::Fp16 {
                    init_scale: self.fp16_init_scale,
                    min_scale: self.min_loss_scale,
                },
                _ => Precision::Full,
            },
        }
    }
}

impl Recipe {
    /// Updates of a run whose passes over the text have `per_epoch` each.
    pub fn updates(&self, per_epoch: usize) -> usize {
        self.max_update.unwrap_or(per_epoch)
    }

    /// The learning rate of a run of so many updates. A run shorter than its warm-up only rises.
    pub fn schedule(&self, updates: usize) -> Schedule {
        Schedule {
            scheduler: self.lr_scheduler,
            lr: self.lr,
            warmup: self.warmup_updates,
            total: self.total_num_update.unwrap_or(updates),
        }
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number from 1".into()),
        Ok(number) => Ok(number),
    }
}

/// A number whose product with a few others is still one.
fn size(text: &str) -> Result<usize, String> {
    const MOST: usize = 1 << 20;
    let expected = || format!("expected a whole number from 1 to {MOST}");
    positive(text).ok().filter(|size| *size <= MOST).ok_or_else(expected)
}

fn number(text: &str, fits: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    text.parse().ok().filter(|number| fits(*number)).ok_or_else(|| format!("expected {expected}"))
}

fn rate(text: &str) -> Result<f64, String> {
    number(text, |rate| rate > 0.0 && rate <= 1.0, "a number above 0 and at most 1, such as 1e-4")
}

fn scale(text: &str) -> Result<f32, String> {
    let fits = |scale| scale > 0.0 && scale <= f64::from(f32::MAX);
    Ok(number(text, fits, "a number above 0, such as 128")? as f32)
}

fn from_zero(text: &str) -> Result<f64, String> {
    number(text, |number| number >= 0.0 && number.is_finite(), "a number from 0")
}

fn probability(text: &str) -> Result<f64, String> {
    number(text, |probability| (0.0..1.0).contains(&probability), "a number from 0 to below 1")
}

/// As fairseq writes them, `(0.9, 0.98)`, or without the brackets.
fn betas(text: &str) -> Result<(f32, f32), String> {
    let bare = text.trim().trim_start_matches('(').trim_end_matches(')');
    let beta = |text: &str| text.trim().parse().ok().filter(|beta| (0.0..1.0).contains(beta));
    let found = bare.split_once(',').and_then(|(one, two)| beta(one).zip(beta(two)));
    found.ok_or_else(|| "expected two numbers from 0 to below 1, such as (0.9,0.98)".into())
}

/// A number of bytes, with a unit or without.
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
    let fits = |number: f64| number > 0.0 && number.is_finite();
    Ok((number(digits.trim(), fits, "a size above 0 such as 4GiB, 500MB or 1000000")? * size)
        as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("gpt_pretrain").chain(flags.split_whitespace()))
    }

    /// The flags of fairseq's own example that stand for something here.
    #[test]
    fn fairseqs_flags_are_understood() {
        let cli = parse(
            "--tokens-per-sample 2048 --batch-size 8 --arch transformer_lm_gpt3_13 \
             --adam-betas (0.9,0.98) --lr 0.0001 --lr-scheduler polynomial_decay \
             --warmup-updates 5 --total-num-update 10 --max-update 10 --log-interval 1 \
             --fp16 --fp16-init-scale 4 --cpu-offload --checkpoint-activations",
        )
        .unwrap();
        let recipe = cli.recipe();
        assert_eq!((cli.arch.name, recipe.adam_betas), ("13B", (0.9, 0.98)));
        assert_eq!((recipe.updates(1000), recipe.schedule(10).total), (10, 10));
        assert_eq!(recipe.dropout, 0.0, "as fairseq's GPT-3");
        assert_eq!(recipe.precision, Precision::Fp16 { init_scale: 4.0, min_scale: 1e-4 });
        assert!(cli.cpu_offload);
        assert_eq!(recipe.kept_blocks, KeptBlocks::Inputs);
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
    fn a_wrong_value_is_refused_with_what_would_be_right() {
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
        ] {
            let message = parse(flags).unwrap_err().to_string();
            assert!(message.contains(expected), "{flags}: {message}");
        }
    }
}
