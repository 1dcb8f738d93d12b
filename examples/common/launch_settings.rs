//! Settings of the launch and of sharding: from the configuration file and the
//! arguments.
//!
//! The configuration file is the one after `--config`, or the one that `fsdp launch` names in the
//! environment. It sets the number of ranks, the device and the sharding options. The
//! hyperparameters come from the command line only.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use fsdp_runtime::config::{Config, MixedPrecision, Note, StateDictType};
use fsdp_runtime::launch::env::RankEnv;
use fsdp_runtime::optim::GradScalerConfig;
use fsdp_runtime::prelude::*;

use super::args::{OutputArgs, RankArgs};
use super::device::DeviceName;
use super::report;

/// Arguments that the settings depend on.
#[derive(Clone, Copy, Debug)]
pub struct LaunchInputs<'a> {
    /// Configuration file, if one is given.
    pub config: Option<&'a Path>,
    /// Number of ranks, and how they compute.
    pub ranks: &'a RankArgs,
    /// Seconds to wait for a rank in a collective.
    pub timeout: u64,
    /// What the program prints.
    pub output: OutputArgs,
    /// Classes of transformers that the file may name, each with the unit in its place.
    pub classes: &'a [(&'a str, &'a str)],
    /// Whether the program passes each rank's part of a row to the model.
    pub cuts_rows: bool,
}

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
    /// Number of tensor parallel ranks.
    pub tensor_parallel: usize,
    /// Number of context parallel ranks that the configuration file asks for, or 1.
    pub context_parallel: usize,
    /// Loss scaling. Set for float16, where gradients would underflow without it.
    pub scaler: Option<GradScalerConfig>,
}

impl LaunchSettings {
    /// Reads the configuration file, if there is one, and the environment, and applies the
    /// arguments. `M` is the model, whose units the file may name.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, asks for something unsupported, or is for another number of
    /// processes than were started.
    pub fn new<M: FsdpModule>(inputs: LaunchInputs<'_>) -> Result<Self> {
        let file = match inputs.config {
            Some(path) => Some(Config::read(path)?),
            None => Config::from_env()?,
        };
        let started = RankEnv::read()?;
        Self::resolve::<M>(inputs, file, started.as_ref())
    }

    /// Combines the arguments, the contents of the file and the process's place among the ranks.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn resolve<M: FsdpModule>(
        inputs: LaunchInputs<'_>,
        file: Option<(Config, Vec<Note>)>,
        started: Option<&RankEnv>,
    ) -> Result<Self> {
        let (mut config, notes) = file.unzip();
        if !inputs.output.quiet && report::reports(started) {
            let checkpoints =
                config.as_ref().and_then(|c| c.state_dict_note(StateDictType::Sharded));
            notes.iter().flatten().chain(&checkpoints).for_each(|note| eprintln!("{note}"));
        }
        let named = config.iter_mut().flat_map(|c| &mut c.fsdp.transformer_layer_cls_to_wrap);
        for name in named {
            if let Some((_, unit)) = inputs.classes.iter().find(|(class, _)| class == name) {
                *name = (*unit).into();
            }
        }
        let config = config.as_ref();
        let device = match inputs.ranks.device {
            DeviceName::Auto if config.is_some_and(|config| config.use_cpu) => DeviceName::Flex,
            device => device,
        };
        let strategy = config.map(|config| config.fsdp.sharding_strategy);
        let fp16 = config.is_some_and(|config| config.mixed_precision == MixedPrecision::Fp16);
        let options = config.map(match inputs.cuts_rows {
            true => Config::options_for_parts::<M>,
            false => Config::options::<M>,
        });
        let options = options.transpose()?;
        Ok(Self {
            device,
            launch: launch_options(inputs, config, started, device)?,
            strategy: inputs.ranks.strategy.or(strategy).unwrap_or(ShardingStrategy::FullShard),
            options: options.unwrap_or_else(FsdpOptions::new),
            tensor_parallel: config.and_then(|config| config.fsdp.tensor).unwrap_or(1),
            context_parallel: config.and_then(|config| config.fsdp.context).unwrap_or(1),
            scaler: fp16.then(GradScalerConfig::new),
        })
    }
}

/// Returns how ranks are started. Their number is that of `--world-size`, of the configuration
/// file, of the started processes, or the device's default, in this order.
fn launch_options(
    inputs: LaunchInputs<'_>,
    config: Option<&Config>,
    started: Option<&RankEnv>,
    device: DeviceName,
) -> Result<LaunchOptions> {
    let launch = match (inputs.ranks.world_size, config, started) {
        (Some(world), _, _) => LaunchOptions::new(world),
        (None, Some(config), Some(place)) => {
            place.check(config.num_processes).context("--config")?;
            LaunchOptions::started_or(place.world.size())
        }
        (None, Some(config), None) if config.num_processes.is_some() => config.launch_options()?,
        _ => LaunchOptions::started_or(device.default_ranks()),
    };
    let launch =
        launch.with_engine(inputs.ranks.engine).with_timeout(Duration::from_secs(inputs.timeout));
    Ok(match config.is_some_and(|config| config.debug) {
        true => launch.with_debug(true),
        false => launch,
    })
}
