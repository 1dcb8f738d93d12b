//! The configuration file: the one of `--config`, or the one of `fsdp launch` with its flags. It
//! fills in what the arguments leave open.

use anyhow::{Context, Result};
use fsdp_runtime::config::{Config, MixedPrecision, Note, StateDictType};
use fsdp_runtime::launch::env::RankEnv;

use crate::cli::Cli;
use crate::common::device::DeviceName;
use crate::common::report;
use crate::model::Gpt;

/// Returns the arguments with the settings of the configuration file, if there is one.
///
/// # Errors
///
/// If the file cannot be read, asks for something unsupported, or is for another number of
/// processes than were started.
pub fn filled(cli: &Cli) -> Result<Cli> {
    let read = match &cli.config {
        Some(path) => Some(Config::read(path)?),
        None => Config::from_env()?,
    };
    let Some((config, notes)) = read else { return Ok(cli.clone()) };
    let started = RankEnv::read()?;
    if !cli.output.quiet && report::reports(started.as_ref()) {
        let checkpoints = config.state_dict_note(StateDictType::Sharded);
        let loud = |note: &&Note| !note.off;
        notes.iter().chain(&checkpoints).filter(loud).for_each(|note| eprintln!("{note}"));
    }
    fill(cli, &config, started.as_ref())
}

fn fill(cli: &Cli, config: &Config, started: Option<&RankEnv>) -> Result<Cli> {
    let mut cli = cli.clone();
    let fsdp = &config.fsdp;
    cli.ranks.strategy = cli.strategy().or(Some(fsdp.sharding_strategy));
    match started {
        Some(place) => place.check(config.num_processes).context("the configuration file")?,
        None => cli.ranks.world_size = cli.ranks.world_size.or(config.num_processes),
    }
    if config.use_cpu && cli.ranks.device == DeviceName::Auto {
        cli.ranks.device = DeviceName::Flex;
    }
    cli.tensor_parallel = cli.tensor_parallel.or(fsdp.tensor);
    cli.context_parallel = cli.context_parallel.or(fsdp.context);
    cli.cpu_offload |= fsdp.offload_params;
    cli.checkpoint_activations |= fsdp.activation_checkpointing;
    cli.offload_activations |=
        fsdp.activation_checkpointing && fsdp.activation_checkpointing_offload;
    if !cli.fp16 && !cli.bf16 {
        cli.fp16 = config.mixed_precision == MixedPrecision::Fp16;
        cli.bf16 = config.mixed_precision == MixedPrecision::Bf16;
    }
    cli.debug = config.debug;
    cli.file_options = Some(config.options_for_parts::<Gpt>()?);
    Ok(cli)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use fsdp_runtime::prelude::*;

    use super::*;
    use crate::sharding::{ActivationPolicy, Precision};

    const FILE: &str = "\
num_processes: 4
mixed_precision: bf16
use_cpu: true
debug: true
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
";

    fn filled_by(flags: &str, file: &str) -> Result<Cli> {
        let cli = Cli::parse_from(std::iter::once("gpt_pretrain").chain(flags.split_whitespace()));
        fill(&cli, &Config::parse(file, "file.yaml")?.0, None)
    }

    #[test]
    fn the_file_says_what_no_flag_does() {
        let cli = filled_by("", FILE).unwrap();
        assert_eq!((cli.world_size(None), cli.ranks.device), (4, DeviceName::Flex));
        assert!(cli.debug);
        let sharding = cli.sharding();
        assert_eq!(sharding.strategy, ShardingStrategy::ShardGradOp);
        assert_eq!(sharding.precision, Precision::Bf16);
        assert_eq!(sharding.activations, ActivationPolicy::Recompute);
        let flags = "--world-size 4 --bf16 --checkpoint-activations --cpu-offload --strategy \
                     SHARD_GRAD_OP";
        let by_flags = Cli::parse_from(["gpt_pretrain"].into_iter().chain(flags.split(' ')));
        let expected = by_flags
            .sharding()
            .options()
            .with_wrap(WrapPolicy::Named(&["Block"]))
            .with_forward_prefetch(false);
        assert_eq!(sharding.options(), expected, "the file's other options hold too");
    }

    #[test]
    fn flags_override_the_file() {
        let cli = filled_by("--strategy NO_SHARD --world-size 3 --fp16 --device cpu", FILE);
        let cli = cli.unwrap();
        assert_eq!((cli.world_size(None), cli.ranks.device), (3, DeviceName::Cpu));
        assert_eq!(cli.sharding().strategy, ShardingStrategy::NoShard);
        assert!(matches!(cli.sharding().precision, Precision::Fp16 { .. }));
        let unknown = filled_by("", &FILE.replace("wrap: Block", "wrap: BertLayer"));
        assert!(unknown.unwrap_err().to_string().contains("no unit of `Gpt`"));
    }
}
