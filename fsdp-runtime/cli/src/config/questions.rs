//! The questions of `fsdp config`, in Accelerate's order, and the defaults of the answers.

use std::io;

use fsdp_runtime::config::{Config, ConfigError, Overrides, Question, StateDictType, file_key};
use fsdp_runtime::launch::cuda;

use super::ask::{Answer, Ask};

/// Default number of ranks on a machine without GPUs. With GPUs the default is one rank a GPU.
const DEFAULT_PROCESSES: usize = 2;

/// Default port of the main process, as in Accelerate.
const DEFAULT_PORT: usize = 29500;

/// Returns the configuration that `fsdp config --default` writes: full sharding on this machine.
pub(super) fn defaults() -> Answer<Config> {
    ask_all(&mut Defaults)
}

/// Returns the configuration before the first question, with the devices of this machine.
fn of_this_machine() -> Config {
    let gpus = cuda::driver().map_or(0, |driver| driver.gpus.len());
    let mut config = Config::default();
    config.num_processes = Some(if gpus > 0 { gpus } else { DEFAULT_PROCESSES });
    config.use_cpu = gpus == 0;
    config
}

/// Asks every question and returns the configuration made of the answers.
///
/// Questions about options are those of the runtime's table. An answer that is the default is
/// written too, so that the file shows it.
pub(super) fn ask_all(ask: &mut impl Ask) -> Answer<Config> {
    let mut config = of_this_machine();
    let mut options = Overrides::default();
    ask_machines(ask, &mut config)?;
    ask_device(ask, &mut config)?;
    ask_key(ask, &mut options, "fsdp_sharding_strategy")?;
    ask_key(ask, &mut options, "fsdp_offload_params")?;
    ask_wrapping(ask, &mut options)?;
    ask_key(ask, &mut options, "fsdp_backward_prefetch")?;
    ask_key(ask, &mut options, "fsdp_forward_prefetch")?;
    ask_key(ask, &mut options, "fsdp_activation_checkpointing")?;
    ask_checkpoints(ask, &mut options)?;
    ask_processes(ask, &mut config)?;
    ask_key(ask, &mut options, "mixed_precision")?;
    let (answers, _) = Config::read_with(None, &options).map_err(other)?;
    (config.fsdp, config.mixed_precision) = (answers.fsdp, answers.mixed_precision);
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

/// Asks which units are gathered on their own: by name or by size.
fn ask_wrapping(ask: &mut impl Ask, options: &mut Overrides) -> Answer<()> {
    match ask_key(ask, options, "fsdp_auto_wrap_policy")?.as_str() {
        "TRANSFORMER_BASED_WRAP" => {
            ask_key(ask, options, "fsdp_transformer_layer_cls_to_wrap")?;
        }
        "SIZE_BASED_WRAP" => {
            ask_key(ask, options, "fsdp_min_num_params")?;
        }
        _ => {}
    }
    Ok(())
}

/// Asks for the form of checkpoints, and for the distribution of initial weights.
fn ask_checkpoints(ask: &mut impl Ask, options: &mut Overrides) -> Answer<()> {
    // The form is no option of sharding, so the table does not have it.
    let about = [
        "the whole state, collected on rank 0",
        "the shards of each rank, for this layout only",
        "the shards of each rank, for any number of ranks",
    ];
    let forms: Vec<_> = StateDictType::ALL.iter().map(|form| form.name()).zip(about).collect();
    let form = ask.select("In which form are checkpoints saved?", &forms, 2)?;
    set(options, "fsdp_state_dict_type", forms[form].0)?;
    if ask_key(ask, options, "fsdp_cpu_ram_efficient_loading")? == "true" {
        // Weights that only rank 0 has read must be broadcast.
        return set(options, "fsdp_sync_module_states", "true");
    }
    ask_key(ask, options, "fsdp_sync_module_states").map(drop)
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

/// Asks the question of a key in the table of options, and sets the key to the answer. Returns the
/// answer.
fn ask_key(ask: &mut impl Ask, options: &mut Overrides, key: &str) -> Answer<String> {
    let found = file_key(key).and_then(|key| Some((key.value, key.question?)));
    let (value, question) = found.unwrap_or_else(|| panic!("the table has no question for {key}"));
    let Question { text, default, choices } = question;
    let answer = match value {
        _ if !choices.is_empty() => {
            let default = choices.iter().position(|(name, _)| *name == default);
            choices[ask.select(text, choices, default.unwrap_or_default())?].0.into()
        }
        Some("BOOL") => ask.confirm(text, default == "true")?.to_string(),
        Some("N") => ask.number(text, default.parse().unwrap_or_default(), 0)?.to_string(),
        _ => ask.text(text, Some(default))?,
    };
    set(options, key, &answer)?;
    Ok(answer)
}

/// Sets a key. An empty value leaves it out.
fn set(options: &mut Overrides, key: &str, value: &str) -> Answer<()> {
    if value.is_empty() { Ok(()) } else { options.set(key, value).map_err(other) }
}

/// Returns an error of the configuration as one of the questions.
fn other(error: ConfigError) -> dialoguer::Error {
    io::Error::other(error).into()
}

/// Answers each question with its default.
struct Defaults;

impl Ask for Defaults {
    fn select(&mut self, _: &str, _: &[(&str, &str)], default: usize) -> Answer<usize> {
        Ok(default)
    }

    fn confirm(&mut self, _: &str, default: bool) -> Answer<bool> {
        Ok(default)
    }

    fn number(&mut self, _: &str, default: usize, _: usize) -> Answer<usize> {
        Ok(default)
    }

    fn text(&mut self, _: &str, default: Option<&str>) -> Answer<String> {
        Ok(default.unwrap_or_default().into())
    }

    fn refuse(&mut self, _: &str) {}
}

#[cfg(test)]
mod tests {
    use fsdp_runtime::config::{AutoWrapPolicy, MixedPrecision};
    use fsdp_runtime::options::{BackwardPrefetch, ShardingStrategy};

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
