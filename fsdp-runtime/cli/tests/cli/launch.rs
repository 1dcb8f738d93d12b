//! `fsdp launch`: the environment and the output of ranks, configuration files, and starts that are
//! refused.

use std::net::TcpListener;

use crate::support::{ConfigFile, Fsdp, Run};

/// Asserts that a launch was refused with an exit code and a message that contains `part`.
fn refused(run: &Run, code: i32, part: &str) {
    assert_eq!(run.code, Some(code), "{run:#?}");
    assert!(run.stderr.starts_with("fsdp: ") && run.stderr.contains(part), "{run:#?}");
    assert!(!run.stderr.contains("panicked"), "{run:#?}");
}

#[test]
fn ranks_have_their_place_in_the_environment() {
    let script = r#"echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $FSDP_RUN_ID" "$@""#;
    let mut fsdp = Fsdp::script(&["--num-processes", "3"], script);
    fsdp.command.args(["name", "--flag", "-n"]);
    let run = fsdp.run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    let mut lines: Vec<&str> = run.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines.len(), 3, "{run:#?}");
    let rest = lines[0].strip_prefix("[rank 0] 0 0 3 3 127.0.0.1 ").unwrap();
    assert!(rest.ends_with(" --flag -n"), "{rest}");
    for (rank, line) in lines.iter().enumerate() {
        assert_eq!(*line, format!("[rank {rank}] {rank} {rank} 3 3 127.0.0.1 {rest}"));
    }
}

#[test]
fn a_second_machine_starts_the_ranks_after_those_of_the_first() {
    let flags = [
        "--num-processes=4",
        "--num-machines=2",
        "--machine-rank=1",
        "--main-process-ip=localhost",
        "--main-process-port=4321",
    ];
    let run = Fsdp::script(&flags, "echo $RANK $LOCAL_RANK $MASTER_ADDR:$MASTER_PORT").run();
    let mut lines: Vec<&str> = run.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 2] 2 0 localhost:4321", "[rank 3] 3 1 localhost:4321"]);
}

#[test]
fn lines_of_ranks_do_not_mix() {
    let script = "i=0; while [ $i -lt 300 ]; do \
                  echo out $i abcdefghijklmnopqrstuvwxyz; echo err $i >&2; i=$((i+1)); done";
    let run = Fsdp::script(&["-n", "4"], script).run();
    assert_eq!(run.code, Some(0));
    for (text, word, end) in
        [(&run.stdout, "out", " abcdefghijklmnopqrstuvwxyz"), (&run.stderr, "err", "")]
    {
        let mut next = [0; 4];
        for line in text.lines().filter(|line| !line.starts_with("fsdp: ")) {
            let (rank, line) = line.strip_prefix("[rank ").unwrap().split_once("] ").unwrap();
            let rank: usize = rank.parse().unwrap();
            assert_eq!(line, format!("{word} {}{end}", next[rank]));
            next[rank] += 1;
        }
        assert_eq!(next, [300; 4]);
    }
}

#[test]
fn a_file_gives_the_number_of_ranks_and_is_passed_on_to_them() {
    let fsdp = Fsdp::script(&[], r#"echo "$WORLD_SIZE" && grep -c num_processes "$FSDP_CONFIG""#);
    let path = fsdp.cache.path().join("fsdp/default_config.yaml");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, "num_processes: 2\ntpu_name: big\n").unwrap();
    let run = fsdp.run();
    assert_eq!(run.code, Some(0), "{run:#?}");
    assert_eq!(run.stdout.matches("] 2\n").count(), 2, "{run:#?}");
    assert!(run.stderr.contains("line 2: `tpu_name: big` has no effect here"), "{run:#?}");
}

#[test]
fn flags_override_the_file_with_a_message() {
    let file = ConfigFile::new("num_processes: 4\n");
    let flags = ["--config", file.path(), "--num-processes", "2"];
    let run = Fsdp::script(&flags, "echo $WORLD_SIZE").run();
    assert_eq!(run.stdout.matches("] 2\n").count(), 2, "{run:#?}");
    let message = "line 1: `num_processes: 4` has no effect here: the command line has \
                   `num_processes: 2`";
    assert!(run.stderr.contains(message), "{run:#?}");
}

#[test]
fn the_output_of_each_rank_is_appended_to_its_log_file() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("logs");
    for spelling in ["--log_dir", "--log-dir"] {
        let flags = ["-n", "2", spelling, logs.to_str().unwrap()];
        let run = Fsdp::script(&flags, "echo out $RANK; echo err $RANK >&2").run();
        assert_eq!(run.code, Some(0), "{run:#?}");
        assert!(run.stdout.contains("[rank 1] out 1\n"), "{run:#?}");
    }
    for rank in 0..2 {
        let text = std::fs::read_to_string(logs.join(format!("rank-{rank}.log"))).unwrap();
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        let [out, err] = [format!("out {rank}"), format!("err {rank}")];
        assert_eq!(lines, [&err, &err, &out, &out], "two runs");
    }
    let run = Fsdp::script(&["-n", "1", "--log_dir", "/proc/no/logs"], "true").run();
    refused(&run, 1, "cannot write the log file of a rank");
}

#[test]
fn a_start_that_cannot_work_is_refused_with_the_reason() {
    let unset = Fsdp::script(&[], "true").env("CUDA_VISIBLE_DEVICES", "");
    refused(&unset.run(), 1, "--num-processes N");
    refused(&Fsdp::script(&["-n", "0"], "true").run(), 1, "at least 1");
    let run = Fsdp::new(&["launch", "-n", "2", "./no/such/program"]).run();
    refused(&run, 127, "`./no/such/program` was not found");
    refused(&Fsdp::new(&["launch", "-n", "2", "/etc/passwd"]).run(), 126, "`/etc/passwd`");
    let host = "no-such-host.invalid";
    let run = Fsdp::script(&["-n", "2", "--main-process-ip", host], "true").run();
    refused(&run, 1, host);

    let taken = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let run = Fsdp::script(&["-n", "2", "--main-process-port", &port], "true").run();
    refused(&run, 1, &format!("port {port} is taken"));

    let text = "num_processes: 2\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHRAD\n";
    let file = ConfigFile::new(text);
    let run = Fsdp::script(&["--config", file.path()], "true").run();
    refused(&run, 1, "line 3: unknown value `FULL_SHRAD`");
    refused(&Fsdp::script(&["--config", "/no/such.yaml"], "true").run(), 1, "/no/such.yaml");
}

#[test]
fn ranks_are_not_started_twice() {
    let torchrun = Fsdp::script(&["-n", "2"], "true")
        .env("RANK", "1")
        .env("LOCAL_RANK", "1")
        .env("WORLD_SIZE", "2");
    refused(&torchrun.run(), 1, "started twice");

    let inner = format!("{} launch -n 2 true", env!("CARGO_BIN_EXE_fsdp"));
    let run = Fsdp::script(&["-n", "2"], &inner).run();
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("] fsdp: the ranks are started twice"), "{run:#?}");

    let wrong = Fsdp::script(&["-n", "2"], "true").env("RANK", "one");
    refused(&wrong.run(), 1, "`RANK` is `one`");
}
