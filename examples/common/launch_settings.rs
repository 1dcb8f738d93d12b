//! Settings of the launch and of sharding: from the configuration file and the
//! arguments.
//!
//! The configuration file is the one after `--config`, or the one that `fsdp launch` names in the
//! environment. It sets the number of ranks, the device and the sharding options. The
//! hyperparameters come from the command line only.

use std::time::Duration;

use anyhow::{Context, Result};
use fsdp_runtime::config::{Config, MixedPrecision, Note, StateDictType};
use fsdp_runtime::launch::env::RankEnv;
use fsdp_runtime::optim::GradScalerConfig;
use fsdp_runtime::prelude::*;

use crate::cli::Cli;
use crate::common::device::DeviceName;
use crate::common::report;
use crate::model::BertForSequenceClassification;

/// Settings of the launch and of sharding.
#[derive(Clone, Debug)]
pub struct LaunchSettings {
    /// Device to compute on.
    pub device: DeviceName,
    /// Options of the launch, without the device.
    pub launch: LaunchOptions,
    /// Sharding strategy.
    pub strategy: ShardingStrategy,
    /// Other sharding options.
    pub options: FsdpOptions,
    /// Loss scaling. Set for float16, where gradients would underflow without it.
    pub scaler: Option<GradScalerConfig>,
}

impl LaunchSettings {
    /// Reads the configuration file, if there is one, and the environment, and applies the
    /// arguments.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, asks for something unsupported, or is for another number of
    /// processes than were started.
    pub fn new(cli: &Cli) -> Result<Self> {
        let file = match &cli.config {
            Some(path) => Some(Config::read(path)?),
            None => Config::from_env()?,
        };
        let started = RankEnv::read()?;
        Self::resolve(cli, file, started.as_ref())
    }

    /// Combines the arguments, the contents of the file and the process's place among the ranks.
    fn resolve(
        cli: &Cli,
        file: Option<(Config, Vec<Note>)>,
        started: Option<&RankEnv>,
    ) -> Result<Self> {
        let (config, notes) = file.unzip();
        if !cli.output.quiet && report::reports(started) {
            let checkpoints =
                config.as_ref().and_then(|c| c.state_dict_note(StateDictType::Sharded));
            notes.iter().flatten().chain(&checkpoints).for_each(|note| eprintln!("{note}"));
        }
        let config = config.as_ref();
        let device = match cli.ranks.device {
            DeviceName::Auto if config.is_some_and(|config| config.use_cpu) => DeviceName::Flex,
            device => device,
        };
        let strategy = config.map(|config| config.fsdp.sharding_strategy);
        let fp16 = config.is_some_and(|config| config.mixed_precision == MixedPrecision::Fp16);
        let options = config.map(Config::options::<BertForSequenceClassification>).transpose()?;
        Ok(Self {
            device,
            launch: launch_options(cli, config, started, device)?,
            strategy: cli.ranks.strategy.or(strategy).unwrap_or(ShardingStrategy::FullShard),
            options: options.unwrap_or_else(FsdpOptions::new),
            scaler: fp16.then(GradScalerConfig::new),
        })
    }
}

/// Returns how ranks are started. Their number is that of `--world-size`, of the configuration
/// file, of the started processes, or the device's default, in this order.
fn launch_options(
    cli: &Cli,
    config: Option<&Config>,
    started: Option<&RankEnv>,
    device: DeviceName,
) -> Result<LaunchOptions> {
    let launch = match (cli.ranks.world_size, config, started) {
        (Some(world), _, _) => LaunchOptions::new(world),
        (None, Some(config), Some(place)) => {
            place.check(config.num_processes).context("--config")?;
            LaunchOptions::started_or(place.world.size())
        }
        (None, Some(config), None) if config.num_processes.is_some() => config.launch_options()?,
        _ => LaunchOptions::started_or(device.default_ranks()),
    };
    let launch =
        launch.with_engine(cli.ranks.engine).with_timeout(Duration::from_secs(cli.timeout));
    Ok(match config.is_some_and(|config| config.debug) {
        true => launch.with_debug(true),
        false => launch,
    })
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

    fn settings(flags: &str, started: Option<&RankEnv>) -> Result<LaunchSettings> {
        let cli = Cli::parse_from(std::iter::once("bert_finetune").chain(flags.split_whitespace()));
        LaunchSettings::resolve(&cli, Some(Config::parse(FILE, "file.yaml")?), started)
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
            LaunchSettings::resolve(&cli, Some(Config::parse(&file, "file.yaml").unwrap()), None)
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
