//! `fsdp config` on a terminal, with the keys a person would press.

use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::support::Fsdp;

const DOWN: &[u8] = b"\x1b[B";
const ENTER: &[u8] = b"\r";

#[test]
fn answers_by_keys_are_written_to_the_file() {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap().into_string().unwrap();
    let terminal = || std::fs::OpenOptions::new().read(true).write(true).open(&name).unwrap();

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("asked.yaml");
    let mut fsdp = Fsdp::new(&["config", "--output", path.to_str().unwrap()]);
    let mut child = fsdp
        .command
        .env("TERM", "xterm")
        .stdin(Stdio::from(terminal()))
        .stdout(Stdio::from(terminal()))
        .stderr(Stdio::from(terminal()))
        .spawn()
        .unwrap();

    // The screen is read all the time, as its buffer is small.
    let mut screen = std::fs::File::from(controller);
    let mut keys = screen.try_clone().unwrap();
    let (sender, seen) = channel();
    let reader = std::thread::spawn(move || {
        let mut bytes = [0; 1024];
        while let Ok(read) = screen.read(&mut bytes) {
            if read == 0
                || sender.send(String::from_utf8_lossy(&bytes[..read]).into_owned()).is_err()
            {
                return;
            }
        }
    });
    let mut text = String::new();
    let mut answer = |question: &str, answer: &[&[u8]]| {
        while !text.contains(question) {
            match seen.recv_timeout(Duration::from_secs(20)) {
                Ok(more) => text.push_str(&more),
                Err(error) => panic!("{error}: no `{question}` on {text}"),
            }
        }
        text.clear();
        // A question shows before its keys are read.
        std::thread::sleep(Duration::from_millis(100));
        answer.iter().for_each(|key| keys.write_all(key).unwrap());
    };
    answer("How many machines", &[ENTER]);
    answer("Which devices", &[b"\x1b[A", b"\x1b[A", ENTER]);
    answer("every collective", &[b"n"]);
    answer("What is sharded", &[DOWN, DOWN, ENTER]);
    answer("to host memory", &[b"n"]);
    answer("gathered on their own", &[ENTER]);
    answer("Their types", &[b"BertLayer", ENTER]);
    answer("for its backward", &[ENTER]);
    answer("in forward", &[b"y"]);
    answer("Recompute", &[b"n"]);
    answer("checkpoints", &[ENTER]);
    answer("on rank 0 only", &[b"y"]);
    answer("How many processes", &[b"8", ENTER]);
    answer("Mixed precision", &[ENTER]);
    let status = child.wait().unwrap();
    drop(keys);
    assert!(status.success(), "{status}");
    let text = std::fs::read_to_string(&path).unwrap();
    for line in [
        "fsdp_sharding_strategy: NO_SHARD",
        "fsdp_transformer_layer_cls_to_wrap: BertLayer",
        "fsdp_state_dict_type: SHARDED_STATE_DICT",
        "fsdp_forward_prefetch: true",
        "num_processes: 8",
        "mixed_precision: 'no'",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    drop(reader);
}
