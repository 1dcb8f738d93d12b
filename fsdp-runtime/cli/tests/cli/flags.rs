//! The flags of `accelerate launch` and of `Trainer`: each is honoured, noted with the reason, or
//! refused with the reason.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

use crate::support::{ConfigFile, Fsdp, Run};

/// What `fsdp launch` does with a flag.
enum Answer {
    /// It sets this key, at this JSON pointer of what the ranks get, to the value of the flag, or to
    /// `true`.
    Key(&'static str),
    /// The launcher itself does what it asks for, without a message.
    Done,
    /// It has no effect, which a line says with this reason.
    Noted(&'static str),
    /// It asks for something that would not happen, and is an error with this reason.
    Refused(&'static str),
}

use Answer::{Done, Key, Noted, Refused};

/// A flag without its hyphens, an example of its value, and the answer.
type Flag = (&'static str, Option<&'static str>, Answer);

/// All flags of `accelerate launch --help` (Accelerate 1.15), and of the guides' commands.
const FLAGS: &[Flag] = &[
    ("config_file", Some(FILE), Done),
    ("quiet", None, Noted("no stack trace")),
    ("cpu", None, Key("/use_cpu")),
    ("multi_gpu", None, Refused("`--fsdp_sharding_strategy NO_SHARD`")),
    ("tpu", None, Refused("TPUs are not supported")),
    ("mixed_precision", Some("bf16"), Key("/mixed_precision")),
    ("num_processes", Some("1"), Key("/num_processes")),
    ("num_machines", Some("1"), Key("/num_machines")),
    ("num_cpu_threads_per_process", Some("3"), Done),
    ("enable_cpu_affinity", None, Noted("the operating system places processes")),
    ("dynamo_backend", Some("inductor"), Noted("for torch.compile")),
    ("dynamo_mode", Some("max-autotune"), Noted("for torch.compile")),
    ("dynamo_use_fullgraph", None, Noted("for torch.compile")),
    ("dynamo_use_dynamic", None, Noted("for torch.compile")),
    ("dynamo_use_regional_compilation", None, Noted("for torch.compile")),
    ("use_deepspeed", None, Refused("DeepSpeed is another system")),
    ("use_fsdp", None, Done),
    ("use_parallelism_config", None, Done),
    ("use_megatron_lm", None, Refused("Megatron-LM is another system")),
    ("gpu_ids", Some("0,1"), Key("/gpu_ids")),
    ("same_network", None, Noted("ranks connect to")),
    ("machine_rank", Some("0"), Key("/machine_rank")),
    ("main_process_ip", Some("127.0.0.1"), Key("/main_process_ip")),
    ("main_process_port", Some("0"), Key("/main_process_port")),
    ("tee", Some("3"), Noted("`--log_dir` appends it to a file")),
    ("log_dir", Some(LOGS), Done),
    ("role", Some("trainer"), Noted("torchrun")),
    ("rdzv_backend", Some("c10d"), Noted("ranks connect to")),
    ("rdzv_conf", Some("timeout=900"), Noted("ranks connect to")),
    ("max_restarts", Some("3"), Done),
    ("monitor_interval", Some("5"), Noted("notices the end of a rank")),
    ("module", None, Refused("not Python modules")),
    ("no_python", None, Done),
    ("tpu_cluster", None, Refused("TPUs are not supported")),
    ("no_tpu_cluster", None, Noted("TPUs")),
    ("tpu_use_sudo", None, Refused("TPUs are not supported")),
    ("vm", Some("pod"), Refused("TPUs are not supported")),
    ("env", Some("A=1"), Refused("TPUs are not supported")),
    ("main_training_function", Some("train"), Noted("one `main`")),
    ("downcast_bf16", None, Key("/downcast_bf16")),
    ("deepspeed_config_file", Some("ds.json"), Refused("DeepSpeed")),
    ("zero_stage", Some("3"), Refused("ZeRO stage 3 is `--fsdp_sharding_strategy FULL_SHARD`")),
    ("offload_optimizer_device", Some("cpu"), Refused("`--fsdp_offload_params true`")),
    ("offload_param_device", Some("cpu"), Refused("`--fsdp_offload_params true`")),
    ("offload_optimizer_nvme_path", Some("/nvme"), Refused("offload to a disk")),
    ("offload_param_nvme_path", Some("/nvme"), Refused("offload to a disk")),
    ("gradient_accumulation_steps", Some("4"), Refused("`Fsdp::accumulate`")),
    ("gradient_clipping", Some("1.0"), Refused("`Fsdp::clip_grad_norm`")),
    ("zero3_init_flag", Some("true"), Refused("DeepSpeed")),
    ("zero3_save_16bit_model", Some("true"), Refused("DeepSpeed")),
    ("deepspeed_hostfile", Some("hosts"), Refused("DeepSpeed")),
    ("deepspeed_exclusion_filter", Some("a"), Refused("DeepSpeed")),
    ("deepspeed_inclusion_filter", Some("a"), Refused("DeepSpeed")),
    ("deepspeed_multinode_launcher", Some("pdsh"), Refused("DeepSpeed")),
    ("deepspeed_moe_layer_cls_names", Some("Moe"), Refused("DeepSpeed")),
    ("fsdp_version", Some("2"), Key("/fsdp_config/fsdp_version")),
    ("fsdp_offload_params", Some("true"), Key("/fsdp_config/fsdp_offload_params")),
    ("fsdp_min_num_params", Some("2000"), Key("/fsdp_config/fsdp_min_num_params")),
    ("fsdp_sharding_strategy", Some("SHARD_GRAD_OP"), Key("/fsdp_config/fsdp_sharding_strategy")),
    ("fsdp_reshard_after_forward", Some("false"), Key("/fsdp_config/fsdp_reshard_after_forward")),
    ("fsdp_auto_wrap_policy", Some("SIZE_BASED_WRAP"), Key("/fsdp_config/fsdp_auto_wrap_policy")),
    (
        "fsdp_transformer_layer_cls_to_wrap",
        Some("BertLayer,BertEmbeddings"),
        Key("/fsdp_config/fsdp_transformer_layer_cls_to_wrap"),
    ),
    ("fsdp_backward_prefetch", Some("BACKWARD_POST"), Key("/fsdp_config/fsdp_backward_prefetch")),
    ("fsdp_state_dict_type", Some("FULL_STATE_DICT"), Key("/fsdp_config/fsdp_state_dict_type")),
    ("fsdp_forward_prefetch", Some("true"), Key("/fsdp_config/fsdp_forward_prefetch")),
    ("fsdp_use_orig_params", Some("true"), Key("/fsdp_config/fsdp_use_orig_params")),
    (
        "fsdp_cpu_ram_efficient_loading",
        Some("true"),
        Key("/fsdp_config/fsdp_cpu_ram_efficient_loading"),
    ),
    ("fsdp_sync_module_states", Some("true"), Key("/fsdp_config/fsdp_sync_module_states")),
    (
        "fsdp_activation_checkpointing",
        Some("true"),
        Key("/fsdp_config/fsdp_activation_checkpointing"),
    ),
    (
        "fsdp_activation_checkpointing_offload",
        Some("true"),
        Key("/fsdp_config/fsdp_activation_checkpointing_offload"),
    ),
    ("megatron_lm_tp_degree", Some("2"), Refused("Megatron-LM")),
    ("megatron_lm_use_custom_fsdp", Some("1"), Refused("Megatron-LM")),
    ("megatron_lm_no_load_optim", Some("1"), Refused("Megatron-LM")),
    ("megatron_lm_eod_mask_loss", Some("1"), Refused("Megatron-LM")),
    ("megatron_lm_overlap_cpu_optimizer_d2h_h2d", Some("1"), Refused("Megatron-LM")),
    ("megatron_lm_no_save_optim", Some("1"), Refused("Megatron-LM")),
    ("megatron_lm_optimizer_cpu_offload", Some("1"), Refused("Megatron-LM")),
    ("megatron_lm_use_precision_aware_optimizer", Some("1"), Refused("Megatron-LM")),
    ("megatron_lm_decoder_last_pipeline_num_layers", Some("1"), Refused("Megatron-LM")),
    ("megatron_lm_pp_degree", Some("2"), Refused("Megatron-LM")),
    ("megatron_lm_num_micro_batches", Some("2"), Refused("Megatron-LM")),
    ("megatron_lm_sequence_parallelism", Some("true"), Refused("Megatron-LM")),
    ("megatron_lm_recompute_activations", Some("true"), Refused("Megatron-LM")),
    ("megatron_lm_use_distributed_optimizer", Some("true"), Refused("Megatron-LM")),
    ("megatron_lm_gradient_clipping", Some("1.0"), Refused("Megatron-LM")),
    ("megatron_lm_recompute_granularity", Some("full"), Refused("Megatron-LM")),
    ("megatron_lm_recompute_method", Some("block"), Refused("Megatron-LM")),
    ("megatron_lm_recompute_num_layers", Some("1"), Refused("Megatron-LM")),
    ("megatron_lm_attention_backend", Some("true"), Refused("Megatron-LM")),
    ("megatron_lm_expert_model_parallel_size", Some("2"), Refused("Megatron-LM")),
    ("megatron_lm_context_parallel_size", Some("2"), Refused("Megatron-LM")),
    ("megatron_lm_attention_dropout", Some("0.1"), Refused("Megatron-LM")),
    ("megatron_lm_hidden_dropout", Some("0.1"), Refused("Megatron-LM")),
    ("megatron_lm_attention_softmax_in_fp32", Some("true"), Refused("Megatron-LM")),
    ("megatron_lm_expert_tensor_parallel_size", Some("2"), Refused("Megatron-LM")),
    ("megatron_lm_calculate_per_token_loss", Some("true"), Refused("Megatron-LM")),
    ("megatron_lm_use_rotary_position_embeddings", Some("true"), Refused("Megatron-LM")),
    ("fp8_backend", Some("te"), Refused("`--mixed_precision bf16`")),
    ("fp8_use_autocast_during_eval", None, Refused("8-bit floats")),
    ("fp8_margin", Some("0"), Refused("8-bit floats")),
    ("fp8_interval", Some("1"), Refused("8-bit floats")),
    ("fp8_format", Some("HYBRID"), Refused("8-bit floats")),
    ("fp8_amax_history_len", Some("1024"), Refused("8-bit floats")),
    ("fp8_amax_compute_algo", Some("max"), Refused("8-bit floats")),
    ("fp8_override_linear_precision", Some("false"), Refused("8-bit floats")),
    ("fp8_opt_level", Some("O2"), Refused("8-bit floats")),
    ("fp8_enable_fsdp_float8_all_gather", Some("true"), Refused("8-bit floats")),
    ("fp8_pad_inner_dim", Some("true"), Refused("8-bit floats")),
    ("aws_access_key_id", Some(SECRET), Refused("SageMaker")),
    ("aws_secret_access_key", Some(SECRET), Refused("SageMaker")),
    ("debug", None, Key("/debug")),
    ("mpirun_hostfile", Some("/tmp/hosts"), Key("/mpirun_config/mpirun_hostfile")),
    (
        "parallelism_config_dp_replicate_size",
        Some("1"),
        Key("/parallelism_config/parallelism_config_dp_replicate_size"),
    ),
    (
        "parallelism_config_dp_shard_size",
        Some("1"),
        Key("/parallelism_config/parallelism_config_dp_shard_size"),
    ),
    (
        "parallelism_config_tp_size",
        Some("1"),
        Key("/parallelism_config/parallelism_config_tp_size"),
    ),
    (
        "parallelism_config_cp_size",
        Some("1"),
        Key("/parallelism_config/parallelism_config_cp_size"),
    ),
    (
        "parallelism_config_sp_size",
        Some("1"),
        Key("/parallelism_config/parallelism_config_sp_size"),
    ),
    ("parallelism_config_cp_backend", Some("torch"), Noted("that of this crate")),
    (
        "parallelism_config_cp_comm_strategy",
        Some("alltoall"),
        Key("/parallelism_config/parallelism_config_cp_comm_strategy"),
    ),
    ("parallelism_config_sp_backend", Some("deepspeed"), Noted("sequence parallelism")),
    ("parallelism_config_sp_seq_length", Some("128"), Noted("sequence parallelism")),
    ("parallelism_config_sp_seq_length_is_variable", Some("true"), Noted("sequence parallelism")),
    ("parallelism_config_sp_attn_implementation", Some("sdpa"), Noted("sequence parallelism")),
    // Flags of older versions.
    ("fp16", None, Key("/fp16")),
    (
        "fsdp_backward_prefetch_policy",
        Some("BACKWARD_POST"),
        Key("/fsdp_config/fsdp_backward_prefetch_policy"),
    ),
    ("mpirun_ccl", Some("1"), Noted("oneCCL")),
    ("ipex", None, Noted("Intel")),
    ("use_xpu", None, Refused("CPUs, CUDA and wgpu")),
    ("use_mps_device", None, Refused("CPUs, CUDA and wgpu")),
    // Flags of `Trainer`.
    ("fsdp", Some("shard_grad_op auto_wrap"), Done),
    ("fsdp_config", Some(TRAINER), Done),
];

/// Stands for the path of a configuration file.
const FILE: &str = "config.yaml";
/// Stands for the path of a JSON file of `Trainer`.
const TRAINER: &str = "trainer.json";
/// Stands for the path of a folder.
const LOGS: &str = "logs";
const SECRET: &str = "wJalrXUtnFEMI";

/// A script that prints what the ranks get from the command line.
const SCRIPT: &str = r#"echo "$FSDP_CONFIG_FLAGS"; echo "threads $OMP_NUM_THREADS""#;

/// The files that flags name.
struct Files {
    config: ConfigFile,
    trainer: ConfigFile,
    logs: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let trainer = "{\"limit_all_gathers\": true, \"fsdp_forward_prefetch\": true}";
        Self {
            config: ConfigFile::new("num_machines: 1\n"),
            trainer: ConfigFile::new(trainer),
            logs: tempfile::tempdir().unwrap(),
        }
    }

    /// Runs a launch of one rank with those flags of the list that have a certain answer, in one of
    /// the two spellings.
    fn run(&self, hyphens: bool, chosen: impl Fn(&Flag) -> bool) -> Run {
        let mut flags = vec!["-n".to_string(), "1".to_string()];
        for (name, value, _) in FLAGS.iter().filter(|flag| chosen(flag)) {
            let name = if hyphens { name.replace('_', "-") } else { name.to_string() };
            let value = value.map(|value| match value {
                FILE => self.config.path().to_string(),
                TRAINER => self.trainer.path().to_string(),
                LOGS => self.logs.path().to_str().unwrap().to_string(),
                value => value.to_string(),
            });
            // Both forms of a value.
            match value {
                Some(value) if hyphens => flags.push(format!("--{name}={value}")),
                Some(value) => flags.extend([format!("--{name}"), value]),
                None => flags.push(format!("--{name}")),
            }
        }
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        Fsdp::script(&flags, SCRIPT).run()
    }
}

/// Returns what rank 0 got from the command line.
fn sent(run: &Run) -> Value {
    assert_eq!(run.code, Some(0), "{run:#?}");
    let json = run.stdout.lines().find_map(|line| line.strip_prefix("[rank 0] {"));
    let json = json.unwrap_or_else(|| panic!("nothing was sent: {run:#?}"));
    serde_json::from_str(&format!("{{{json}")).unwrap()
}

#[test]
fn flags_that_are_honoured_reach_the_ranks_in_both_spellings() {
    let files = Files::new();
    for hyphens in [false, true] {
        // A host file asks for `mpirun`, which the test below looks at.
        let run = files.run(hyphens, |(name, _, answer)| {
            matches!(answer, Key(_) | Done) && *name != "mpirun_hostfile"
        });
        let sent = sent(&run);
        for (name, value, answer) in FLAGS {
            let Key(pointer) = answer else { continue };
            // `-n 1` is the number of ranks, and fp16 and bf16 are two precisions.
            let expected = Some(value.unwrap_or("true"));
            if *name != "mpirun_hostfile" {
                let found = sent.pointer(pointer).and_then(Value::as_str);
                assert_eq!(found, expected, "--{name}: {run:#?}");
            }
        }
        assert_eq!(sent.pointer("/fsdp_config/fsdp_limit_all_gathers"), Some(&"true".into()));
        assert!(run.stdout.contains("[rank 0] threads 3\n"), "{run:#?}");
        assert!(run.stderr.contains(files.config.path()), "`--config_file`: {run:#?}");
        assert!(!run.stderr.contains(" --"), "no flag is answered: {run:#?}");
    }
}

#[test]
fn a_host_file_asks_for_mpirun_which_must_be_installed() {
    for spelling in ["--mpirun_hostfile", "--mpirun-hostfile"] {
        let run = Fsdp::script(&["-n", "2", spelling, "/tmp/hosts"], "true").env("PATH", "").run();
        assert_eq!(run.code, Some(1), "{run:#?}");
        for part in ["`mpirun` was not found", "apt-get install openmpi-bin", "--features mpi"] {
            assert!(run.stderr.contains(part), "{part}: {run:#?}");
        }
    }
}

#[test]
fn flags_without_an_effect_are_noted_with_the_reason() {
    let files = Files::new();
    for hyphens in [false, true] {
        let run = files.run(hyphens, |(_, _, answer)| matches!(answer, Noted(_)));
        assert_eq!(run.code, Some(0), "{run:#?}");
        let mut noted = 0;
        for (name, _, answer) in FLAGS {
            let Noted(reason) = answer else { continue };
            let begin = format!("fsdp: --{name} has no effect here: ");
            let line = run.stderr.lines().find_map(|line| line.strip_prefix(&begin));
            let line = line.unwrap_or_else(|| panic!("--{name} is not noted: {run:#?}"));
            assert!(line.contains(reason), "--{name}: {line}");
            noted += 1;
        }
        assert_eq!(run.stderr.matches("has no effect here").count(), noted, "{run:#?}");
    }
    // Values that switch an option off are as good as none.
    let off = ["-n", "1", "--dynamo_backend", "no", "--rdzv_backend", "static"];
    let run = Fsdp::script(&off, "true").run();
    assert!(run.code == Some(0) && !run.stderr.contains("no effect"), "{run:#?}");
}

#[test]
fn flags_that_ask_for_something_else_are_refused_with_the_reason() {
    let files = Files::new();
    for hyphens in [false, true] {
        let run = files.run(hyphens, |(_, _, answer)| matches!(answer, Refused(_)));
        assert_eq!(run.code, Some(1), "{run:#?}");
        assert!(run.stdout.is_empty(), "nothing is started: {run:#?}");
        for (name, _, answer) in FLAGS {
            let Refused(reason) = answer else { continue };
            let begin = format!("  --{name}: ");
            let line = run.stderr.lines().find_map(|line| line.strip_prefix(&begin));
            let line = line.unwrap_or_else(|| panic!("--{name} is not refused: {run:#?}"));
            assert!(line.contains(reason), "--{name}: {line}");
        }
        assert!(!run.stderr.contains(SECRET), "a value is printed: {run:#?}");
    }
    let run = Fsdp::script(&["-n", "1", "--tpu"], "true").run();
    assert!(run.stderr.starts_with("fsdp: not supported here: --tpu: TPUs"), "{run:#?}");
    let fp8 = Fsdp::script(&["-n", "1", "--mixed_precision", "fp8"], "true").run();
    assert_eq!(fp8.code, Some(1), "{fp8:#?}");
    assert!(fp8.stderr.contains("`mixed_precision: fp8` is not supported"), "{fp8:#?}");
    let sequence = Fsdp::script(&["-n", "2", "--parallelism_config_sp_size", "2"], "true").run();
    let expected = "it is for DeepSpeed's Ulysses; write `parallelism_config_cp_size`";
    assert!(sequence.stderr.contains(expected), "{sequence:#?}");
}

/// The list above has every flag of the Accelerate that is installed, if one is.
#[test]
fn the_list_has_every_flag_of_accelerate() {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let code = "from accelerate.commands.launch import launch_command_parser as parser\n\
                print('\\n'.join(o for a in parser()._actions for o in a.option_strings))";
    let output = Command::new(python).args(["-c", code]).output();
    let Some(output) = output.ok().filter(|output| output.status.success()) else {
        return eprintln!("skipped: no Python with Accelerate (set PYTHON)");
    };
    let known: BTreeSet<String> = FLAGS.iter().map(|(name, ..)| format!("--{name}")).collect();
    let text = String::from_utf8(output.stdout).unwrap();
    let options = text.lines().filter(|option| option.starts_with("--"));
    let missing: Vec<&str> = options
        .filter(|option| !known.contains(&option.replace('-', "_").replacen("__", "--", 1)))
        .filter(|option| *option != "--help")
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(text.lines().count() > 150, "{text}");
}

#[test]
fn an_unknown_flag_before_the_program_is_an_error_with_the_nearest_one() {
    for (flag, nearest) in [
        ("--fsdp_shardng_strategy", "--fsdp_sharding_strategy"),
        ("--fsdp-shardng-strategy", "--fsdp-sharding-strategy"),
        ("--num_procesess", "--num_processes"),
        // As the guides of transformers write the keys.
        ("--fsdp_wrap_policy", "--fsdp_auto_wrap_policy"),
        ("--fsdp_min_num_param", "--fsdp_min_num_params"),
    ] {
        let run = Fsdp::script(&["-n", "1", flag, "1"], "true").run();
        assert_eq!(run.code, Some(2), "{run:#?}");
        assert!(run.stderr.contains(&format!("unexpected argument '{flag}'")), "{run:#?}");
        assert!(run.stderr.contains(&format!("'{nearest}'")), "{run:#?}");
    }
    let short = Fsdp::script(&["-n", "1", "-x"], "true").run();
    assert!(short.code == Some(2) && short.stderr.contains("'-x'"), "{short:#?}");
}

#[test]
fn two_hyphens_end_the_flags_and_the_programs_own_are_left_to_it() {
    let mut fsdp = Fsdp::new(&["launch", "-n", "1", "--", "sh", "-c", r#"echo "$@""#, "sh"]);
    fsdp.command.args(["--fsdp_sharding_strategy", "X", "--unknown", "--", "-n", "--cpu"]);
    let run = fsdp.run();
    let expected = "[rank 0] --fsdp_sharding_strategy X --unknown -- -n --cpu\n";
    assert_eq!(run.stdout, expected, "{run:#?}");
    let run = Fsdp::new(&["launch", "-n", "1", "--", "--no-such-program"]).run();
    assert_eq!(run.code, Some(127), "{run:#?}");
    assert!(run.stderr.contains("`--no-such-program` was not found"), "{run:#?}");
}

/// The commands of the two guides of transformers, with the quote that the guides lack.
#[test]
fn the_commands_of_the_guides_run() {
    let trainer = ConfigFile::new(
        "{\"backward_prefetch\": \"backward_pre\",\n \"forward_prefetch\": \"false\",\n \
         \"transformer_layer_cls_to_wrap\": [\"BertLayer\"],\n \"xla\": false}\n",
    );
    let file = format!("--fsdp_config={}", trainer.path());
    let run = Fsdp::script(&["-n", "1", "--fsdp=full shard", &file], SCRIPT).run();
    let sent = sent(&run);
    let text = |pointer: &str| sent.pointer(pointer).cloned();
    assert_eq!(text("/fsdp_config/fsdp_sharding_strategy"), Some("FULL_SHARD".into()));
    assert_eq!(text("/fsdp_config/fsdp_backward_prefetch"), Some("backward_pre".into()));
    let layers = text("/fsdp_config/fsdp_transformer_layer_cls_to_wrap");
    assert_eq!(layers, Some(serde_json::json!(["BertLayer"])));
    assert!(!run.stderr.contains("xla"), "`false` is the default: {run:#?}");

    // The JSON itself in place of a file.
    let json = r#"{"transformer_layer_cls_to_wrap": ["T5Block"], "cpu_offload": true}"#;
    let run = Fsdp::script(&["-n", "1", "--fsdp", "true", "--fsdp_config", json], SCRIPT).run();
    let offload = self::sent(&run).pointer("/fsdp_config/fsdp_offload_params").cloned();
    assert_eq!(offload, Some("true".into()));
    let wrong = ["-n", "1", "--fsdp_config", r#"{"cpu_offlod": true}"#];
    let run = Fsdp::script(&wrong, "true").run();
    assert!(run.stderr.contains("fsdp: --fsdp_config: line 1: unknown key"), "{run:#?}");

    // A flag overrides the JSON file, and the file of the configuration.
    let file = ConfigFile::new("num_processes: 1\nfsdp_config:\n  fsdp_backward_prefetch: 3\n");
    let flags = [
        "--config_file",
        file.path(),
        "--fsdp_config",
        trainer.path(),
        "--fsdp_backward_prefetch",
        "BACKWARD_POST",
    ];
    let run = Fsdp::script(&flags, SCRIPT).run();
    let pointer = "/fsdp_config/fsdp_backward_prefetch";
    assert_eq!(self::sent(&run).pointer(pointer), Some(&"BACKWARD_POST".into()));
    let note = "line 3: `fsdp_backward_prefetch: 3` has no effect here: the command line has";
    assert!(run.stderr.contains(note), "{run:#?}");

    trainer.write("{\n  \"backward_prefech\": \"backward_pre\"\n}\n");
    let run = Fsdp::script(&["-n", "1", "--fsdp_config", trainer.path()], "true").run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    let part =
        "line 2: unknown key `fsdp_backward_prefech`; did you mean `fsdp_backward_prefetch`?";
    assert!(run.stderr.contains(part), "{run:#?}");
}

#[test]
fn processes_on_cpus_need_mpi_which_is_said_before_they_start() {
    // Several ranks on CPUs are started by `mpirun`.
    let run = Fsdp::script(&["--cpu", "--num_processes", "2"], "true").env("PATH", "").run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("2 processes on CPUs communicate over MPI"), "{run:#?}");
    assert!(run.stderr.contains("apt-get install openmpi-bin"), "{run:#?}");
    // One rank communicates with nobody, and other devices may come from the program's own flags.
    let one = Fsdp::script(&["--cpu", "-n", "1"], "echo gpus [$CUDA_VISIBLE_DEVICES]").run();
    assert_eq!(one.stdout, "[rank 0] gpus []\n", "{one:#?}");
    let run = Fsdp::script(&["-n", "2"], "true").env("CUDA_VISIBLE_DEVICES", "").run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(run.stderr.contains("no GPU was found; processes on CPUs communicate"), "{run:#?}");
    assert!(run.stderr.contains("add `--mpi`"), "{run:#?}");
}
