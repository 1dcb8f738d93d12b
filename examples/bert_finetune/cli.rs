//! Command-line arguments, and the training recipe with the defaults of arguments that are not
//! given.
//!
//! All constants of the training recipe are in this file.

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;

use crate::common::args::{OutputArgs, RankArgs};
use crate::common::checkpoints::{ResumeFrom, SaveArgs};
use crate::common::launch_settings::{LaunchInputs, LaunchSettings};
use crate::common::log_file::LogArgs;
use crate::common::lora::LoraArgs;
use crate::common::memory::MemoryArgs;
use crate::common::parse::{learning_rate, positive, probability};
use crate::common::plan::PlanArgs;
use crate::common::saver::CheckpointPlan;
use crate::common::tensorboard::TensorBoardArgs;
use crate::common::trace::TraceArgs;
use crate::common::training::total_steps;
use crate::model::BertForSequenceClassification;

/// Trains a BERT sentence classifier whose parameters, gradients and optimizer state are sharded
/// over ranks.
///
/// Without arguments: trains a small BERT from scratch to recognise spam, on two ranks.
#[derive(Parser, Clone, Debug)]
#[command(name = "bert_finetune")]
#[command(group = clap::ArgGroup::new("saving").multiple(true))]
pub struct Cli {
    /// Configuration file of `fsdp config` or Accelerate; arguments override it [default: the file
    /// that `fsdp launch` passes on, if any]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    #[command(flatten)]
    pub ranks: RankArgs,

    /// Seconds to wait for a rank in a collective, after which the run ends with an error
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub timeout: u64,

    /// Number of passes over the training split
    #[arg(long, value_name = "N", value_parser = positive)]
    pub epochs: Option<usize>,

    /// Number of training steps; without --epochs, as many epochs as the steps need
    #[arg(long, value_name = "N", value_parser = positive)]
    pub steps: Option<usize>,

    /// Examples in a batch, per rank
    #[arg(long, value_name = "N", value_parser = positive)]
    pub batch_size: Option<usize>,

    /// Maximum length of an example in word pieces; longer examples are truncated
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_length: Option<usize>,

    /// Divisor of the padded length of a batch, unless that is --max-length: a GPU then tunes its
    /// kernels for fewer lengths [default: 8 on GPUs, else 1]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub pad_to_multiple_of: Option<usize>,

    /// Peak learning rate, reached at the end of the warm-up
    #[arg(long, value_name = "RATE", value_parser = learning_rate)]
    pub learning_rate: Option<f64>,

    /// Dropout probability, in place of those in the model's configuration
    #[arg(long, value_name = "P", value_parser = probability)]
    pub dropout: Option<f64>,

    /// Seed of the initial weights, of dropout and of the order of the examples
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,

    /// Data to train on: a directory with a training and a test file, or one file, of which a tenth
    /// is held out [default: the embedded mail]
    ///
    /// Files are tsv or csv with the columns `label`, `sentence1` and, for sentence pairs,
    /// `sentence2`, or the Microsoft Research paraphrase files as published.
    #[arg(long, value_name = "DIR|FILE")]
    pub data: Option<PathBuf>,

    /// Directory of the pretrained model to start from: `config.json`, `model.safetensors` (or
    /// several files and their index), and `tokenizer.json` or `vocab.txt`
    #[arg(long, value_name = "DIR")]
    pub pretrained: Option<PathBuf>,

    #[command(flatten)]
    pub lora: LoraArgs,

    /// Directory to write the trained model to, in the format that transformers loads; with --lora
    /// or --adapters, the adapters and the classifier alone, in PEFT's
    #[arg(long, value_name = "DIR")]
    pub save_pretrained: Option<PathBuf>,

    /// Directory to save checkpoints in: at the end, on Ctrl-C, and every --save-every steps
    #[arg(long, value_name = "DIR", group = "saving")]
    pub save_dir: Option<PathBuf>,

    /// Number of steps between two checkpoints
    #[arg(long, value_name = "N", value_parser = positive, requires = "saving")]
    pub save_every: Option<usize>,

    /// Number of newest checkpoints to keep [default: all]
    #[arg(long, value_name = "N", value_parser = positive, requires = "saving")]
    pub keep_last: Option<usize>,

    /// Directory to resume from: a checkpoint, or a directory of checkpoints, of which the newest
    /// complete one is loaded; --world-size and --strategy may differ from the saved run's. `auto`:
    /// the newest complete checkpoint in --save-dir, or a new run if there is none
    ///
    /// Without --save-dir, new checkpoints are saved next to the loaded one.
    #[arg(long, value_name = "DIR|auto", group = "saving", requires_if("auto", "save_dir"))]
    pub resume: Option<ResumeFrom>,

    #[command(flatten)]
    pub saves: SaveArgs,

    /// Step after which to stop early; the learning rates remain those of the whole run
    #[arg(long, value_name = "N", value_parser = positive)]
    pub stop_after: Option<usize>,

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

/// Hyperparameters of a run: the arguments, with defaults for those that are not given.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Number of passes over the training split; `None` if only `steps` limits the run.
    pub epochs: Option<usize>,
    /// Maximum number of steps.
    pub steps: Option<usize>,
    /// Step after which to stop early. The learning rates do not depend on it.
    pub stop_after: Option<usize>,
    /// Examples in a batch, per rank.
    pub batch_size: usize,
    /// Maximum length of an example, in word pieces.
    pub max_length: usize,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// AdamW's weight decay, applied to matrices only.
    pub weight_decay: f32,
    /// Fraction of all steps in which the learning rate rises. It falls in the remaining steps.
    pub warmup: f64,
    /// Upper bound of the 2-norm of all gradients together.
    pub max_norm: f64,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Defaults of a small model that is trained from scratch.
const SCRATCH: Defaults = Defaults { epochs: 5, batch_size: 8, learning_rate: 5e-4 };
/// Defaults of a pretrained model.
const FINE_TUNE: Defaults = Defaults { epochs: 3, batch_size: 8, learning_rate: 5e-5 };
/// Defaults of LoRA adapters, which start at zero and are few.
const LORA: Defaults = Defaults { epochs: 3, batch_size: 8, learning_rate: 5e-4 };
const MAX_LENGTH: usize = 128;
const WEIGHT_DECAY: f32 = 0.01;
const WARMUP: f64 = 0.1;
const MAX_NORM: f64 = 1.0;

struct Defaults {
    epochs: usize,
    batch_size: usize,
    learning_rate: f64,
}

impl Cli {
    /// Returns the settings of the launch and of sharding.
    ///
    /// # Errors
    ///
    /// If the configuration file cannot be read or does not fit the started processes.
    pub fn launch_settings(&self) -> Result<LaunchSettings> {
        LaunchSettings::new::<BertForSequenceClassification>(self.launch_inputs())
    }

    fn launch_inputs(&self) -> LaunchInputs<'_> {
        LaunchInputs {
            config: self.config.as_deref(),
            ranks: &self.ranks,
            timeout: self.timeout,
            output: self.output,
            classes: &[],
            cuts_rows: false,
        }
    }

    /// Returns the hyperparameters of the run.
    pub fn recipe(&self) -> Recipe {
        let defaults = match (&self.pretrained, self.lora.is_on()) {
            (None, _) => SCRATCH,
            (Some(_), false) => FINE_TUNE,
            (Some(_), true) => LORA,
        };
        Recipe {
            epochs: self.epochs.or(self.steps.is_none().then_some(defaults.epochs)),
            steps: self.steps,
            stop_after: self.stop_after,
            batch_size: self.batch_size.unwrap_or(defaults.batch_size),
            max_length: self.max_length.unwrap_or(MAX_LENGTH),
            learning_rate: self.learning_rate.unwrap_or(defaults.learning_rate),
            weight_decay: WEIGHT_DECAY,
            warmup: WARMUP,
            max_norm: MAX_NORM,
            seed: self.seed,
        }
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
    use std::ffi::OsString;

    use fsdp_runtime::config::Config;
    use fsdp_runtime::launch::env::RankEnv;
    use fsdp_runtime::optim::GradScalerConfig;
    use fsdp_runtime::prelude::*;

    use super::*;
    use crate::common::device::DeviceName;

    fn parse(flags: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("bert_finetune").chain(flags.split_whitespace()))
    }

    #[test]
    fn a_pretrained_model_has_defaults_of_its_own() {
        let scratch = parse("").unwrap().recipe();
        let tuned = parse("--pretrained dir").unwrap().recipe();
        assert_eq!((scratch.epochs, scratch.learning_rate), (Some(5), 5e-4));
        assert_eq!((tuned.epochs, tuned.learning_rate), (Some(3), 5e-5));
        let adapted = parse("--pretrained dir --lora 8").unwrap().recipe();
        assert_eq!((adapted.epochs, adapted.learning_rate), (Some(3), 5e-4));
    }

    #[test]
    fn steps_alone_run_past_the_default_epochs() {
        assert_eq!(parse("--steps 500").unwrap().recipe().total_steps(10), 500);
        assert_eq!(parse("--steps 500 --epochs 2").unwrap().recipe().total_steps(10), 20);
        assert_eq!(parse("--epochs 2").unwrap().recipe().total_steps(10), 20);
    }

    #[test]
    fn an_invalid_value_is_refused_with_the_valid_ones() {
        for (flags, expected) in [
            ("--batch-size 0", "a whole number from 1"),
            ("--learning-rate nan", "a number above 0"),
            ("--dropout 1", "from 0 to below 1"),
            ("--save-every 3", "--save-dir"),
            ("--resume auto", "--save-dir"),
            ("--device tpu", "auto, flex, cpu, wgpu, cuda or cuda:N"),
        ] {
            let message = parse(flags).unwrap_err().to_string();
            assert!(message.contains(expected), "{flags}: {message}");
        }
    }

    const FILE: &str = "\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_transformer_layer_cls_to_wrap: BertLayer
mixed_precision: 'no'
num_machines: 1
num_processes: 4
use_cpu: true
";

    fn settings(flags: &str, started: Option<&RankEnv>) -> Result<LaunchSettings> {
        let cli = Cli::parse_from(std::iter::once("bert_finetune").chain(flags.split_whitespace()));
        let file = Some(Config::parse(FILE, "file.yaml")?);
        LaunchSettings::resolve::<BertForSequenceClassification>(cli.launch_inputs(), file, started)
    }

    /// Returns the environment of rank 0 of `world` processes.
    fn one_of(world: &str) -> RankEnv {
        let variable = |name: &str| match name {
            "RANK" | "LOCAL_RANK" => Some(OsString::from("0")),
            "WORLD_SIZE" => Some(world.into()),
            _ => None,
        };
        RankEnv::from_variables(variable).unwrap().unwrap()
    }

    #[test]
    fn the_file_says_what_no_flag_does() {
        let of_file = settings("--quiet", None).unwrap();
        assert_eq!(of_file.strategy, ShardingStrategy::ShardGradOp);
        assert_eq!(of_file.device, DeviceName::Flex, "`use_cpu`");
        let launch = format!("{:?}", of_file.launch);
        assert!(launch.contains("Exactly(4)"), "{launch}");
    }

    #[test]
    fn losses_are_scaled_in_float16() {
        let scales = |precision: &str| {
            let file = FILE.replace("mixed_precision: 'no'", precision);
            let cli = Cli::parse_from(["bert_finetune", "--quiet"]);
            let file = Some(Config::parse(&file, "file.yaml").unwrap());
            let inputs = cli.launch_inputs();
            let settings =
                LaunchSettings::resolve::<BertForSequenceClassification>(inputs, file, None);
            settings.unwrap().scaler
        };
        assert_eq!(scales("mixed_precision: fp16"), Some(GradScalerConfig::new()));
        for other in ["mixed_precision: bf16", "mixed_precision: 'no'"] {
            assert_eq!(scales(other), None);
        }
    }

    #[test]
    fn flags_override_the_file() {
        let flags = "--quiet --strategy NO_SHARD --world-size 3 --device cpu";
        let settings = settings(flags, None).unwrap();
        assert_eq!(settings.strategy, ShardingStrategy::NoShard);
        assert_eq!(settings.device, DeviceName::Cpu);
        let launch = format!("{:?}", settings.launch);
        assert!(launch.contains("Exactly(3)"), "{launch}");
    }

    #[test]
    fn a_file_for_four_processes_started_with_two_is_an_error() {
        let error = settings("--quiet", Some(&one_of("2"))).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("num_processes: 4") && text.contains("has started 2"), "{text}");
        assert!(settings("--quiet", Some(&one_of("4"))).is_ok());
    }
}
