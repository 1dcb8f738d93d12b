//! `fsdp launch --max-restarts`: which failures are followed by a restart, what the ranks of a restart
//! get, and how the run ends.

use std::collections::BTreeSet;
use std::time::Duration;

use rand::Rng;
use rustix::process::{Signal, kill_process};

use crate::support::{Fsdp, Run, SOON};

/// Returns a run with up to 5 restarts, and a short time before each.
fn script(args: &[&str], script: &str) -> Fsdp {
    Fsdp::script(&[&["--max-restarts", "5", "--restart-backoff", "0.05"], args].concat(), script)
}

/// Returns the words after `[rank R] ` in each line of standard output, without the rank.
fn lines(run: &Run) -> Vec<String> {
    let line = |line: &str| line.split_once("] ").map(|(_, rest)| rest.to_string());
    run.stdout.lines().filter_map(line).collect()
}

#[test]
fn all_ranks_are_started_again_after_a_failure() {
    let text = "echo attempt $FSDP_RESTART_COUNT $TORCHELASTIC_RESTART_COUNT \
                $TORCHELASTIC_MAX_RESTARTS; [ $FSDP_RESTART_COUNT -ge 2 ] && exit 0; \
                [ $RANK = 1 ] && exit 3; sleep 30";
    let run = script(&["-n", "3"], text).run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    let mut lines = lines(&run);
    lines.sort_unstable();
    let expected = ["attempt 0 0 5", "attempt 1 1 5", "attempt 2 2 5"];
    assert_eq!(lines, expected.map(|line| [line; 3]).as_flattened(), "{run:#?}");
    for part in [
        "rank 1 of 3 failed first: exit code 3",
        "restart 1 of at most 5 in 0.1 s",
        "the run has ended well after 2 restarts of at most 5",
        "failure 2: rank 1 of 3: exit code 3,",
    ] {
        assert!(run.stderr.contains(part), "{part}: {run:#?}");
    }
    assert!(run.took < SOON, "{run:#?}");
}

#[test]
fn the_last_error_is_the_result_when_no_restart_is_left() {
    let text = "[ $RANK = 0 ] || sleep 30; exit $((10 + FSDP_RESTART_COUNT))";
    let run = script(&["-n", "2", "--max-restarts", "2"], text).run();
    assert_eq!(run.code, Some(12), "{run:#?}");
    assert!(run.stderr.contains("the run has failed after 2 restarts of at most 2"), "{run:#?}");
    assert!(run.stderr.contains("failure 3: rank 0 of 2: exit code 12"), "{run:#?}");
    let run = Fsdp::script(&["-n", "1"], "exit 4").run();
    assert_eq!(run.code, Some(4), "{run:#?}");
    assert!(!run.stderr.contains("restart"), "without the flag there is no restart: {run:#?}");
}

#[test]
fn a_rank_that_was_refused_its_input_is_not_started_again() {
    for code in [2, 78, 126, 127] {
        let run = script(&["-n", "2"], &format!("[ $RANK = 1 ] || sleep 30; exit {code}")).run();
        assert_eq!(run.code, Some(code), "{run:#?}");
        assert!(run.stderr.contains("the run has failed without a restart"), "{run:#?}");
        assert!(run.took < SOON, "{run:#?}");
    }
    let mut fsdp = Fsdp::new(&["launch", "-n", "1", "--max-restarts", "5"]);
    fsdp.command.arg("./no-such-program");
    let run = fsdp.run();
    assert_eq!(run.code, Some(127), "{run:#?}");
}

#[test]
fn each_attempt_has_a_secret_a_name_and_a_port_of_its_own() {
    let text = "echo $FSDP_RUN_SECRET; echo $FSDP_RUN_ID; echo $MASTER_PORT; \
                [ $FSDP_RESTART_COUNT = 3 ] || exit 1";
    let run = script(&["-n", "1"], text).run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    let lines = lines(&run);
    assert_eq!(lines.len(), 12, "{run:#?}");
    for kind in 0..2 {
        let values: BTreeSet<_> = lines.iter().skip(kind).step_by(3).collect();
        assert_eq!(values.len(), 4, "{run:#?}");
    }
    assert!(lines.iter().step_by(3).all(|secret| secret.len() == 64), "{run:#?}");
}

#[test]
fn a_signal_to_the_launcher_is_never_followed_by_a_restart() {
    for signal in [Signal::INT, Signal::TERM] {
        let text = "echo pid $$; while :; do sleep 0.1; done";
        let mut running = script(&["-n", "2"], text).start();
        running.pids("pid", 2);
        running.signal(signal);
        let run = running.wait();
        assert_eq!(run.code, Some(128 + signal.as_raw()), "{run:#?}");
        assert!(!run.stderr.contains("restart 1"), "{run:#?}");
        // While the launcher waits for the next attempt.
        let args = ["-n", "1", "--restart-backoff", "30"];
        let mut running = script(&args, "echo pid $$; exit 1").start();
        running.pids("pid", 1);
        std::thread::sleep(Duration::from_secs(1));
        running.signal(signal);
        let run = running.wait();
        assert_eq!(run.code, Some(128 + signal.as_raw()), "{run:#?}");
        assert!(run.stderr.contains("before the restart") && run.took < SOON, "{run:#?}");
    }
}

/// A signal between the failure of a rank and the end of the others.
#[test]
fn a_signal_after_a_failure_prevents_the_restart() {
    let text = "trap '' TERM; [ $RANK = 1 ] && exit 3; echo pid $$; while :; do sleep 0.1; done";
    let mut running = script(&["-n", "2"], text).start();
    running.pids("pid", 1);
    std::thread::sleep(Duration::from_secs(1));
    running.signal(Signal::TERM);
    let run = running.wait();
    assert_eq!(run.code, Some(3), "{run:#?}");
    assert!(!run.stderr.contains("restart 1"), "{run:#?}");
}

#[test]
fn killed_and_stopped_ranks_are_followed_by_restarts() {
    let mut random = rand::rng();
    // A stopped rank is noticed by the others, whose collectives time out.
    let text = "echo pid $$; [ $FSDP_RESTART_COUNT = 4 ] && exit 0; \
                [ $RANK = $(( (FSDP_RESTART_COUNT + 1) % 3 )) ] && { sleep 2; exit 75; }; \
                while :; do sleep 0.1; done";
    let mut running = script(&["-n", "3"], text).start();
    for attempt in 0..4 {
        let pids = running.pids("pid", 3);
        std::thread::sleep(Duration::from_millis(random.random_range(0..300)));
        let (victim, how) = match attempt % 2 {
            0 => (random.random_range(0..3), Signal::KILL),
            _ => (attempt % 3, Signal::STOP),
        };
        kill_process(pids[victim].1, how).unwrap();
    }
    let run = running.wait();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert!(run.stderr.contains("after 4 restarts of at most 5"), "{run:#?}");
    assert_eq!(run.stderr.matches("was stopped at that time").count(), 2, "{run:#?}");
}

/// The next attempt begins when no process of the last one is left.
#[test]
fn ranks_that_do_not_end_are_killed_before_the_restart() {
    let directory = tempfile::tempdir().unwrap();
    // Each rank holds a lock, which its child inherits.
    let text = "exec 9>\"$DIRECTORY/$RANK\"; flock -n 9 || exit 78; trap '' TERM; sleep 300 & \
                [ $FSDP_RESTART_COUNT = 2 ] && exit 0; [ $RANK = 1 ] && exit 3; \
                while :; do sleep 0.1; done";
    let args = ["-n", "2", "--grace", "1"];
    let run = script(&args, text).env("DIRECTORY", directory.path()).run();
    assert_eq!(run.code, Some(0), "{run:#?}");
}

#[test]
fn no_process_is_left_when_the_launcher_is_killed_in_a_restart() {
    let text = "[ $FSDP_RESTART_COUNT = 0 ] && exit 1; trap '' TERM; sleep 300 & echo pid $$; wait; \
                while :; do sleep 1; done";
    let mut running = script(&["-n", "2"], text).start();
    running.pids("pid", 2);
    running.assert_found(2);
    running.signal(Signal::KILL);
    running.nothing_left();
}

#[test]
fn a_restart_has_fewer_ranks_if_one_does_not_come_back() {
    let text = "echo $FSDP_RESTART_COUNT $WORLD_SIZE; [ $WORLD_SIZE = 2 ] && exit 0; \
                [ $RANK = 1 ] && exit 1; sleep 30";
    let run = script(&["-n", "2:3"], text).run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    let mut lines = lines(&run);
    lines.sort_unstable();
    assert_eq!(lines, ["0 3", "0 3", "0 3", "1 3", "1 3", "1 3", "2 2", "2 2"], "{run:#?}");
    assert!(run.stderr.contains("rank 1 has failed at once again"), "{run:#?}");
    assert!(run.stderr.contains("going on with 2 ranks"), "{run:#?}");
    // Not below the minimum, and not without a range.
    for range in ["3:3", "3"] {
        let run = script(&["-n", range, "--max-restarts", "3"], text).run();
        assert_eq!(run.code, Some(1), "{run:#?}");
        assert!(!run.stderr.contains("going on"), "{run:#?}");
    }
}

#[test]
fn the_ranks_of_a_smaller_attempt_read_their_number() {
    let text = "echo $FSDP_CONFIG_FLAGS; [ $WORLD_SIZE = 1 ] && exit 0; [ $RANK = 0 ] && exit 1; \
                sleep 30";
    let run = script(&["-n", "1:2"], text).run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    let last = run.stdout.lines().last().unwrap_or_default();
    assert!(last.contains(r#""num_processes":"1""#), "{run:#?}");
}

#[test]
fn a_wrong_flag_is_refused_with_the_valid_values() {
    for (args, part) in [
        (&["-n", "4:2"][..], "MIN:MAX"),
        (&["-n", "2", "--restart-backoff=-1"], "seconds from 0"),
        (&["-n", "2", "--max-restarts", "many"], "max-restarts"),
    ] {
        let run = Fsdp::script(args, "true").run();
        assert_eq!(run.code, Some(2), "{run:#?}");
        assert!(run.stderr.contains(part), "{run:#?}");
    }
    let machines = ["-n", "2:4", "--num-machines", "2", "--main-process-ip", "127.0.0.1"];
    let run = Fsdp::script(&machines, "true").run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("`mpirun` (`--mpi`)"), "{run:#?}");
}
