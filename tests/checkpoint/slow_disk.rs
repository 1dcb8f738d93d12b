//! Background saves to a slow disk: training goes on, and one save at most is in flight.
//!
//! The test starts this program again under `strace`, which delays each `fsync`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, SaveOutcome, WhenBusy, list};
use fsdp_runtime::prelude::*;

use crate::support::checkpoint::{optimizer, schedule, sharded, train_step};
use crate::support::has_strace;

/// Environment variable: the folder in which the program that is started again saves.
const FOLDER: &str = "FSDP_TEST_SLOW_DISK";
const WORLD: usize = 2;

#[test]
fn training_goes_on_while_a_slow_disk_writes() {
    if !has_strace() {
        return eprintln!("skipped: strace cannot run here");
    }
    let home = tempfile::tempdir().unwrap();
    let mut strace = Command::new("strace");
    // A save syncs two files of ranks, the manifest and two folders, each half a second late.
    let delay = ["-f", "-e", "trace=fsync", "-e", "inject=fsync:delay_enter=500000"];
    strace.args(delay).args(["-o", "/dev/null"]).arg(std::env::current_exe().unwrap());
    strace.args(["--exact", "slow_disk::on_a_slow_disk", "--ignored", "--nocapture"]);
    let output = strace.env(FOLDER, home.path()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}\n{err}");
}

/// Number of threads of this process that write a checkpoint of a rank.
fn saving_threads(rank: usize) -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.trim() == format!("fsdp-save-{rank}")).count()
}

fn steps(root: &Path) -> Vec<u64> {
    list(root).unwrap().complete.iter().map(|(step, _)| *step).collect()
}

#[test]
#[ignore = "started by the test above, under strace"]
fn on_a_slow_disk() {
    let home = PathBuf::from(std::env::var_os(FOLDER).expect("started by the test above"));
    launch(LaunchOptions::new(WORLD).with_device(Device::flex()), move |worker| {
        let mut net = sharded(&worker, 0.0, FsdpOptions::new().with_seed(1))?;
        let (mut optimizer, mut schedule) = (optimizer(), schedule());
        let mut step = 0;
        let root = home.join("skip");
        let mut manager = CheckpointManager::new(&root, &worker)
            .with_background(true)
            .with_when_busy(WhenBusy::Skip);
        train_step(&worker, &mut net, &mut optimizer, &mut schedule, step)?;
        let saved = manager.save(&Checkpoint::new(1).with_model("net", &net))?;
        assert_eq!(saved.outcome, SaveOutcome::Started);
        // Steps of a few milliseconds each, and checkpoints that are due, while the disk is busy.
        let mut meanwhile = 0;
        while manager.is_saving()? {
            step += 1;
            train_step(&worker, &mut net, &mut optimizer, &mut schedule, step)?;
            assert!(saving_threads(worker.rank().index()) <= 1);
            if meanwhile < 5 {
                let checkpoint = Checkpoint::new(step as u64 + 1).with_model("net", &net);
                let outcome = manager.save(&checkpoint)?.outcome;
                assert_eq!(outcome, SaveOutcome::Skipped, "step {step}");
            }
            meanwhile += 1;
        }
        assert!(meanwhile >= 5, "{meanwhile} steps while the disk was busy");
        manager.finish()?;
        worker.barrier()?;
        assert_eq!(steps(&root), [1]);

        // Without skipping, a save waits for the previous one, so that one copy is in memory at most.
        let root = home.join("wait");
        let mut manager = CheckpointManager::new(&root, &worker).with_background(true);
        for step in 1..=3_u64 {
            manager.save(&Checkpoint::new(step).with_model("net", &net))?;
            assert!(saving_threads(worker.rank().index()) <= 1);
            let before: Vec<u64> = (1..step).collect();
            assert_eq!(steps(&root), before, "the previous save is complete");
        }
        manager.finish()?;
        worker.barrier()?;
        assert_eq!(steps(&root), [1, 2, 3]);
        Ok::<_, Error>(())
    })
    .expect("the ranks succeed");
}
