//! The questions of `fsdp config`, in Accelerate's order, and the defaults of the answers.

use std::fmt::Display;

use fsdp_runtime::config::{
    AutoWrapPolicy, Config, DEFAULT_MIN_NUM_PARAMS, FsdpSection, MixedPrecision, StateDictType,
};
use fsdp_runtime::launch::cuda;
use fsdp_runtime::options::{BackwardPrefetch, ShardingStrategy};

use super::ask::{Answer, Ask};

/// Default number of ranks on a machine without GPUs. With GPUs the default is one rank a GPU.
const DEFAULT_PROCESSES: usize = 2;

/// Default port of the main process, as in Accelerate.
const DEFAULT_PORT: usize = 29500;

/// Returns the configuration that `fsdp config --default` writes: full sharding on this machine.
pub(super) fn defaults() -> Config {
    let gpus = cuda::driver().map_or(0, |driver| driver.gpus.len());
    let mut config = Config::default();
    config.num_processes = Some(if gpus > 0 { gpus } else { DEFAULT_PROCESSES });
    config.use_cpu = gpus == 0;
    // The runtime has these defaults too. They are set here so that the file shows them.
    let fsdp = &mut config.fsdp;
    fsdp.auto_wrap_policy = Some(AutoWrapPolicy::TransformerBased);
    fsdp.backward_prefetch = Some(BackwardPrefetch::Pre);
    fsdp.forward_prefetch = Some(true);
    fsdp.state_dict_type = Some(StateDictType::Sharded);
    fsdp.cpu_ram_efficient_loading = Some(true);
    fsdp.sync_module_states = Some(true);
    config
}

/// Asks every question and returns the configuration made of the answers.
pub(super) fn ask_all(ask: &mut impl Ask) -> Answer<Config> {
    let mut config = defaults();
    ask_machines(ask, &mut config)?;
    ask_device(ask, &mut config)?;
    ask_sharding(ask, &mut config.fsdp)?;
    ask_wrapping(ask, &mut config.fsdp)?;
    ask_prefetch(ask, &mut config.fsdp)?;
    ask_checkpoints(ask, &mut config.fsdp)?;
    ask_processes(ask, &mut config)?;
    ask_precision(ask, &mut config)?;
    Ok(config)
}

/// Asks for the number of machines. With several, asks for the number of this one and the address
/// of machine 0.
fn ask_machines(ask: &mut impl Ask, config: &mut Config) -> Answer<()> {
    config.num_machines = ask.number("How many machines?", 1, 1)?;
    if config.num_machines == 1 {
        return Ok(());
    }
    let last = config.num_machines - 1;
    config.machine_rank = loop {
        let rank = ask.number(&format!("Which machine is this one, 0 to {last}?"), 0, 0)?;
        if rank <= last {
            break rank;
        }
        ask.refuse(&format!("The machines have the numbers 0 to {last}."));
    };
    let question = "Host name or address of machine 0, as the other machines reach it?";
    config.main_process_ip = Some(ask.text(question, None)?);
    config.main_process_port = Some(loop {
        match u16::try_from(ask.number("Port on machine 0?", DEFAULT_PORT, 1)?) {
            Ok(port) => break port,
            Err(_) => ask.refuse("The largest port is 65535."),
        }
    });
    Ok(())
}

/// Asks whether the device is a CPU or a GPU, and whether ranks compare collectives before they
/// run.
fn ask_device(ask: &mut impl Ask, config: &mut Config) -> Answer<()> {
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
    Ok(())
}

fn ask_sharding(ask: &mut impl Ask, fsdp: &mut FsdpSection) -> Answer<()> {
    let strategies = ShardingStrategy::ALL.map(|(strategy, _)| strategy);
    let about = [
        "parameters, gradients and optimizer state: least memory",
        "gradients and optimizer state: fewer all-gathers",
        "nothing: plain data parallel training",
        "as FULL_SHARD, within groups of ranks",
        "as SHARD_GRAD_OP, within groups of ranks",
    ];
    fsdp.sharding_strategy = choose(ask, "What is sharded?", &strategies, &about, 0)?;
    let question = "Offload parameters, gradients and optimizer state to host memory?";
    fsdp.offload_params = ask.confirm(question, false)?;
    Ok(())
}

fn ask_wrapping(ask: &mut impl Ask, fsdp: &mut FsdpSection) -> Answer<()> {
    let policy = choose(
        ask,
        "Which annotated units are gathered on their own?",
        AutoWrapPolicy::ALL,
        &["the units you name, or all units", "units above a size", "none: the model is one unit"],
        0,
    )?;
    fsdp.auto_wrap_policy = Some(policy);
    match policy {
        AutoWrapPolicy::TransformerBased => {
            let question = "Their types, such as BertLayer,BertEmbeddings? Empty for all units";
            let names = ask.text(question, Some(""))?;
            let names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
            fsdp.transformer_layer_cls_to_wrap = names.map(str::to_string).collect();
        }
        AutoWrapPolicy::SizeBased => {
            let question = "Minimum number of parameters of such a unit?";
            fsdp.min_num_params = Some(ask.number(question, DEFAULT_MIN_NUM_PARAMS, 0)?);
        }
        AutoWrapPolicy::NoWrap => {}
    }
    Ok(())
}

/// Asks for prefetch in backward and forward, and for activation checkpointing.
fn ask_prefetch(ask: &mut impl Ask, fsdp: &mut FsdpSection) -> Answer<()> {
    let prefetch = ask.select(
        "When is a unit gathered for its backward?",
        &[
            ("BACKWARD_PRE", "before the backward of the following unit: most overlap"),
            ("BACKWARD_POST", "after the backward of the following unit: one buffer less"),
            ("NO_PREFETCH", "when its own backward begins"),
        ],
        0,
    )?;
    fsdp.backward_prefetch = Some(match prefetch {
        0 => BackwardPrefetch::Pre,
        1 => BackwardPrefetch::Post,
        _ => BackwardPrefetch::None,
    });
    let question = "Gather a unit while the unit before it computes, in forward?";
    fsdp.forward_prefetch = Some(ask.confirm(question, true)?);
    fsdp.activation_checkpointing =
        ask.confirm("Recompute activations in backward, to save memory?", false)?;
    Ok(())
}

/// Asks for the form of checkpoints, and for the distribution of initial weights.
fn ask_checkpoints(ask: &mut impl Ask, fsdp: &mut FsdpSection) -> Answer<()> {
    let about = [
        "the whole state, collected on rank 0",
        "the shards of each rank, for this layout only",
        "the shards of each rank, for any number of ranks",
    ];
    let question = "In which form are checkpoints saved?";
    fsdp.state_dict_type = Some(choose(ask, question, StateDictType::ALL, &about, 2)?);
    let efficient = ask.confirm("Read initial weights on rank 0 only?", true)?;
    fsdp.cpu_ram_efficient_loading = Some(efficient);
    // Weights that only rank 0 has read must be broadcast.
    let question = "Broadcast the weights of rank 0 at the start?";
    fsdp.sync_module_states = Some(efficient || ask.confirm(question, true)?);
    Ok(())
}

/// Asks for the number of processes, and for the GPUs of this machine.
fn ask_processes(ask: &mut impl Ask, config: &mut Config) -> Answer<()> {
    let default = config.num_processes.unwrap_or(DEFAULT_PROCESSES) * config.num_machines;
    config.num_processes = Some(loop {
        let processes = ask.number("How many processes, on all machines together?", default, 1)?;
        if processes % config.num_machines == 0 {
            break processes;
        }
        ask.refuse(&format!("The number must be a multiple of {} machines.", config.num_machines));
    });
    if !config.use_cpu {
        let question = "Which GPUs of this machine, by number, separated by commas?";
        let ids = ask.text(question, Some("all"))?;
        config.gpu_ids = Some(ids).filter(|ids| ids != "all");
    }
    Ok(())
}

fn ask_precision(ask: &mut impl Ask, config: &mut Config) -> Answer<()> {
    let about = ["f32 throughout", "f16 with a loss scale", "bf16 parameters, f32 state", "8 bits"];
    config.mixed_precision = choose(ask, "Mixed precision?", MixedPrecision::ALL, &about, 0)?;
    Ok(())
}

/// Asks to choose one of `values`. `about` explains each value.
fn choose<T: Copy + Display>(
    ask: &mut impl Ask,
    question: &str,
    values: &[T],
    about: &[&str],
    default: usize,
) -> Answer<T> {
    let names: Vec<String> = values.iter().map(T::to_string).collect();
    let options: Vec<(&str, &str)> =
        names.iter().map(String::as_str).zip(about.iter().copied()).collect();
    let choice = ask.select(question, &options, default)?;
    Ok(values[choice.min(values.len() - 1)])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers in the order of the questions; `None` takes the default.
    struct Script(std::vec::IntoIter<Option<&'static str>>);

    impl Script {
        fn next(&mut self) -> Option<&'static str> {
            self.0.next().expect("a question without an answer")
        }
    }

    impl Ask for Script {
        fn select(&mut self, _: &str, options: &[(&str, &str)], default: usize) -> Answer<usize> {
            let named = |name| options.iter().position(|(option, _)| *option == name).unwrap();
            Ok(self.next().map_or(default, named))
        }
        fn confirm(&mut self, _: &str, default: bool) -> Answer<bool> {
            Ok(self.next().map_or(default, |answer| answer == "yes"))
        }
        fn number(&mut self, _: &str, default: usize, _: usize) -> Answer<usize> {
            Ok(self.next().map_or(default, |answer| answer.parse().unwrap()))
        }
        fn text(&mut self, _: &str, default: Option<&str>) -> Answer<String> {
            Ok(self.next().or(default).expect("an answer").to_string())
        }
        fn refuse(&mut self, _: &str) {}
    }

    fn answer(answers: Vec<Option<&'static str>>) -> Config {
        let mut script = Script(answers.into_iter());
        let config = ask_all(&mut script).unwrap();
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
