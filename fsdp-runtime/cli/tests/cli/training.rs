//! `fsdp test`, and a program that trains with the configuration of the command line.

use crate::support::{ConfigFile, Fsdp, Run};

/// Runs `fsdp test` on two threads of the CPU.
fn on_threads(flags: &[&str]) -> Run {
    let flags = [&["test", "--cpu", "--num_processes", "2"], flags].concat();
    // Without `mpirun`, ranks on CPUs are threads.
    Fsdp::new(&flags).env("PATH", "").run()
}

/// Returns the line of the report with this heading.
fn line<'a>(run: &'a Run, heading: &str) -> &'a str {
    let begin = format!("[rank 0] {heading}");
    let line = run.stdout.lines().find_map(|line| line.strip_prefix(&begin));
    line.unwrap_or_else(|| panic!("no line `{heading}`: {run:#?}")).trim()
}

#[test]
fn a_test_trains_and_says_what_it_has_checked() {
    let run = on_threads(&[]);
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert_eq!(line(&run, "ranks"), "2 met and know their numbers");
    assert_eq!(line(&run, "engine"), "local: 2 ranks as threads of one process");
    assert!(line(&run, "device").to_lowercase().contains("flex"), "{run:#?}");
    assert_eq!(line(&run, "strategy"), "FULL_SHARD: 4 units, one group of 2 ranks");
    assert!(line(&run, "losses").ends_with("in 6 steps: equal on all ranks, bit for bit"));
    assert!(line(&run, "unsharded").starts_with("the losses of plain Burn"), "{run:#?}");
    assert!(run.stdout.ends_with("the test passed\n"), "{run:#?}");
    // Weights are halved; biases are replicated.
    let bytes: Vec<usize> =
        line(&run, "memory").split(' ').filter_map(|word| word.parse().ok()).collect();
    assert!(line(&run, "collectives").ends_with(" bytes sent"), "{run:#?}");
    assert!(bytes[0] > bytes[1] / 2 && bytes[0] < bytes[1] * 6 / 10, "{run:#?}");
}

#[test]
fn the_strategy_of_the_command_line_is_the_one_that_trains() {
    for (flags, strategy) in [
        (&["--fsdp_sharding_strategy", "SHARD_GRAD_OP"][..], "SHARD_GRAD_OP: 4 units"),
        (&["--fsdp-sharding-strategy", "3"], "NO_SHARD: 4 units"),
        (&["--fsdp", "hybrid_shard_zero2 auto_wrap"], "HYBRID_SHARD_ZERO2: 4 units"),
        (&["--fsdp_reshard_after_forward", "false"], "SHARD_GRAD_OP: 4 units"),
        (&["--fsdp_auto_wrap_policy", "NO_WRAP"], "FULL_SHARD: 1 units"),
        (
            &["--fsdp_sharding_strategy", "4", "--parallelism_config_dp_replicate_size", "2"],
            "HYBRID_SHARD: 4 units, 2 groups of 1 ranks",
        ),
    ] {
        let run = on_threads(flags);
        assert_eq!(run.code, Some(0), "{flags:?}: {run:#?}");
        assert!(line(&run, "strategy").starts_with(strategy), "{flags:?}: {run:#?}");
    }
}

#[test]
fn a_program_that_is_launched_reads_the_file_and_the_flags() {
    let file = ConfigFile::new(
        "num_processes: 1\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  \
         fsdp_offload_params: true\n",
    );
    let program = [env!("CARGO_BIN_EXE_fsdp"), "test-rank", "--ranks", "2"];
    let launch = |flags: &[&str]| {
        let launch = ["launch", "--config", file.path(), "--cpu"];
        Fsdp::new(&[&launch, flags, &program].concat()).run()
    };
    let run = launch(&[]);
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(line(&run, "strategy").starts_with("FULL_SHARD"), "{run:#?}");
    let run = launch(&["--fsdp_sharding_strategy", "SHARD_GRAD_OP", "--mixed_precision=bf16"]);
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(line(&run, "strategy").starts_with("SHARD_GRAD_OP"), "{run:#?}");
    assert!(line(&run, "unsharded").ends_with("allowed in bf16)"), "{run:#?}");
}

#[test]
fn a_test_of_the_guides_file_leaves_out_the_units_of_another_model() {
    let file = ConfigFile::new(include_str!("accelerate.yaml"));
    let run = on_threads(&["--config_file", file.path()]);
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert_eq!(line(&run, "not tested"), "units of your model: BertLayer");
}

#[test]
fn threads_of_the_flag_or_of_the_environment_reach_the_pools_of_the_ranks() {
    // Two ranks share the threads of their process.
    let run = on_threads(&["--num_cpu_threads_per_process", "6"]);
    assert_eq!(line(&run, "threads"), "3 a rank", "{run:#?}");
    let program = [env!("CARGO_BIN_EXE_fsdp"), "test-rank", "--ranks", "1"];
    let launch = [&["launch", "--cpu", "-n", "1"][..], &program].concat();
    let run = Fsdp::new(&launch).env("OMP_NUM_THREADS", "5").run();
    assert_eq!(line(&run, "threads"), "5 a rank", "{run:#?}");
}

#[test]
fn a_test_on_an_engine_that_this_build_lacks_is_refused() {
    let run = Fsdp::new(&["test", "--cpu", "--mpi", "-n", "2"]).env("PATH", "").run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    let expected = if cfg!(feature = "mpi") { "`mpirun` was not found" } else { "--features mpi" };
    assert!(run.stderr.contains(expected), "{run:#?}");
    let run = on_threads(&["--fsdp_sharding_strategy", "FULL_SHRAD"]);
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("did you mean `FULL_SHARD`?"), "{run:#?}");
}

/// Processes that cannot communicate say what is missing.
#[test]
fn processes_without_mpi_are_refused_with_what_to_install() {
    let program = [env!("CARGO_BIN_EXE_fsdp"), "test-rank", "--ranks", "2"];
    let launch = [&["launch", "-n", "2"][..], &program].concat();
    let run = Fsdp::new(&launch).env("CUDA_VISIBLE_DEVICES", "").run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    let parts: &[&str] = if cfg!(feature = "mpi") {
        &["`fsdp launch --mpi`"]
    } else {
        &["apt-get install openmpi-bin", "--features mpi", "`fsdp launch --mpi`"]
    };
    for part in parts {
        assert!(run.stderr.contains(part), "{part}: {run:#?}");
    }
}
