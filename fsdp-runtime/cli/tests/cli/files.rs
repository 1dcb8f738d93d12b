//! `fsdp config --default`, `fsdp validate` and `fsdp env`.

use std::process::Stdio;

use crate::support::{ConfigFile, Fsdp};

/// The file of Accelerate's guide to FSDP, with `mixed_precision` set to no.
const GUIDE: &str = include_str!("accelerate.yaml");

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
        Fsdp::script(&["-n", "1"], "echo here").env("XDG_CACHE_HOME", fsdp.cache.path()).run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(run.stderr.contains("default_config.yaml"), "{run:#?}");

    let run = Fsdp::new(&["config", "--default", "--output", "/proc/no/file.yaml"]).run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("/proc/no/file.yaml: cannot be written"), "{run:#?}");
}

#[test]
fn an_older_file_is_rewritten_in_todays_keys() {
    let file =
        ConfigFile::new("fp16: true # fast\ntpu_name: null\nfsdp_config: {min_num_params: 9}\n");
    for flag in ["--config_file", "--config-file"] {
        let run = Fsdp::new(&["config", "update", flag, file.path()]).run();
        assert_eq!(run.code, Some(0), "{run:#?}");
        let text = std::fs::read_to_string(file.path()).unwrap();
        let expected = "mixed_precision: fp16 # fast\ntpu_name: null\n\
                        fsdp_config: {fsdp_min_num_params: 9}\n";
        assert_eq!(text, expected);
        let said = match flag {
            "--config_file" => "line 1: `fp16` is now `mixed_precision: fp16`",
            _ => "has today's keys already",
        };
        assert!(run.stdout.contains(said), "{run:#?}");
    }

    // A file with a mistake is left alone.
    let mistake = "fp16: true\nnum_procesess: 2\n";
    file.write(mistake);
    let run = Fsdp::new(&["config", "update", "--config_file", file.path()]).run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("did you mean `num_processes`?"), "{run:#?}");
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), mistake);
    let run = Fsdp::new(&["config", "update"]).run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("default_config.yaml: cannot be read"), "{run:#?}");
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
    let rows = [
        "fsdp",
        "system",
        "cores",
        "memory",
        "devices",
        "CUDA",
        "libdevice",
        "cuBLASLt",
        "NCCL",
        "MPI",
    ];
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
