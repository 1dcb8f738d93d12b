//! The keys of Accelerate's FSDP files, and whether each has an effect here.

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
    /// Returns the keys of this part.
    pub(super) const fn keys(self) -> &'static [Key] {
        match self {
            Self::Top => TOP,
            Self::Fsdp => FSDP,
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

/// Key of the map with the sizes of the device mesh.
pub(super) const PARALLELISM: &str = "parallelism_config";

/// Prefix of the keys under [`PARALLELISM`].
pub(super) const PARALLELISM_PREFIX: &str = "parallelism_config_";

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
    used("downcast_bf16"),
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
    used("fp16"),
    unused("fp8_config", "8-bit floats are not supported", EMPTY),
    used("fsdp_config"),
    used("gpu_ids"),
    unused("ipex_config", "for Intel's extension of PyTorch", EMPTY),
    used("machine_rank"),
    used("main_process_ip"),
    used("main_process_port"),
    unused("main_training_function", "a program has one `main`", &["main"]),
    unused("megatron_lm_config", "for Megatron-LM", EMPTY),
    used("mixed_precision"),
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
    used("fsdp_activation_checkpointing"),
    used("fsdp_activation_checkpointing_offload"),
    used("fsdp_auto_wrap_policy"),
    used("fsdp_backward_prefetch"),
    used("fsdp_backward_prefetch_policy"),
    used("fsdp_cpu_ram_efficient_loading"),
    used("fsdp_forward_prefetch"),
    used("fsdp_ignored_modules"),
    unused(
        "fsdp_limit_all_gathers",
        "the option `gather_buffers` of the program limits how many units are gathered at a time",
        &["true"],
    ),
    used("fsdp_min_num_params"),
    used("fsdp_offload_params"),
    used("fsdp_reshard_after_forward"),
    used("fsdp_sharding_strategy"),
    used("fsdp_state_dict_type"),
    used("fsdp_sync_module_states"),
    used("fsdp_transformer_layer_cls_to_wrap"),
    used("fsdp_use_orig_params"),
    used("fsdp_version"),
    unused("xla", XLA, NO),
    unused("xla_fsdp_grad_ckpt", XLA, NO),
    unused("xla_fsdp_settings", XLA, EMPTY),
    unused("xla_fsdp_v2", XLA, NO),
];
