//! The flags that set a key of the configuration, and those whose wish is always fulfilled.

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
pub(super) const KEYS: &[KeyFlag] = &[
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
    key("mixed_precision", "no|fp16|bf16", "Dtype of gathered parameters and of the computation"),
    switch("fp16", "fp16", "Older form of `--mixed-precision fp16`"),
    switch("downcast_bf16", "downcast_bf16", "With bf16, outputs of the model stay in bf16"),
    key("mpirun_hostfile", "FILE", "Start the ranks with `mpirun`, on the hosts of this file"),
    key(
        "fsdp_sharding_strategy",
        "NAME",
        "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2, or 1 to 5",
    ),
    key("fsdp_reshard_after_forward", "BOOL", "The strategy of FSDP2: true is FULL_SHARD"),
    key("fsdp_offload_params", "BOOL", "Store parameters and optimizer state in host memory"),
    key(
        "fsdp_auto_wrap_policy",
        "NAME",
        "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP: which units are gathered on their own",
    ),
    key("fsdp_transformer_layer_cls_to_wrap", "TYPES", "Units of TRANSFORMER_BASED_WRAP"),
    key("fsdp_min_num_params", "N", "Minimum size of a unit of SIZE_BASED_WRAP"),
    key("fsdp_backward_prefetch", "NAME", "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH, or 1 to 3"),
    key("fsdp_backward_prefetch_policy", "NAME", "Older form of `--fsdp-backward-prefetch`"),
    key("fsdp_forward_prefetch", "BOOL", "Gather a unit while the unit before it computes"),
    key(
        "fsdp_state_dict_type",
        "NAME",
        "SHARDED_STATE_DICT, FULL_STATE_DICT or LOCAL_STATE_DICT: form of checkpoints",
    ),
    key("fsdp_cpu_ram_efficient_loading", "BOOL", "One rank initialises a parameter"),
    key("fsdp_sync_module_states", "BOOL", "Rank 0 broadcasts its initial parameters"),
    key("fsdp_use_orig_params", "BOOL", "Always true here"),
    key("fsdp_activation_checkpointing", "BOOL", "Recompute activations in backward"),
    key(
        "fsdp_activation_checkpointing_offload",
        "BOOL",
        "Store inputs of recomputed units in host memory",
    ),
    key("fsdp_version", "1|2", "Both versions of the keys are read alike"),
    key("parallelism_config_dp_replicate_size", "N", "Number of shard groups"),
    key("parallelism_config_dp_shard_size", "N", "Number of ranks in a shard group"),
    key("parallelism_config_tp_size", "N", "1: there is no tensor parallelism"),
    key("parallelism_config_cp_size", "N", "1: there is no context parallelism"),
    key("parallelism_config_sp_size", "N", "1: there is no sequence parallelism"),
];
