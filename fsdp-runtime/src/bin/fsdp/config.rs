//! `fsdp config`: Accelerate's questions, and the file that the answers make.

mod ask;

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

use fsdp_runtime::config::{
    AutoWrapPolicy, Config, DEFAULT_MIN_NUM_PARAMS, MixedPrecision, StateDictType,
};
use fsdp_runtime::{BackwardPrefetch, ShardingStrategy, cuda};

use self::ask::{Answers, Ask, Terminal};
use crate::{print, say};

/// The ranks of a file on a machine without GPUs.
const DEFAULT_PROCESSES: usize = 2;

/// Accelerate's port.
const DEFAULT_PORT: usize = 29500;

#[derive(clap::Args)]
pub struct Args {
    /// Ask nothing, and write the defaults
    #[arg(long)]
    default: bool,

    /// Where to write the file [default: fsdp/default_config.yaml in the cache directory]
    #[arg(long, value_name = "FILE", visible_alias = "config_file")]
    output: Option<PathBuf>,
}

pub fn run(args: &Args) -> ExitCode {
    let Some(path) = args.output.clone().or_else(default_path) else {
        say("neither XDG_CACHE_HOME nor HOME is set; say where to write with --output FILE");
        return ExitCode::FAILURE;
    };
    let config = if args.default { Ok(defaults()) } else { questions(&mut Terminal::new()) };
    let config = match config {
        Ok(config) => config,
        Err(error) => {
            say(format_args!("{error}; `fsdp config --default` asks nothing"));
            return ExitCode::FAILURE;
        }
    };
    if let Err(error) = config.write(&path) {
        say(error);
        return ExitCode::FAILURE;
    }
    print(format_args!("written to {}", path.display()));
    // The file is what was asked for; what cannot run yet is better known now.
    if let Ok((config, _)) = Config::read(&path)
        && let Err(error) = config.check()
    {
        say(format_args!("this version cannot run it yet: {error}"));
    }
    ExitCode::SUCCESS
}

/// Where `fsdp config` writes and `fsdp launch` looks, if they are told nothing.
pub fn default_path() -> Option<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(cache.join("fsdp").join("default_config.yaml"))
}

fn defaults() -> Config {
    let gpus = cuda::driver().map_or(0, |driver| driver.gpus.len());
    let mut config = Config::default();
    config.num_processes = Some(if gpus > 0 { gpus } else { DEFAULT_PROCESSES });
    config.use_cpu = gpus == 0;
    // Written out, to be seen and edited.
    let fsdp = &mut config.fsdp;
    fsdp.auto_wrap_policy = Some(AutoWrapPolicy::TransformerBased);
    fsdp.backward_prefetch = Some(BackwardPrefetch::Pre);
    fsdp.forward_prefetch = Some(true);
    fsdp.state_dict_type = Some(StateDictType::Sharded);
    fsdp.cpu_ram_efficient_loading = Some(true);
    fsdp.sync_module_states = Some(true);
    config
}

fn questions(ask: &mut impl Ask) -> Answers<Config> {
    let mut config = defaults();
    machines(ask, &mut config)?;
    let device = ask.select(
        "Which devices do the ranks compute on?",
        &[("CPU", "Burn's Flex or CubeCL's CPU runtime"), ("GPU", "CUDA or wgpu")],
        usize::from(!config.use_cpu),
    )?;
    config.use_cpu = device == 0;
    config.debug = ask.confirm(
        "Compare every collective across ranks before it runs? Slower, but finds ranks that differ",
        false,
    )?;
    sharding(ask, &mut config)?;
    loading(ask, &mut config)?;
    let processes = config.num_processes.unwrap_or(DEFAULT_PROCESSES) * config.num_machines;
    config.num_processes = Some(loop {
        let processes =
            ask.number("How many processes, on all machines together?", processes, 1)?;
        if processes % config.num_machines == 0 {
            break processes;
        }
        ask.remark(&format!("It must be a multiple of {} machines.", config.num_machines));
    });
    if !config.use_cpu {
        let ids = ask.text("Which GPUs of this machine, by number, with commas?", Some("all"))?;
        config.gpu_ids = Some(ids).filter(|ids| ids != "all");
    }
    let precisions = MixedPrecision::ALL;
    let about = ["f32 throughout", "f16 with a loss scale", "bf16 parameters, f32 state", "8 bits"];
    config.mixed_precision = choose(ask, "Mixed precision?", precisions, &about, 0)?;
    Ok(config)
}

fn machines(ask: &mut impl Ask, config: &mut Config) -> Answers<()> {
    config.num_machines = ask.number("How many machines?", 1, 1)?;
    if config.num_machines == 1 {
        return Ok(());
    }
    let last = config.num_machines - 1;
    config.machine_rank = loop {
        let rank = ask.number(&format!("Which of them is this one, 0 to {last}?"), 0, 0)?;
        if rank <= last {
            break rank;
        }
        ask.remark("Machines count from 0.");
    };
    config.main_process_ip =
        Some(ask.text("Name or address of machine 0, as the others reach it?", None)?);
    config.main_process_port = Some(loop {
        match u16::try_from(ask.number("At which port?", DEFAULT_PORT, 1)?) {
            Ok(port) => break port,
            Err(_) => ask.remark("Ports go to 65535."),
        }
    });
    Ok(())
}

fn sharding(ask: &mut impl Ask, config: &mut Config) -> Answers<()> {
    let fsdp = &mut config.fsdp;
    let strategies = ShardingStrategy::ALL.map(|(strategy, _)| strategy);
    let about = [
        "parameters, gradients and optimizer state: least memory",
        "gradients and optimizer state: fewer gathers",
        "nothing: plain data parallel training",
        "everything, within groups of ranks",
        "gradients and optimizer state, within groups of ranks",
    ];
    fsdp.sharding_strategy = choose(ask, "What is sharded?", &strategies, &about, 0)?;
    fsdp.offload_params = ask.confirm("Rest parameters and gradients on the host?", false)?;
    let policy = choose(
        ask,
        "Which annotated units are gathered on their own?",
        AutoWrapPolicy::ALL,
        &["those you name, or all", "those above a size", "none: the model is one unit"],
        0,
    )?;
    fsdp.auto_wrap_policy = Some(policy);
    match policy {
        AutoWrapPolicy::TransformerBased => {
            let names = ask.text(
                "Their types, with commas, such as BertLayer,BertEmbeddings? Empty for all",
                Some(""),
            )?;
            let names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
            fsdp.transformer_layer_cls_to_wrap = names.map(str::to_string).collect();
        }
        AutoWrapPolicy::SizeBased => {
            let question = "From how many parameters on?";
            fsdp.min_num_params = Some(ask.number(question, DEFAULT_MIN_NUM_PARAMS, 0)?);
        }
        AutoWrapPolicy::NoWrap => {}
    }
    let prefetch = ask.select(
        "When is a unit gathered for its backward?",
        &[
            ("BACKWARD_PRE", "before the backward of the unit after it: most overlap"),
            ("BACKWARD_POST", "after that backward: one buffer less in use"),
            ("NO_PREFETCH", "when its own backward begins"),
        ],
        0,
    )?;
    fsdp.backward_prefetch = Some(match prefetch {
        0 => BackwardPrefetch::Pre,
        1 => BackwardPrefetch::Post,
        _ => BackwardPrefetch::None,
    });
    let question = "Gather a unit while the one before it computes, in forward?";
    fsdp.forward_prefetch = Some(ask.confirm(question, true)?);
    fsdp.activation_checkpointing =
        ask.confirm("Recompute activations in backward, to save memory?", false)?;
    Ok(())
}

fn loading(ask: &mut impl Ask, config: &mut Config) -> Answers<()> {
    let fsdp = &mut config.fsdp;
    let about = [
        "the whole state, collected on rank 0",
        "each rank's shards, for this layout only",
        "each rank's shards, for any number of ranks",
    ];
    let question = "In which form are checkpoints saved?";
    fsdp.state_dict_type = Some(choose(ask, question, StateDictType::ALL, &about, 2)?);
    let efficient = ask.confirm("Read weights to start from on rank 0 only?", true)?;
    fsdp.cpu_ram_efficient_loading = Some(efficient);
    let question = "Broadcast rank 0's weights at the start?";
    fsdp.sync_module_states = Some(efficient || ask.confirm(question, true)?);
    Ok(())
}

fn choose<T: Copy + std::fmt::Display>(
    ask: &mut impl Ask,
    question: &str,
    values: &[T],
    about: &[&str],
    default: usize,
) -> Answers<T> {
    let names: Vec<String> = values.iter().map(T::to_string).collect();
    let options: Vec<(&str, &str)> =
        names.iter().map(String::as_str).zip(about.iter().copied()).collect();
    let choice = ask.select(question, &options, default)?;
    Ok(values[choice.min(values.len() - 1)])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers in order; `None` takes the default.
    struct Script(std::vec::IntoIter<Option<&'static str>>);

    impl Script {
        fn next(&mut self) -> Option<&'static str> {
            self.0.next().expect("a question without an answer")
        }
    }

    impl Ask for Script {
        fn select(&mut self, _: &str, options: &[(&str, &str)], default: usize) -> Answers<usize> {
            let named = |name| options.iter().position(|(option, _)| *option == name).unwrap();
            Ok(self.next().map_or(default, named))
        }
        fn confirm(&mut self, _: &str, default: bool) -> Answers<bool> {
            Ok(self.next().map_or(default, |answer| answer == "yes"))
        }
        fn number(&mut self, _: &str, default: usize, _: usize) -> Answers<usize> {
            Ok(self.next().map_or(default, |answer| answer.parse().unwrap()))
        }
        fn text(&mut self, _: &str, default: Option<&str>) -> Answers<String> {
            Ok(self.next().or(default).expect("an answer").to_string())
        }
        fn remark(&mut self, _: &str) {}
    }

    fn answer(answers: Vec<Option<&'static str>>) -> Config {
        let mut script = Script(answers.into_iter());
        let config = questions(&mut script).unwrap();
        assert_eq!(script.0.count(), 0, "answers without a question");
        let (read, notes) = Config::parse(&config.to_yaml(), "written").unwrap();
        assert_eq!(read, config);
        assert!(notes.is_empty(), "{notes:?}");
        config
    }

    #[test]
    fn the_defaults_are_a_full_shard_on_one_machine() {
        let mut answers = vec![None, Some("CPU")];
        answers.resize(14, None);
        let config = answer(answers);
        assert_eq!(config.fsdp.sharding_strategy, ShardingStrategy::FullShard);
        assert_eq!(config.fsdp.auto_wrap_policy, Some(AutoWrapPolicy::TransformerBased));
        assert_eq!(config.fsdp.state_dict_type, Some(StateDictType::Sharded));
        assert!(config.check().is_ok());
        assert!(config.num_processes.is_some());
    }

    #[test]
    fn every_answer_reaches_the_file() {
        let config = answer(vec![
            Some("2"),     // machines
            Some("2"),     // this machine, refused
            Some("1"),     // this machine
            Some("node0"), // main process
            Some("99999"), // port, refused
            Some("2950"),  // port
            Some("GPU"),   // devices
            Some("yes"),   // debug
            Some("HYBRID_SHARD"),
            Some("yes"), // offload
            Some("SIZE_BASED_WRAP"),
            Some("5000"), // parameters
            Some("BACKWARD_POST"),
            Some("no"),  // forward prefetch
            Some("yes"), // activation checkpointing
            Some("FULL_STATE_DICT"),
            Some("no"),  // rank 0 only
            Some("no"),  // broadcast
            Some("3"),   // processes, refused
            Some("8"),   // processes
            Some("0,1"), // GPUs
            Some("bf16"),
        ]);
        assert_eq!((config.num_machines, config.machine_rank), (2, 1));
        assert_eq!(config.main_process_ip.as_deref(), Some("node0"));
        assert_eq!(config.main_process_port, Some(2950));
        assert_eq!(config.num_processes, Some(8));
        assert_eq!(config.gpu_ids.as_deref(), Some("0,1"));
        assert_eq!(config.mixed_precision, MixedPrecision::Bf16);
        assert!(config.debug && !config.use_cpu);
        let fsdp = &config.fsdp;
        assert_eq!(fsdp.sharding_strategy, ShardingStrategy::HybridShard);
        assert!(fsdp.offload_params && fsdp.activation_checkpointing);
        assert_eq!(fsdp.min_num_params, Some(5000));
        assert_eq!(fsdp.backward_prefetch, Some(BackwardPrefetch::Post));
        assert_eq!(fsdp.forward_prefetch, Some(false));
        assert_eq!(fsdp.state_dict_type, Some(StateDictType::Full));
        assert_eq!(fsdp.sync_module_states, Some(false));
    }
}
