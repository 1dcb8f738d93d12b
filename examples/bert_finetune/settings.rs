//! The configuration file, where there is one, and what flags say in its place.
//!
//! The file is the one after `--config`, or the one that `fsdp launch` names in the environment. It
//! says how many ranks there are, and how the model is sharded; the recipe is the command line's.

use std::time::Duration;

use anyhow::{Context, Result};
use fsdp_runtime::GradScalerConfig;
use fsdp_runtime::config::{Config, MixedPrecision, Note};
use fsdp_runtime::env::RankEnv;
use fsdp_runtime::prelude::*;

use crate::cli::Cli;
use crate::device::DeviceName;
use crate::model::BertForSequenceClassification;

/// How a run is started and its model sharded.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where to compute.
    pub device: DeviceName,
    /// How ranks are started.
    pub launch: LaunchOptions,
    /// What is sharded.
    pub strategy: ShardingStrategy,
    /// How, but for the strategy.
    pub options: FsdpOptions,
    /// How losses are scaled, if they are: gradients in float16 underflow otherwise.
    pub scaler: Option<GradScalerConfig>,
}

impl Settings {
    /// What the flags and the file say.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or asks for what there is not, or if it is for another number of
    /// processes than were started.
    pub fn of(cli: &Cli) -> Result<Self> {
        let file = match &cli.config {
            Some(path) => Some(Config::read(path)?),
            None => Config::from_env()?,
        };
        let started = RankEnv::read()?;
        Self::with(cli, file, started.as_ref())
    }

    fn with(
        cli: &Cli,
        file: Option<(Config, Vec<Note>)>,
        started: Option<&RankEnv>,
    ) -> Result<Self> {
        let (config, notes) = file.unzip();
        if !cli.quiet && started.is_none_or(|place| place.rank == fsdp_runtime::Rank::ZERO) {
            notes.iter().flatten().for_each(|note| eprintln!("{note}"));
        }
        let on_cpu = config.as_ref().is_some_and(|config| config.use_cpu);
        let device = match cli.device {
            DeviceName::Auto if on_cpu => DeviceName::Flex,
            device => device,
        };
        let launch = match (cli.world_size, &config, started) {
            (Some(world), _, _) => LaunchOptions::new(world),
            (None, Some(config), Some(place)) => {
                place.check(config.num_processes).context("--config")?;
                LaunchOptions::started_or(place.world.size())
            }
            (None, Some(config), None) if config.num_processes.is_some() => {
                config.launch_options()?
            }
            _ => LaunchOptions::started_or(device.ranks()),
        };
        let launch = launch.with_engine(cli.engine).with_timeout(Duration::from_secs(cli.timeout));
        let launch = match config.as_ref().is_some_and(|config| config.debug) {
            true => launch.with_debug(true),
            false => launch,
        };
        let of_file = config.as_ref().map(|config| config.fsdp.sharding_strategy);
        let fp16 = |config: &Config| config.mixed_precision == MixedPrecision::Fp16;
        let scaler = config.as_ref().is_some_and(fp16).then(GradScalerConfig::new);
        let options = config.as_ref().map(Config::options::<BertForSequenceClassification>);
        Ok(Self {
            device,
            launch,
            strategy: cli.strategy.or(of_file).unwrap_or(ShardingStrategy::FullShard),
            options: options.transpose()?.unwrap_or_else(FsdpOptions::new),
            scaler,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use clap::Parser;

    use super::*;

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

    fn settings(flags: &str, started: Option<&RankEnv>) -> Result<Settings> {
        let cli = Cli::parse_from(std::iter::once("bert_finetune").chain(flags.split_whitespace()));
        Settings::with(&cli, Some(Config::parse(FILE, "file.yaml")?), started)
    }

    /// This process as one of so many.
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
            Settings::with(&cli, Some(Config::parse(&file, "file.yaml").unwrap()), None)
                .unwrap()
                .scaler
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
