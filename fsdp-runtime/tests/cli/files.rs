//! `fsdp config --default`, `fsdp validate` and `fsdp env`.

use std::process::Stdio;

use crate::support::{ConfigFile, Fsdp};

/// The file of Accelerate's guide to FSDP, with `mixed_precision` set to no.
const GUIDE: &str = include_str!("../support/accelerate.yaml");

#[test]
fn the_file_of_accelerates_guide_is_valid_and_keys_without_effect_are_reported() {
    let file = ConfigFile::new(GUIDE);
    let run = Fsdp::new(&["validate", file.path()]).run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(run.stdout.contains("line 23: `tpu_env: []` has no effect here: for TPUs"), "{run:#?}");
    assert!(run.stdout.contains("config.yaml: valid"), "{run:#?}");
    assert!(run.stdout.contains("BertLayer"), "{run:#?}");

    file.write(&GUIDE.replace("FULL_SHARD", "FULL_SHRAD").replace("tpu_env", "tpu_emv"));
    let run = Fsdp::new(&["validate", file.path()]).run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("2 problems"), "{run:#?}");
    assert!(run.stderr.contains("line 11: ") && run.stderr.contains("line 23: "), "{run:#?}");

    file.write(&GUIDE.replace("mixed_precision: 'no'", "mixed_precision: fp8"));
    let run = Fsdp::new(&["validate", file.path()]).run();
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
fn env_reports_the_machine_and_its_libraries() {
    let run = Fsdp::new(&["env"]).run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    let rows = ["fsdp", "system", "cores", "memory", "devices", "CUDA", "libdevice", "NCCL", "MPI"];
    for row in rows.into_iter().chain(["config"]) {
        let value = run.stdout.lines().find_map(|line| line.strip_prefix(row));
        assert!(value.is_some_and(|value| !value.trim().is_empty()), "{row}: {run:#?}");
    }
    assert!(run.stdout.contains("flex"), "{run:#?}");

    let run = Fsdp::new(&["env"]).env("RANK", "one").env("PATH", "").run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(run.stdout.contains("`RANK` is `one`"), "{run:#?}");
    assert!(run.stdout.contains("`mpirun` was not found"), "{run:#?}");

    let run = Fsdp::new(&["env"]).env("CUDA_PATH", "/no/such/toolkit").run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    let libdevice = run.stdout.lines().find(|line| line.starts_with("libdevice"));
    let libdevice = libdevice.expect("a row about libdevice");
    // With `cuda-cpp` the file is not needed.
    let says = ["/no/such/toolkit", "NVRTC"];
    assert!(says.into_iter().any(|text| libdevice.contains(text)), "{run:#?}");

    // Standard output is closed before anything is written.
    let mut fsdp = Fsdp::new(&["env"]);
    let mut child = fsdp.command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}
