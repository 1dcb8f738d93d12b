//! The command line: the flags, and the recipe they resolve to where one is left out.
//!
//! Every constant of the training recipe stands in this file. What `--device` names is looked up in
//! `device.rs`.

use std::path::PathBuf;

use clap::Parser;
use fsdp_runtime::prelude::{Engine, ShardingStrategy};

use crate::device::DeviceName;
use crate::saving::SavePlan;

/// Trains a BERT sentence classifier whose weights, gradients and optimizer state are sharded over
/// ranks.
///
/// Without flags: a small BERT, from scratch, tells spam from mail on two ranks.
#[derive(Parser, Clone, Debug)]
#[command(name = "bert_finetune")]
#[command(group = clap::ArgGroup::new("saving").multiple(true))]
pub struct Cli {
    /// Configuration file of `fsdp config` or Accelerate; flags override it [default: the one of `fsdp
    /// launch`]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// How many ranks share the model [default: as many as were started, or 2 threads, or one a GPU]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub world_size: Option<usize>,

    /// What ranks are: local (threads), mpi (processes, started by `mpirun`), nccl (a GPU each) or auto
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub engine: Engine,

    /// Seconds after which a rank that does not come ends the run
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub timeout: u64,

    /// What is sharded: FULL_SHARD (all of it), SHARD_GRAD_OP (weights stay gathered until backward),
    /// NO_SHARD (every rank holds the whole model), HYBRID_SHARD or HYBRID_SHARD_ZERO2 (as the first two,
    /// on each machine) [default: FULL_SHARD]
    #[arg(long, value_name = "NAME")]
    pub strategy: Option<ShardingStrategy>,

    /// Passes over the training split
    #[arg(long, value_name = "N", value_parser = positive)]
    pub epochs: Option<usize>,

    /// Steps after which to stop; alone, it takes as many epochs as that needs
    #[arg(long, value_name = "N", value_parser = positive)]
    pub steps: Option<usize>,

    /// Examples in a batch, per rank
    #[arg(long, value_name = "N", value_parser = positive)]
    pub batch_size: Option<usize>,

    /// Word pieces after which an example is cut
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_length: Option<usize>,

    /// Peak learning rate, reached at the end of the warm-up
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub learning_rate: Option<f64>,

    /// Dropout probability, in place of the model configuration's own
    #[arg(long, value_name = "P", value_parser = probability)]
    pub dropout: Option<f64>,

    /// Seed of the initial weights, of dropout and of the order of the examples
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,

    /// Own text: a directory with a train and a test file, or one file, of which a tenth is held out
    ///
    /// tsv or csv with the columns `label`, `sentence1` and, for pairs, `sentence2`; or the Microsoft
    /// paraphrase files as published.
    #[arg(long, value_name = "DIR|FILE")]
    pub data: Option<PathBuf>,

    /// Model to start from: `config.json`, `model.safetensors` (or several files and their index), and
    /// `tokenizer.json` or `vocab.txt`
    #[arg(long, value_name = "DIR")]
    pub pretrained: Option<PathBuf>,

    /// Where to write the trained model, as transformers loads it
    #[arg(long, value_name = "DIR")]
    pub save_pretrained: Option<PathBuf>,

    /// Folder to save checkpoints in: at the end, on Ctrl-C, and as --save-every says
    #[arg(long, value_name = "DIR", group = "saving")]
    pub save_dir: Option<PathBuf>,

    /// Steps between two checkpoints
    #[arg(long, value_name = "N", value_parser = positive, requires = "saving")]
    pub save_every: Option<usize>,

    /// Checkpoints to keep, the newest ones; by default all
    #[arg(long, value_name = "N", value_parser = positive, requires = "saving")]
    pub keep_last: Option<usize>,

    /// Goes on from the newest complete checkpoint in a folder, at any --world-size and --strategy
    ///
    /// Without --save-dir, new checkpoints go to the same folder.
    #[arg(long, value_name = "DIR", group = "saving")]
    pub resume: Option<PathBuf>,

    /// Step after which to end early, with the learning rates of the whole run
    #[arg(long, value_name = "N", value_parser = positive)]
    pub stop_after: Option<usize>,

    /// Where to compute: auto, flex, cpu, wgpu, cuda or cuda:N
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub device: DeviceName,

    /// Print the result as one JSON object, on the last line of standard output
    #[arg(long)]
    pub json: bool,

    /// No progress, only the result
    #[arg(long)]
    pub quiet: bool,
}

/// How to train: what the flags say, and the defaults where they say nothing.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Passes over the training split; `None` if only `steps` bounds the run.
    pub epochs: Option<usize>,
    /// Steps after which to stop, where given.
    pub steps: Option<usize>,
    /// Step after which to end early, where given.
    pub stop_after: Option<usize>,
    /// Examples in a batch, per rank.
    pub batch_size: usize,
    /// Longest example, in word pieces.
    pub max_length: usize,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// AdamW's weight decay, on matrices only.
    pub weight_decay: f32,
    /// Part of all steps in which the learning rate rises; it falls in the rest.
    pub warmup: f64,
    /// Bound on the norm of all gradients together.
    pub max_norm: f64,
    /// Seed of everything that is drawn.
    pub seed: u64,
}

/// Defaults of a small model from scratch.
const SCRATCH: Defaults = Defaults { epochs: 5, batch_size: 8, learning_rate: 5e-4 };
/// Defaults of a pretrained model.
const FINE_TUNE: Defaults = Defaults { epochs: 3, batch_size: 8, learning_rate: 5e-5 };
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
    /// The recipe these flags ask for.
    pub fn recipe(&self) -> Recipe {
        let defaults = if self.pretrained.is_some() { FINE_TUNE } else { SCRATCH };
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

    /// When to save and from where to resume.
    pub fn save_plan(&self) -> SavePlan {
        let plan = SavePlan::new(self.save_dir.clone(), self.resume.clone());
        SavePlan { every: self.save_every, keep_last: self.keep_last, ..plan }
    }
}

impl Recipe {
    /// All steps of a run whose epochs have `per_epoch` each.
    pub fn total_steps(&self, per_epoch: usize) -> usize {
        let in_epochs = self.epochs.map(|epochs| epochs.saturating_mul(per_epoch));
        match (in_epochs, self.steps) {
            (Some(in_epochs), Some(steps)) => in_epochs.min(steps),
            (in_epochs, steps) => in_epochs.or(steps).unwrap_or(per_epoch),
        }
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number from 1".into()),
        Ok(number) => Ok(number),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate <= 1.0 => Ok(rate),
        _ => Err("expected a number above 0 and at most 1, such as 5e-5".into()),
    }
}

fn probability(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(probability) if (0.0..1.0).contains(&probability) => Ok(probability),
        _ => Err("expected a number from 0 to below 1".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("bert_finetune").chain(flags.split_whitespace()))
    }

    #[test]
    fn a_pretrained_model_has_defaults_of_its_own() {
        let scratch = parse("").unwrap().recipe();
        let tuned = parse("--pretrained dir").unwrap().recipe();
        assert_eq!((scratch.epochs, scratch.learning_rate), (Some(5), 5e-4));
        assert_eq!((tuned.epochs, tuned.learning_rate), (Some(3), 5e-5));
    }

    #[test]
    fn steps_alone_run_past_the_default_epochs() {
        assert_eq!(parse("--steps 500").unwrap().recipe().total_steps(10), 500);
        assert_eq!(parse("--steps 500 --epochs 2").unwrap().recipe().total_steps(10), 20);
        assert_eq!(parse("--epochs 2").unwrap().recipe().total_steps(10), 20);
    }

    #[test]
    fn a_wrong_value_is_refused_with_what_would_be_right() {
        for (flags, expected) in [
            ("--batch-size 0", "a whole number from 1"),
            ("--learning-rate nan", "a number above 0"),
            ("--dropout 1", "from 0 to below 1"),
            ("--save-every 3", "--save-dir"),
            ("--device tpu", "auto, flex, cpu, wgpu, cuda or cuda:N"),
        ] {
            let message = parse(flags).unwrap_err().to_string();
            assert!(message.contains(expected), "{flags}: {message}");
        }
    }
}
