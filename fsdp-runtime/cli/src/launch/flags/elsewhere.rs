//! Flags of `accelerate launch` for other systems. A flag that changes nothing about the training
//! is noted. A flag that asks for something that would not happen is refused.

use super::Group;

/// Values of a flag that is off.
const NO: &[&str] = &["no", "false", "0"];

/// Flags without an effect here.
pub(super) const NOTED: &[Group] = &[
    Group {
        because: "ranks connect to `--main_process_ip` and `--main_process_port`",
        values: &["rdzv_backend", "rdzv_conf"],
        switches: &["same_network"],
        off: &["static", ""],
    },
    Group {
        because: "for torch.compile; Burn's build feature `fusion` fuses operations on CubeCL \
                  devices",
        values: &["dynamo_backend", "dynamo_mode"],
        switches: &[
            "dynamo_use_fullgraph",
            "dynamo_use_dynamic",
            "dynamo_use_regional_compilation",
        ],
        off: &["no", "default"],
    },
    Group {
        because: "a program has one `main`",
        values: &["main_training_function"],
        switches: &[],
        off: &["main"],
    },
    Group {
        because: "the operating system places processes",
        values: &[],
        switches: &["enable_cpu_affinity"],
        off: &[],
    },
    Group {
        because: "a name in the logs of torchrun",
        values: &["role"],
        switches: &[],
        off: &["default"],
    },
    Group {
        because: "the launcher notices the end of a rank at once",
        values: &["monitor_interval"],
        switches: &[],
        off: &[],
    },
    Group {
        because: "the launcher prints no stack trace, but the last lines of the rank that failed \
                  first",
        values: &[],
        switches: &["quiet"],
        off: &[],
    },
    Group {
        because: "context parallel attention is that of this crate",
        values: &["parallelism_config_cp_backend"],
        switches: &[],
        off: &[],
    },
    Group {
        because: "for DeepSpeed's sequence parallelism, which is not supported",
        values: &[
            "parallelism_config_sp_backend",
            "parallelism_config_sp_seq_length",
            "parallelism_config_sp_seq_length_is_variable",
            "parallelism_config_sp_attn_implementation",
        ],
        switches: &[],
        off: &[],
    },
    Group {
        because: "for Intel's oneCCL and Intel's extension of PyTorch",
        values: &["mpirun_ccl"],
        switches: &["ipex"],
        off: NO,
    },
    Group {
        because: "each line of output is printed; `--log_dir` appends it to a file as well",
        values: &["tee"],
        switches: &[],
        off: NO,
    },
    Group {
        because: "no cluster of TPUs is used",
        values: &[],
        switches: &["no_tpu_cluster"],
        off: &[],
    },
];

/// Flags that ask for something that would not happen.
pub(super) const REFUSED: &[Group] = &[
    Group {
        because: "asks for data parallel training without sharding, which is \
                  `--fsdp_sharding_strategy NO_SHARD`",
        values: &[],
        switches: &["multi_gpu"],
        off: &[],
    },
    Group {
        because: "programs are executables, not Python modules; give the path of the program",
        values: &[],
        switches: &["module"],
        off: &[],
    },
    Group {
        because: "TPUs are not supported; the devices are CPUs and GPUs",
        values: &["vm", "env"],
        switches: &["tpu", "tpu_cluster", "tpu_use_sudo"],
        off: &[],
    },
    Group {
        because: "this GPU is not supported; the devices are CPUs, CUDA and wgpu",
        values: &[],
        switches: &["use_xpu", "use_mps_device"],
        off: &[],
    },
    Group {
        because: "DeepSpeed is another system; ZeRO stage 3 is `--fsdp_sharding_strategy \
                  FULL_SHARD`, stage 2 `SHARD_GRAD_OP`, stage 0 `NO_SHARD`, and offload to the CPU \
                  is `--fsdp_offload_params true`",
        values: &[
            "zero_stage",
            "offload_optimizer_device",
            "offload_param_device",
            "deepspeed_config_file",
            "zero3_init_flag",
            "zero3_save_16bit_model",
            "deepspeed_hostfile",
            "deepspeed_exclusion_filter",
            "deepspeed_inclusion_filter",
            "deepspeed_multinode_launcher",
            "deepspeed_moe_layer_cls_names",
        ],
        switches: &["use_deepspeed"],
        off: &[],
    },
    Group {
        because: "offload to a disk is not supported; offload to host memory is \
                  `--fsdp_offload_params true`",
        values: &["offload_optimizer_nvme_path", "offload_param_nvme_path"],
        switches: &[],
        off: &[],
    },
    Group {
        because: "the program accumulates gradients, with `Fsdp::accumulate`",
        values: &["gradient_accumulation_steps"],
        switches: &[],
        off: &["1"],
    },
    Group {
        because: "the program clips gradients, with `Fsdp::clip_grad_norm`",
        values: &["gradient_clipping"],
        switches: &[],
        off: &[],
    },
    Group {
        because: "Megatron-LM is another system; only data parallel training is supported",
        values: &[
            "megatron_lm_tp_degree",
            "megatron_lm_use_custom_fsdp",
            "megatron_lm_no_load_optim",
            "megatron_lm_eod_mask_loss",
            "megatron_lm_overlap_cpu_optimizer_d2h_h2d",
            "megatron_lm_no_save_optim",
            "megatron_lm_optimizer_cpu_offload",
            "megatron_lm_use_precision_aware_optimizer",
            "megatron_lm_decoder_last_pipeline_num_layers",
            "megatron_lm_pp_degree",
            "megatron_lm_num_micro_batches",
            "megatron_lm_sequence_parallelism",
            "megatron_lm_recompute_activations",
            "megatron_lm_use_distributed_optimizer",
            "megatron_lm_gradient_clipping",
            "megatron_lm_recompute_granularity",
            "megatron_lm_recompute_method",
            "megatron_lm_recompute_num_layers",
            "megatron_lm_attention_backend",
            "megatron_lm_expert_model_parallel_size",
            "megatron_lm_context_parallel_size",
            "megatron_lm_attention_dropout",
            "megatron_lm_hidden_dropout",
            "megatron_lm_attention_softmax_in_fp32",
            "megatron_lm_expert_tensor_parallel_size",
            "megatron_lm_calculate_per_token_loss",
            "megatron_lm_use_rotary_position_embeddings",
        ],
        switches: &["use_megatron_lm"],
        off: &[],
    },
    Group {
        because: "8-bit floats are not supported; use `--mixed_precision bf16`",
        values: &[
            "fp8_backend",
            "fp8_margin",
            "fp8_interval",
            "fp8_format",
            "fp8_amax_history_len",
            "fp8_amax_compute_algo",
            "fp8_override_linear_precision",
            "fp8_opt_level",
            "fp8_enable_fsdp_float8_all_gather",
            "fp8_pad_inner_dim",
        ],
        switches: &["fp8_use_autocast_during_eval"],
        off: &[],
    },
    Group {
        because: "Amazon SageMaker is not supported; run `fsdp launch` on the machines themselves",
        values: &["aws_access_key_id", "aws_secret_access_key"],
        switches: &[],
        off: &[],
    },
];
