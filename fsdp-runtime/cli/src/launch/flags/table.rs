//! The flags that set a key of the configuration, and those whose wish is always fulfilled. Flags for
//! keys that set an option of sharding are those of the runtime's table of options.

use std::sync::LazyLock;

use fsdp_runtime::config::{FileKey, file_keys};

use super::KeyFlag;

/// Flags that ask for what this launcher always does, with the reason.
pub(super) const ALWAYS: &[(&str, &str)] = &[
    ("use_fsdp", "models are sharded as the configuration says"),
    ("use_parallelism_config", "the flags `--parallelism_config_..` are always read"),
    ("no_python", "programs are started as they are"),
];

/// A flag whose key has the same name.
const fn key(name: &'static str, value: &'static str, help: &'static str) -> KeyFlag {
    KeyFlag { name, key: name, value: Some(value), help }
}

/// A flag without a value, which sets a key to `true`.
const fn switch(name: &'static str, key: &'static str, help: &'static str) -> KeyFlag {
    KeyFlag { name, key, value: None, help }
}

/// Flags that set a key of the configuration.
pub(super) static KEYS: LazyLock<Vec<KeyFlag>> = LazyLock::new(|| {
    let of_option =
        |key: &FileKey| KeyFlag { name: key.name, key: key.name, value: key.value, help: key.help };
    let options = file_keys().map(of_option);
    LAUNCH.iter().copied().chain(options).chain(OTHERS.iter().copied()).collect()
});

/// Flags for the keys that say where ranks run.
const LAUNCH: &[KeyFlag] = &[
    key(
        "num_processes",
        "N|MIN:MAX",
        "Number of ranks on all machines together; with MIN:MAX and --max-restarts, MAX at first, \
         and at least MIN after a restart",
    ),
    key("num_machines", "N", "Number of machines, each of which runs `fsdp launch`"),
    key("machine_rank", "N", "Number of this machine, counted from 0"),
    key("main_process_ip", "HOST", "Host name or address of machine 0"),
    key(
        "main_process_port",
        "PORT",
        "Port on machine 0 to which ranks connect; 0 for the default: any free port with one \
         machine, 29500 with several",
    ),
    key("gpu_ids", "IDS", "GPUs of this machine, such as 0,1, or `all`"),
    switch("cpu", "use_cpu", "Compute on the CPU even if there is a GPU"),
    switch("debug", "debug", "Compare every collective across ranks before it runs"),
    key("mpirun_hostfile", "FILE", "Start the ranks with `mpirun`, on the hosts of this file"),
];

/// Flags for the keys that are neither about the launch nor about an option of sharding.
const OTHERS: &[KeyFlag] = &[
    key(
        "fsdp_state_dict_type",
        "NAME",
        "SHARDED_STATE_DICT, FULL_STATE_DICT or LOCAL_STATE_DICT: form of checkpoints",
    ),
    key("fsdp_use_orig_params", "BOOL", "Always true here"),
    key("fsdp_version", "1|2", "Both versions of the keys are read alike"),
    key(
        "parallelism_config_sp_size",
        "N",
        "1: there is no Ulysses, see parallelism_config_cp_size",
    ),
];
