//! Command-line arguments: those of PyTorch's tutorial, and those that the examples share.

use std::path::PathBuf;

use clap::Parser;
use fsdp_runtime::launch::env::RankEnv;

use crate::common::args::{OutputArgs, RankArgs};
use crate::common::device::DeviceName;
use crate::common::parse::{bounded_count, number, positive};
use crate::sharding::Sharding;

/// Epochs without `--epochs`: PyTorch's default, and fewer for each run of a comparison.
const EPOCHS: usize = 10;
const COMPARED_EPOCHS: usize = 2;

/// Trains PyTorch's MNIST network on two ranks, as its tutorial on fully sharded data parallel
/// training does.
#[derive(Parser, Clone, Debug)]
#[command(name = "mnist")]
pub struct Cli {
    #[command(flatten)]
    pub ranks: RankArgs,

    /// Digits in a training batch, per rank
    #[arg(long, value_name = "N", value_parser = bounded_count, default_value_t = 64)]
    pub batch_size: usize,

    /// Digits in a test batch, per rank
    #[arg(long, value_name = "N", value_parser = bounded_count, default_value_t = 1000)]
    pub test_batch_size: usize,

    /// Number of passes over the training digits [default: 10, or 2 with --compare]
    #[arg(long, value_name = "N", value_parser = positive)]
    epochs: Option<usize>,

    /// Learning rate of Adadelta in the first epoch
    #[arg(long, value_name = "LR", value_parser = rate, default_value_t = 1.0)]
    pub lr: f64,

    /// Factor of the learning rate from one epoch to the next
    #[arg(long, value_name = "M", value_parser = gamma, default_value_t = 0.7)]
    pub gamma: f64,

    /// Compute on the CPU: `--device flex`
    #[arg(long, conflicts_with = "device")]
    pub no_accel: bool,

    /// Seed of the initial weights, of dropout and of the order of the digits
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub seed: u64,

    /// Write the trained model to `--out`, as a `model.safetensors` with PyTorch's names and layout
    #[arg(long)]
    pub save_model: bool,

    /// Smallest number of parameters of a layer that is a unit of its own; 20000 in the tutorial
    /// [default: the model is one unit]
    #[arg(long, value_name = "N")]
    pub min_num_params: Option<usize>,

    /// Keep parameters, gradients and the optimizer's state in host memory
    #[arg(long)]
    pub cpu_offload: bool,

    /// Train with DDP, FSDP as one unit, FSDP with size-based wrapping and FSDP with CPU offload,
    /// and write a table and pictures of memory over time to `--out`
    #[arg(long, conflicts_with_all = ["strategy", "min_num_params", "cpu_offload", "save_model"])]
    pub compare: bool,

    /// Directory of the files that are written
    #[arg(long, value_name = "DIR", default_value = "mnist-run")]
    pub out: PathBuf,

    #[command(flatten)]
    pub output: OutputArgs,
}

impl Cli {
    /// Returns the number of epochs.
    pub fn epochs(&self) -> usize {
        self.epochs.unwrap_or(if self.compare { COMPARED_EPOCHS } else { EPOCHS })
    }

    /// Returns the name of the device to compute on.
    pub fn device(&self) -> DeviceName {
        if self.no_accel { DeviceName::Flex } else { self.ranks.device }
    }

    /// Returns the number of ranks. `started` is the process's place among the ranks, if they are
    /// processes.
    pub fn world_size(&self, started: Option<&RankEnv>) -> usize {
        let default =
            || started.map_or_else(|| self.device().default_ranks(), |place| place.world.size());
        self.ranks.world_size.unwrap_or_else(default)
    }

    /// Returns how the arguments share the model between ranks.
    pub fn sharding(&self) -> Sharding {
        Sharding {
            strategy: self.ranks.strategy.unwrap_or_default(),
            min_num_params: self.min_num_params,
            cpu_offload: self.cpu_offload,
        }
    }
}

/// Parses a learning rate.
fn rate(text: &str) -> Result<f64, String> {
    number(text, |rate| rate > 0.0 && rate.is_finite(), "a number above 0, such as 1.0")
}

/// Parses the factor of the learning rate.
fn gamma(text: &str) -> Result<f64, String> {
    number(text, |gamma| gamma > 0.0 && gamma <= 1.0, "a number above 0 and at most 1, such as 0.7")
}

#[cfg(test)]
mod tests {
    use fsdp_runtime::prelude::ShardingStrategy;

    use super::*;

    fn parse(flags: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("mnist").chain(flags.split_whitespace()))
    }

    #[test]
    fn defaults_are_pytorchs() {
        let cli = parse("").unwrap();
        assert_eq!((cli.batch_size, cli.test_batch_size, cli.epochs()), (64, 1000, 10));
        assert_eq!((cli.lr, cli.gamma, cli.seed), (1.0, 0.7, 1));
        let one_unit = Sharding {
            strategy: ShardingStrategy::FullShard,
            min_num_params: None,
            cpu_offload: false,
        };
        assert_eq!(cli.sharding(), one_unit);
        assert_eq!(parse("--compare").unwrap().epochs(), 2);
        assert_eq!(parse("--compare --epochs 7").unwrap().epochs(), 7);
    }

    #[test]
    fn no_accel_is_the_cpu() {
        assert_eq!(parse("--no-accel").unwrap().device(), DeviceName::Flex);
        assert_eq!(parse("--device cuda:1").unwrap().device(), DeviceName::Cuda(1));
        assert!(parse("--no-accel --device cuda").is_err());
    }

    #[test]
    fn an_invalid_value_is_refused_with_the_valid_ones() {
        for (flags, expected) in [
            ("--batch-size 0", "a whole number from 1"),
            ("--epochs 0", "a whole number from 1"),
            ("--lr 0", "a number above 0"),
            ("--gamma 1.5", "at most 1"),
            ("--compare --strategy NO_SHARD", "cannot be used with"),
            ("--compare --save-model", "cannot be used with"),
        ] {
            let message = parse(flags).unwrap_err().to_string();
            assert!(message.contains(expected), "{flags}: {message}");
        }
    }

    #[test]
    fn the_number_of_ranks_has_pytorchs_short_name() {
        assert_eq!(parse("--world 3").unwrap().world_size(None), 3);
        assert_eq!(parse("--no-accel").unwrap().world_size(None), 2);
    }
}
