//! The keys of Accelerate's FSDP files, and whether each has an effect here. Keys that set an option
//! are in the table of options; this file has the others.

use std::sync::LazyLock;

use crate::options::table::{FileKey, file_key, file_keys};

/// Effect of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// The key is read.
    Used,
    /// The key has no effect.
    Unused {
        /// Reason why the key has no effect, for a message.
        because: &'static str,
        /// Values that Accelerate writes when the option is off.
        off: &'static [&'static str],
    },
}

/// A key and its effect.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) effect: Effect,
}

/// A part of a configuration file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Section {
    /// The keys at the top level.
    Top,
    /// The keys under `fsdp_config`.
    Fsdp,
}

impl Section {
    /// Returns the keys of this part, sorted by name.
    pub(super) fn keys(self) -> &'static [Key] {
        static KEYS: LazyLock<[Vec<Key>; 2]> =
            LazyLock::new(|| [Section::Top, Section::Fsdp].map(Section::all));
        &KEYS[self as usize]
    }

    /// Returns the keys of this part: those below, and those of the table of options.
    fn all(self) -> Vec<Key> {
        let others = match self {
            Self::Top => TOP,
            Self::Fsdp => FSDP,
        };
        let of_options = file_keys().filter(|key| self.has(key)).map(|key| used(key.name));
        let mut keys: Vec<Key> = others.iter().copied().chain(of_options).collect();
        keys.sort_by_key(|key| key.name);
        keys
    }

    /// Returns whether a key of the table of options belongs to this part.
    fn has(self, key: &FileKey) -> bool {
        let fsdp = key.name.starts_with("fsdp_");
        match self {
            Self::Top => !fsdp && !key.name.starts_with(PARALLELISM_PREFIX),
            Self::Fsdp => fsdp,
        }
    }

    /// Returns the other part.
    pub(super) const fn other(self) -> Self {
        match self {
            Self::Top => Self::Fsdp,
            Self::Fsdp => Self::Top,
        }
    }

    /// Returns a description of this part, for a message.
    pub(super) const fn place(self) -> &'static str {
        match self {
            Self::Top => "at the top level",
            Self::Fsdp => "under `fsdp_config`",
        }
    }

    /// Returns the key with this name.
    pub(super) fn find(self, name: &str) -> Option<&'static Key> {
        self.keys().iter().find(|key| key.name == name)
    }

    /// Returns the key with this name. As in Accelerate, a key under `fsdp_config` may lack the
    /// prefix `fsdp_`.
    pub(super) fn find_older(self, name: &str) -> Option<&'static Key> {
        let prefixed = || self.find(&format!("fsdp_{name}"));
        self.find(name).or_else(|| if self == Self::Fsdp { prefixed() } else { None })
    }
}

/// Key of the number of context parallel ranks.
pub(super) const CONTEXT: &str = "parallelism_config_cp_size";

/// Key of the map with the sizes of the device mesh.
pub(super) const PARALLELISM: &str = "parallelism_config";

/// Prefix of the keys under [`PARALLELISM`].
pub(super) const PARALLELISM_PREFIX: &str = "parallelism_config_";

/// Returns the newest key that says what this key says, or the key itself.
pub(super) fn meaning(key: &str) -> &str {
    file_key(key).and_then(|key| key.same_as).unwrap_or(key)
}

/// Returns the newer name of a key with an older one.
pub(super) fn newer_name(key: &str) -> Option<&'static str> {
    file_key(key).filter(|key| key.renamed)?.same_as
}

const fn used(name: &'static str) -> Key {
    Key { name, effect: Effect::Used }
}

const fn unused(name: &'static str, because: &'static str, off: &'static [&'static str]) -> Key {
    Key { name, effect: Effect::Unused { because, off } }
}

const TPU: &str = "for TPUs";
const XLA: &str = "for PyTorch/XLA; Burn compiles kernels for each device itself";
const NO: &[&str] = &["no", "false"];
const EMPTY: &[&str] = &["[]", "{}"];

const TOP: &[Key] = &[
    unused("command_file", TPU, &[]),
    unused("commands", TPU, EMPTY),
    used("compute_environment"),
    used("debug"),
    unused("deepspeed_config", "for DeepSpeed", EMPTY),
    used("distributed_type"),
    unused(
        "dynamo_backend",
        "for torch.compile; Burn's build feature `fusion` fuses operations on CubeCL devices",
        NO,
    ),
    unused(
        "dynamo_config",
        "for torch.compile; Burn's build feature `fusion` fuses operations on CubeCL devices",
        EMPTY,
    ),
    unused("enable_cpu_affinity", "the operating system places processes", NO),
    unused("fp8_config", "8-bit floats are not supported", EMPTY),
    used("fsdp_config"),
    used("gpu_ids"),
    unused("ipex_config", "for Intel's extension of PyTorch", EMPTY),
    used("machine_rank"),
    used("main_process_ip"),
    used("main_process_port"),
    unused("main_training_function", "a program has one `main`", &["main"]),
    unused("megatron_lm_config", "for Megatron-LM", EMPTY),
    used("mpirun_config"),
    used("num_machines"),
    used("num_processes"),
    used("parallelism_config"),
    unused("rdzv_backend", "ranks connect to `main_process_ip`", &["static"]),
    unused("same_network", "ranks connect to `main_process_ip`", &["true", "false"]),
    unused("tp_config", "for tensor parallelism", EMPTY),
    unused("tpu_env", TPU, EMPTY),
    unused("tpu_name", TPU, &[]),
    unused("tpu_use_cluster", TPU, NO),
    unused("tpu_use_sudo", TPU, NO),
    unused("tpu_vm", TPU, EMPTY),
    unused("tpu_zone", TPU, &[]),
    used("use_cpu"),
];

const FSDP: &[Key] = &[
    used("fsdp_ignored_modules"),
    unused(
        "fsdp_limit_all_gathers",
        "the option `gather_buffers` of the program limits how many units are gathered at a time",
        &["true"],
    ),
    used("fsdp_state_dict_type"),
    used("fsdp_use_orig_params"),
    used("fsdp_version"),
    unused("xla", XLA, NO),
    unused("xla_fsdp_grad_ckpt", XLA, NO),
    unused("xla_fsdp_settings", XLA, EMPTY),
    unused("xla_fsdp_v2", XLA, NO),
];
