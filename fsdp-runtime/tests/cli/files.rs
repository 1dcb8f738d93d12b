//! `fsdp config --default`, `fsdp validate` and `fsdp env`.

use std::process::Stdio;

use crate::support::Fsdp;

const GUIDE: &str = "\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
";

#[test]
fn the_guides_file_is_valid_and_its_idle_keys_are_reported() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("accelerate.yaml");
    std::fs::write(&path, GUIDE).unwrap();
    let run = Fsdp::new(&["validate", path.to_str().unwrap()]).run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(run.stdout.contains("line 23: `tpu_env: []` has no effect here: for TPUs"), "{run:#?}");
    assert!(run.stdout.contains("accelerate.yaml: valid"), "{run:#?}");
    assert!(run.stdout.contains("BertLayer"), "{run:#?}");

    std::fs::write(&path, GUIDE.replace("FULL_SHARD", "FULL_SHRAD").replace("tpu_env", "tpu_emv"))
        .unwrap();
    let run = Fsdp::new(&["validate", path.to_str().unwrap()]).run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("2 problems"), "{run:#?}");
    assert!(run.stderr.contains("line 11: ") && run.stderr.contains("line 23: "), "{run:#?}");

    std::fs::write(&path, GUIDE.replace("mixed_precision: 'no'", "mixed_precision: fp8")).unwrap();
    let run = Fsdp::new(&["validate", path.to_str().unwrap()]).run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("line 18: `mixed_precision: fp8` is not supported"), "{run:#?}");
}

#[test]
fn the_default_file_is_written_where_launch_looks() {
    let mut fsdp = Fsdp::new(&["config", "--default"]);
    let path = fsdp.cache.path().join("fsdp/default_config.yaml");
    let output = fsdp.command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains("distributed_type: FSDP"), "{text}");

    let run =
        Fsdp::script(&["-n", "2"], "echo here").env("XDG_CACHE_HOME", fsdp.cache.path()).run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(run.stderr.contains("default_config.yaml"), "{run:#?}");

    let run = Fsdp::new(&["config", "--default", "--output", "/proc/no/file.yaml"]).run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("/proc/no/file.yaml: cannot be written"), "{run:#?}");
}

#[test]
fn questions_need_a_terminal() {
    let run = Fsdp::new(&["config"]).run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("fsdp config --default"), "{run:#?}");
}

#[test]
fn env_says_what_there_is() {
    let run = Fsdp::new(&["env"]).run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    for row in ["fsdp", "system", "cores", "memory", "devices", "CUDA", "NCCL", "MPI", "config"] {
        let value = run.stdout.lines().find_map(|line| line.strip_prefix(row));
        assert!(value.is_some_and(|value| !value.trim().is_empty()), "{row}: {run:#?}");
    }
    assert!(run.stdout.contains("flex"), "{run:#?}");

    let run = Fsdp::new(&["env"]).env("RANK", "one").env("PATH", "").run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(run.stdout.contains("`RANK` is `one`"), "{run:#?}");
    assert!(run.stdout.contains("`mpirun` was not found"), "{run:#?}");

    // Nobody reads.
    let mut fsdp = Fsdp::new(&["env"]);
    let mut child = fsdp.command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}
