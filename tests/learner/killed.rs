//! A process that is killed while it trains, and started again, ends with the bits of one that was
//! not killed.

use std::env;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::tempdir;

use super::mnist::{BATCHES, Run, full_weights};
use super::run::Metrics;
use super::support::compare::assert_same_bits;
use super::support::on_ranks;

/// Folder of the run, and number of ranks, of a process that the test has started.
const FOLDER: &str = "KILLED_RUN_FOLDER";
const WORLD: &str = "KILLED_RUN_WORLD";
/// Name of the test, which starts itself as the process to kill.
const TEST: &str = "killed::a_killed_process_resumes_to_the_same_bits";
const RUN: Run = Run { epochs: 5, accumulation: 1, is_long: true };
/// Signal that ends a process at once, wherever it is.
const SIGKILL: i32 = 9;

/// Trains to the end, from the newest checkpoint in the folder. Writes rank 0's weights and the
/// number of reductions of gradients.
fn train(folder: &Path, world: usize) {
    let path = folder.to_path_buf();
    let ranks = on_ranks(world, move |worker| {
        let model = RUN.train(worker, &path)?.model;
        let reductions = model.stats().counts().reduce_scatters;
        Ok((full_weights(model), reductions))
    });
    let (weights, reductions) = &ranks[0];
    let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
    fs::write(folder.join("weights"), bytes).unwrap();
    fs::write(folder.join("reductions"), reductions.to_string()).unwrap();
}

/// Starts a process that trains.
fn start(folder: &Path, world: usize) -> Child {
    let log = File::create(folder.join("process.log")).unwrap();
    Command::new(env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture"])
        .env(FOLDER, folder)
        .env(WORLD, world.to_string())
        .stdout(Stdio::from(log.try_clone().unwrap()))
        .stderr(Stdio::from(log))
        .spawn()
        .unwrap()
}

/// Returns the step of the newest checkpoint that is complete, or 0.
fn newest(folder: &Path) -> usize {
    let Ok(checkpoints) = folder.join("checkpoints").read_dir() else { return 0 };
    let steps = checkpoints.filter_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.strip_prefix("step-")?.parse().ok()
    });
    steps.max().unwrap_or(0)
}

/// Trains in a process that nobody kills.
fn whole(folder: &Path, world: usize) {
    let status = start(folder, world).wait().unwrap();
    let log = fs::read_to_string(folder.join("process.log")).unwrap();
    assert!(status.success(), "{status}\n{log}");
}

/// Trains in a process that is killed some time after it has saved the checkpoint of `step`.
fn killed(folder: &Path, world: usize, step: usize, later: Duration) {
    let mut process = start(folder, world);
    while newest(folder) < step {
        let log = || fs::read_to_string(folder.join("process.log")).unwrap();
        assert!(process.try_wait().unwrap().is_none(), "it ended by itself\n{}", log());
        std::thread::sleep(Duration::from_millis(2));
    }
    std::thread::sleep(later);
    process.kill().unwrap();
    assert_eq!(process.wait().unwrap().signal(), Some(SIGKILL));
}

#[test]
fn a_killed_process_resumes_to_the_same_bits() {
    if let (Some(folder), Ok(world)) = (env::var_os(FOLDER), env::var(WORLD)) {
        return train(Path::new(&folder), world.parse().unwrap());
    }
    for world in [1, 2, 4] {
        let (expected, found) = (tempdir().unwrap(), tempdir().unwrap());
        whole(expected.path(), world);
        let steps = RUN.epochs * BATCHES;
        // In the first epoch, near its end, and in a later epoch.
        for (step, later) in [(3, 0), (BATCHES, 11), (2 * BATCHES + 3, 23)] {
            killed(found.path(), world, step, Duration::from_millis(later));
            assert!((step..steps).contains(&newest(found.path())), "{world} ranks: a checkpoint");
        }
        whole(found.path(), world);

        let read = |folder: &Path, name: &str| fs::read(folder.join(name)).unwrap();
        let weights = |folder| read(folder, "weights");
        assert!(weights(expected.path()).len() > 4_000_000);
        assert!(weights(found.path()) == weights(expected.path()), "{world} ranks: the weights");
        let reductions = |folder| -> usize {
            String::from_utf8(read(folder, "reductions")).unwrap().parse().unwrap()
        };
        let (resumed, all) = (reductions(found.path()), reductions(expected.path()));
        assert!(resumed < all, "{world} ranks: the last process took {resumed} of {all} steps");
        let losses = |folder: &Path| Metrics::read(folder, RUN.epochs).train_losses;
        let (resumed, all) = (losses(found.path()), losses(expected.path()));
        assert_eq!(all.len(), steps);
        // The last epochs, which no process was killed in.
        let tail = |losses: &[f64]| losses[losses.len() - 2 * BATCHES..].to_vec();
        assert_same_bits(&tail(&resumed), &tail(&all), format!("losses of {world} ranks"));
    }
}
