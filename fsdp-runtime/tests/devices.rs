//! Threads and files of CubeCL's devices, in processes of their own.
#![cfg(feature = "cpu")]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use cubecl::cpu::CpuRuntime;
use cubecl_runtime::runtime::Runtime;
use fsdp_runtime::errors::DevicePanic;
use fsdp_runtime::prelude::*;

/// Tells a process of this program what to do in place of the tests.
const ROLE: &str = "FSDP_TEST_DEVICES";

/// What a process prints before the path of its file.
const FILE: &str = "the file of kernels is ";

/// Runs this program with a role.
fn process(role: &str, folder: &Path) -> Child {
    let program = std::env::current_exe().expect("this program");
    Command::new(program)
        .args(["--exact", "a_process_with_a_role", "--nocapture"])
        .env(ROLE, role)
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a process")
}

/// The program of a process that has a role. Without one it does nothing.
#[test]
fn a_process_with_a_role() {
    match std::env::var(ROLE).as_deref() {
        Ok("file") => hold_a_file(),
        Ok("panic") => lose_an_answer(),
        _ => {}
    }
}

/// Trains nothing, prints the file of its compiled kernels, and ends when its input ends.
fn hold_a_file() {
    let options = LaunchOptions::new(1).with_device(Device::cpu());
    let number = launch(options, |worker: Worker| -> Result<f32, Error> {
        Ok(Tensor::<1>::ones([1], worker.device()).into_scalar::<f32>())
    });
    assert_eq!(number.expect("the rank succeeds"), [1.0]);
    println!("{FILE}{}", cubecl_environment::environment::path().display());
    let mut end = String::new();
    std::io::stdin().read_line(&mut end).expect("the end of the input");
}

#[test]
fn eight_processes_have_a_file_each() {
    let folder = tempfile::tempdir().unwrap();
    let settings = "[compilation]\ncache = true\n\n[environment]\npath = \"local\"\n";
    std::fs::write(folder.path().join("cubecl.toml"), settings).unwrap();
    let mut processes: Vec<Child> = (0..8).map(|_| process("file", folder.path())).collect();
    let file = |process: &mut Child| {
        let lines = BufReader::new(process.stdout.as_mut().unwrap()).lines();
        // On one thread the test harness has written the name of the test before, on the same line.
        let mut files = lines.filter_map(|line| Some(line.ok()?.split_once(FILE)?.1.to_string()));
        files.next().expect("a process prints its file")
    };
    let files: BTreeSet<String> = processes.iter_mut().map(file).collect();
    assert_eq!(files.len(), 8, "{files:?}");
    let named = |file: &String| Path::new(file).file_name().unwrap().to_string_lossy().into_owned();
    let names: BTreeSet<String> = files.iter().map(named).collect();
    let expected = (1..8).map(|number| format!("default-{number}.db"));
    assert_eq!(names, expected.chain(["default.db".into()]).collect());
    for mut process in processes {
        drop(process.stdin.take());
        assert!(process.wait().unwrap().success());
    }
}

/// A task of the device's thread panics, and the rank waits for an answer that nobody gives.
fn lose_an_answer() {
    let begin = Instant::now();
    let options = LaunchOptions::new(2).with_device(Device::cpu());
    let outcome = launch(options, |worker: Worker| -> Result<(), Error> {
        if worker.rank().index() == 1 {
            let client = CpuRuntime::client(&Default::default());
            let lost = client.exclusive(|| panic!("the database is broken"));
            assert!(lost.is_err());
            loop {
                std::thread::park();
            }
        }
        worker.barrier()
    });
    let error = outcome.expect_err("the launch fails");
    let cause = error.source.downcast_ref::<DevicePanic>();
    let panic = cause.unwrap_or_else(|| panic!("{error}"));
    assert_eq!(panic.message, "the database is broken");
    assert!(error.to_string().contains("operations of the device are lost"), "{error}");
    let time = begin.elapsed();
    assert!(time < Duration::from_secs(5), "{time:?}");
    println!("ended");
}

#[test]
fn a_panic_on_the_thread_of_a_device_ends_the_launch() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = process("panic", folder.path());
    let lines: Vec<_> = BufReader::new(process.stdout.take().unwrap()).lines().collect();
    let ended = lines.iter().any(|line| line.as_ref().is_ok_and(|line| line.ends_with("ended")));
    assert!(process.wait().unwrap().success() && ended, "{lines:?}");
}
