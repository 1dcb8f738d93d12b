//! Ranks and launchers that fail, are killed or are stopped: the rank that failed first is named,
//! and no process is left.

use std::time::Duration;

use rand::Rng;
use rustix::process::{Signal, kill_process};

use crate::support::{Fsdp, SOON};

/// A script that prints its process id, and runs until it is killed.
const WORKER: &str = "echo pid $$; while :; do sleep 0.1; done";

#[test]
fn the_first_failing_rank_is_named_with_its_last_lines() {
    let script = r#"
        [ $RANK = 2 ] || { sleep 30; exit 0; }
        i=0; while [ $i -lt 50 ]; do echo line $i; i=$((i+1)); done
        echo "disk full" >&2
        exit 7"#;
    let run = Fsdp::script(&["-n", "4"], script).run();
    assert_eq!(run.code, Some(7), "{run:#?}");
    assert!(run.took < SOON, "{run:#?}");
    assert!(run.stderr.contains("rank 2 of 4 failed first: exit code 7"), "{run:#?}");
    let report = run.stderr.split("the last lines of rank 2:").nth(1).unwrap();
    assert!(report.contains("disk full") && report.contains("line 49"), "{report}");
    assert!(!report.contains("line 20\n"), "{report}");
}

#[test]
fn a_signal_ends_the_run_with_its_code() {
    let run = Fsdp::script(&["-n", "2"], "[ $RANK = 0 ] && kill -SEGV $$; sleep 30").run();
    assert_eq!(run.code, Some(128 + 11), "{run:#?}");
    assert!(run.stderr.contains("rank 0 of 2 failed first: killed by SIGSEGV"), "{run:#?}");
    assert!(run.stderr.contains("rank 0 had printed nothing"), "{run:#?}");
}

#[test]
fn ranks_that_do_not_end_when_asked_are_killed() {
    let script = "trap '' TERM; [ $RANK = 1 ] && exit 3; while :; do sleep 0.1; done";
    let run = Fsdp::script(&["-n", "3", "--grace", "1"], script).run();
    assert_eq!(run.code, Some(3), "{run:#?}");
    assert!(run.took > Duration::from_secs(1) && run.took < SOON, "{run:#?}");
}

#[test]
fn ranks_that_handle_sigterm_may_save_when_another_fails() {
    let script = "trap 'echo saved; exit 0' TERM; [ $RANK = 1 ] && { sleep 0.5; exit 3; }; \
                  while :; do sleep 0.1; done";
    let run = Fsdp::script(&["-n", "2"], script).run();
    assert_eq!(run.code, Some(3), "{run:#?}");
    assert!(run.stdout.contains("[rank 0] saved"), "{run:#?}");
}

#[test]
fn processes_that_a_rank_has_started_end_with_it() {
    let run = Fsdp::script(&["-n", "2"], "sleep 300 & exit 0").run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(run.took < SOON, "{run:#?}");
}

#[test]
fn a_signal_is_passed_on_to_the_ranks() {
    let script = "trap 'echo saving; exit 0' INT TERM; echo pid $$; while :; do sleep 0.1; done";
    for signal in [Signal::INT, Signal::TERM] {
        let mut running = Fsdp::script(&["-n", "2"], script).start();
        running.pids("pid", 2);
        running.signal(signal);
        let run = running.wait();
        assert_eq!(run.code, Some(0), "{run:#?}");
        assert_eq!(run.stdout.matches("saving").count(), 2, "{run:#?}");
    }
}

#[test]
fn an_interrupted_run_ends_with_the_signals_code() {
    let mut running = Fsdp::script(&["-n", "2"], WORKER).start();
    running.pids("pid", 2);
    running.signal(Signal::TERM);
    let run = running.wait();
    assert_eq!(run.code, Some(128 + 15), "{run:#?}");
    assert!(run.stderr.contains("ended by SIGTERM"), "{run:#?}");
    assert!(!run.stderr.contains("failed first"), "{run:#?}");
}

#[test]
fn a_second_signal_kills_the_ranks() {
    let script = "trap '' INT; echo pid $$; while :; do sleep 0.1; done";
    let mut running = Fsdp::script(&["-n", "2"], script).start();
    running.pids("pid", 2);
    running.signal(Signal::INT);
    std::thread::sleep(Duration::from_millis(500));
    assert!(
        running.launcher.try_wait().unwrap().is_none(),
        "after one signal ranks have time to end"
    );
    running.signal(Signal::INT);
    let run = running.wait();
    assert_eq!(run.code, Some(128 + 2), "{run:#?}");
    assert!(run.stderr.contains("rank 0: killed by SIGKILL"), "{run:#?}");
}

#[test]
fn a_stopped_rank_is_named_and_ended() {
    let script = "echo pid $$; [ $RANK = 1 ] && { sleep 1; echo timed out; exit 4; }; \
                  while :; do sleep 0.1; done";
    let mut running = Fsdp::script(&["-n", "2"], script).start();
    let pids = running.pids("pid", 2);
    kill_process(pids[0].1, Signal::STOP).unwrap();
    let run = running.wait();
    assert_eq!(run.code, Some(4), "{run:#?}");
    assert!(run.stderr.contains("rank 0 was stopped at that time"), "{run:#?}");
    assert!(run.took < SOON, "{run:#?}");
}

/// The ranks ignore every signal that they can, and have children.
#[test]
fn no_process_is_left_when_the_launcher_is_killed() {
    let script = "trap '' TERM HUP INT; sleep 300 & echo pid $$; wait; while :; do sleep 1; done";
    let mut running = Fsdp::script(&["-n", "3"], script).start();
    running.pids("pid", 3);
    running.assert_found(3);
    running.signal(Signal::KILL);
    running.nothing_left();
}

#[test]
fn a_run_survives_the_death_of_its_guard_process() {
    let mut running = Fsdp::script(&["-n", "2"], WORKER).start();
    let pids = running.pids("pid", 2);
    let mut children = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1));
        if parent == Some(running.launcher.id().to_string().as_str()) {
            let pid = entry.file_name().to_string_lossy().parse().unwrap();
            children.push(rustix::process::Pid::from_raw(pid).unwrap());
        }
    }
    children.retain(|child| !pids.iter().any(|(_, pid)| pid == child));
    assert_eq!(children.len(), 1, "the guard is the only child that is no rank");
    kill_process(children[0], Signal::KILL).unwrap();
    kill_process(pids[1].1, Signal::KILL).unwrap();
    let run = running.wait();
    assert_eq!(run.code, Some(128 + 9), "{run:#?}");
}

/// Ranks that end as soon as another is gone, possibly before the launcher notices that one.
#[test]
fn a_rank_that_ends_because_another_did_is_not_named() {
    let directory = tempfile::tempdir().unwrap();
    for rank in 1..4 {
        let path = directory.path().join(format!("{rank}"));
        let made = std::process::Command::new("mkfifo").arg(path).status().unwrap();
        assert!(made.success());
    }
    let script = "cd \"$DIRECTORY\"; case $RANK in \
                  0) exec 3>1 4>2 5>3; sleep 0.2; kill -KILL $$;; \
                  *) read line <$RANK; exit $CODE;; esac";
    for code in ["1", "75"] {
        for _ in 0..4 {
            let fsdp = Fsdp::script(&["-n", "4"], script).env("DIRECTORY", directory.path());
            let run = fsdp.env("CODE", code).run();
            assert_eq!(run.code, Some(128 + 9), "{run:#?}");
            assert!(run.stderr.contains("rank 0 of 4 failed first: killed"), "{run:#?}");
        }
    }
    // Exit code 75 means that another rank failed first.
    let script = "[ $RANK = 0 ] && exit 75; sleep 0.1; exit 3";
    let run = Fsdp::script(&["-n", "2"], script).run();
    assert_eq!(run.code, Some(3), "{run:#?}");
}

#[test]
fn ten_kills_of_a_random_rank_at_a_random_moment() {
    let mut random = rand::rng();
    for _ in 0..10 {
        let mut running = Fsdp::script(&["-n", "4"], WORKER).start();
        let pids = running.pids("pid", 4);
        std::thread::sleep(Duration::from_millis(random.random_range(0..300)));
        let (rank, pid) = pids[random.random_range(0..4)];
        kill_process(pid, Signal::KILL).unwrap();
        let run = running.wait();
        assert_eq!(run.code, Some(128 + 9), "{run:#?}");
        let named = format!("rank {rank} of 4 failed first: killed by SIGKILL");
        assert!(run.stderr.contains(&named), "{run:#?}");
        assert!(run.took < SOON, "{run:#?}");
    }
}
