//! `fsdp launch --mpi`, where Open MPI is installed.

use std::process::Command;

use rustix::process::{Signal, kill_process};

use crate::support::{ConfigFile, Fsdp, SOON};

/// `fsdp launch --mpi` of a shell script. None, with a message, where there is no `mpirun` of Open
/// MPI.
fn script(args: &[&str], script: &str) -> Option<Fsdp> {
    with_mpirun(&[&["--mpi"], args].concat(), script)
}

/// `fsdp launch` of a shell script with flags that ask for `mpirun`.
fn with_mpirun(args: &[&str], script: &str) -> Option<Fsdp> {
    let version = Command::new("mpirun").arg("--version").output();
    if !version.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("Open MPI")) {
        eprintln!("skipped: Open MPI's `mpirun` was not found");
        return None;
    }
    let fsdp = Fsdp::script(args, script);
    // Without both, `mpirun` refuses to run as root, as tests do in a container.
    Some(fsdp.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"))
}

#[test]
fn mpirun_starts_the_ranks_and_each_line_has_its_rank() {
    let Some(fsdp) = script(&["-n", "3"], "echo $OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_SIZE")
    else {
        return;
    };
    let run = fsdp.run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    let mut lines: Vec<&str> = run.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 0] 0 3", "[rank 1] 1 3", "[rank 2] 2 3"], "{run:#?}");
}

/// `fsdp test` over MPI, with an `fsdp` that has the engine.
#[test]
fn a_test_trains_with_processes_of_mpirun() {
    if !cfg!(feature = "mpi") {
        return eprintln!("skipped: `fsdp` was built without the feature `mpi`");
    }
    let Some(fsdp) = with_mpirun(&[], "true") else { return };
    let mut test = Fsdp::new(&["test", "--cpu", "--mpi", "--num_processes", "2"]);
    for (name, value) in fsdp.command.get_envs() {
        if name.to_string_lossy().starts_with("OMPI_ALLOW") {
            test.command.env(name, value.unwrap_or_default());
        }
    }
    let run = test.run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(run.stdout.contains("engine      mpi: 2 ranks as processes"), "{run:#?}");
    assert!(run.stdout.ends_with("the test passed\n"), "{run:#?}");
}

/// Ranks on CPUs communicate over MPI only, and a host file is one of `mpirun`.
#[test]
fn ranks_on_cpus_and_hosts_of_a_file_are_started_by_mpirun() {
    let hosts = ConfigFile::new("localhost slots=2\n");
    let path = hosts.path();
    let logs = tempfile::tempdir().unwrap();
    let folder = logs.path().to_str().unwrap();
    for flags in [&["--cpu"][..], &["--mpirun_hostfile", path], &["--mpirun-hostfile", path]] {
        let flags = [flags, &["--num_processes", "2", "--log_dir", folder]].concat();
        let script = "echo $OMPI_COMM_WORLD_RANK $FSDP_CONFIG_FLAGS";
        let Some(fsdp) = with_mpirun(&flags, script) else { return };
        let run = fsdp.run();
        assert_eq!(run.code, Some(0), "{run:#?}");
        for rank in 0..2 {
            let begin = format!("[rank {rank}] {rank} {{\"");
            assert!(run.stdout.contains(&begin), "{begin}: {run:#?}");
        }
    }
    let text = std::fs::read_to_string(logs.path().join("rank-1.log")).unwrap();
    assert!(text.lines().count() == 3 && text.starts_with("1 {\""), "{text}");
}

#[test]
fn the_rank_that_failed_first_is_named() {
    let text = "[ $OMPI_COMM_WORLD_RANK = 1 ] || sleep 30; echo disk full >&2; exit 7";
    let Some(fsdp) = script(&["-n", "3"], text) else { return };
    let run = fsdp.run();
    assert_eq!(run.code, Some(7), "{run:#?}");
    assert!(run.stderr.contains("rank 1 of 3 failed first: exit code 7"), "{run:#?}");
    let report = run.stderr.split("the last lines of rank 1:").nth(1).unwrap();
    assert!(report.contains("disk full"), "{report}");
    assert!(run.took < SOON, "{run:#?}");
}

#[test]
fn a_killed_rank_is_named() {
    let Some(fsdp) = script(&["-n", "2"], "echo pid $$; while :; do sleep 0.1; done") else {
        return;
    };
    let mut running = fsdp.start();
    let pids = running.pids("pid", 2);
    kill_process(pids[1].1, Signal::KILL).unwrap();
    let run = running.wait();
    assert_eq!(run.code, Some(128 + 9), "{run:#?}");
    assert!(run.stderr.contains("rank 1 of 2 failed first: killed by SIGKILL"), "{run:#?}");
}

#[test]
fn no_process_is_left_when_the_launcher_is_killed() {
    let text = "trap '' TERM HUP INT; echo pid $$; while :; do sleep 0.1; done";
    let Some(fsdp) = script(&["-n", "2"], text) else { return };
    let mut running = fsdp.start();
    running.pids("pid", 2);
    running.assert_found(2);
    running.signal(Signal::KILL);
    running.nothing_left();
}

#[test]
fn a_program_that_is_missing_is_named() {
    let Some(mut fsdp) = script(&["-n", "2"], "true") else { return };
    let command = &mut fsdp.command;
    let mut missing = Command::new(command.get_program());
    missing.args(["launch", "--mpi", "-n", "2", "./no/such/program"]);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => missing.env(name, value),
            None => missing.env_remove(name),
        };
    }
    fsdp.command = missing;
    let run = fsdp.run();
    assert_eq!(run.code, Some(127), "{run:#?}");
    assert!(run.stderr.contains("`./no/such/program` was not found"), "{run:#?}");
}

#[test]
fn ranks_of_mpirun_are_started_again() {
    let text = "echo pid $$; [ $FSDP_RESTART_COUNT = 2 ] && exit 0; while :; do sleep 0.1; done";
    let args = ["-n", "2", "--max-restarts", "3", "--restart-backoff", "0"];
    let Some(fsdp) = script(&args, text) else { return };
    let mut running = fsdp.start();
    for victim in [1, 0] {
        let pids = running.pids("pid", 2);
        kill_process(pids[victim].1, Signal::KILL).unwrap();
    }
    let run = running.wait();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(run.stderr.contains("after 2 restarts of at most 3"), "{run:#?}");
    assert!(run.stderr.contains("failure 2: rank 0 of 2: killed by SIGKILL"), "{run:#?}");
    // A rank that was refused its input.
    let args = ["-n", "2", "--max-restarts", "3"];
    let Some(fsdp) = script(&args, "[ $OMPI_COMM_WORLD_RANK = 0 ] || sleep 30; exit 78") else {
        return;
    };
    let run = fsdp.run();
    assert_eq!(run.code, Some(78), "{run:#?}");
    assert!(run.stderr.contains("the run has failed without a restart"), "{run:#?}");
}

/// A host that `mpirun` cannot reach: the restart has the ranks of the other one.
#[test]
fn a_restart_goes_on_without_a_host_that_is_lost() {
    let hosts = ConfigFile::new("localhost slots=2\nno-such-host.invalid slots=2\n");
    let flags =
        ["--mpirun-hostfile", hosts.path(), "--max-restarts", "2", "--restart-backoff", "0"];
    let text = "echo $OMPI_COMM_WORLD_SIZE";
    let Some(fsdp) = with_mpirun(&[&flags[..], &["-n", "2:4"]].concat(), text) else { return };
    let run = fsdp.run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert_eq!(run.stdout.matches("] 2\n").count(), 2, "{run:#?}");
    assert!(run.stderr.contains("host no-such-host.invalid cannot be reached"), "{run:#?}");
    assert!(run.stderr.contains("going on with 2 ranks"), "{run:#?}");
    // Too few ranks are left.
    let Some(fsdp) = with_mpirun(&[&flags[..], &["-n", "3:4"]].concat(), text) else { return };
    let run = fsdp.run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("take 2 ranks of at least 3"), "{run:#?}");
    assert!(run.stderr.contains("after 2 restarts of at most 2"), "{run:#?}");
}
