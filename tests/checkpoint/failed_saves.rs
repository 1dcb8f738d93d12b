//! Saves that fail while training goes on: `OnSaveError::Warn`.
//!
//! The tests start this program again, with a limit on the size of files or with a disk that is no
//! longer mounted.

use std::fs;
use std::path::Path;
use std::process::Command;

use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, OnSaveError, SaveOutcome, list};
use fsdp_runtime::errors::{CheckpointError, CollectiveError};
use fsdp_runtime::prelude::*;

use crate::disk_full::{again, can_mount, folder, succeeds, trained};
use crate::support::checkpoint::sharded;
use crate::support::on_ranks;

/// Returns the steps of the complete checkpoints, and asserts that there is no other folder.
fn steps(root: &Path) -> Vec<u64> {
    let listing = list(root).unwrap();
    assert!(listing.torn.is_empty(), "{listing:?}");
    listing.complete.iter().map(|(step, _)| *step).collect()
}

fn run(command: &str, args: &[&str]) {
    let output = Command::new(command).args(args).output().unwrap();
    assert!(output.status.success(), "{command} {args:?}: {output:?}");
}

#[test]
fn saves_that_fail_are_warnings_and_the_last_good_one_stays() {
    let home = tempfile::tempdir().unwrap();
    // 16 blocks of 512 bytes, which the program lifts in the end.
    let limit = "trap '' XFSZ; ulimit -S -f 16";
    succeeds(&again("failed_saves::with_small_files", limit, home.path()));
}

/// The first checkpoint is small, the others are too large, until the limit is lifted.
#[test]
#[ignore = "started by the test above"]
fn with_small_files() {
    for background in [false, true] {
        let root = folder().join(format!("{background}"));
        launch(LaunchOptions::new(2).with_device(Device::flex()), move |worker| {
            let (net, optimizer) = trained(&worker)?;
            let mut manager = CheckpointManager::new(&root, &worker)
                .with_background(background)
                .with_keep_last(2)
                .with_on_save_error(OnSaveError::Warn);
            let checkpoint = |step| {
                Checkpoint::new(step).with_model("net", &net).with_optimizer("adamw", &optimizer)
            };
            limit(&worker, "unlimited");
            manager.save(&checkpoint(1))?;
            manager.finish()?;
            assert_eq!((manager.failed_saves(), manager.last_failure()), (0, None));
            limit(&worker, "8192");
            for step in [2, 3] {
                let saved = manager.save(&checkpoint(step))?;
                match (&saved.outcome, background) {
                    (SaveOutcome::Started, true) => {}
                    (SaveOutcome::Failed(reason), false) => check(reason),
                    (outcome, _) => panic!("{outcome:?}"),
                }
                manager.finish()?;
                check(manager.last_failure().expect("a failure"));
                assert_eq!(manager.failed_saves(), step as usize - 1);
                worker.barrier()?;
                assert_eq!(steps(&root), [1]);
            }
            limit(&worker, "unlimited");
            manager.save(&checkpoint(4))?;
            manager.finish()?;
            assert_eq!((manager.failed_saves(), manager.last_failure()), (2, None));
            worker.barrier()?;
            assert_eq!(steps(&root), [1, 4]);
            Ok::<_, Error>(())
        })
        .expect("the ranks go on");
    }
}

fn check(reason: &str) {
    assert!(reason.starts_with("cannot write ") && reason.contains("step-0000000"), "{reason}");
}

/// Sets the limit on the size of files of this process, in bytes.
fn limit(worker: &Worker, bytes: &str) {
    worker.barrier().unwrap();
    if worker.is_rank_zero() {
        let process = std::process::id().to_string();
        run("prlimit", &["--pid", &process, &format!("--fsize={bytes}:unlimited")]);
    }
    worker.barrier().unwrap();
}

#[test]
fn a_disk_that_is_no_longer_mounted_is_a_warning_until_it_is_back() {
    let home = tempfile::tempdir().unwrap();
    if !can_mount() {
        return eprintln!("skipped: no disk can be mounted here");
    }
    let mount = "mount -t tmpfs none \"$FSDP_TEST_DISK_FULL\" && cd \"$FSDP_TEST_DISK_FULL\" && \
                 mkdir disk runs && mount -t tmpfs none disk && mount --bind disk runs";
    succeeds(&again("failed_saves::on_a_disk_that_vanishes", mount, home.path()));
}

#[test]
#[ignore = "started by the test above"]
fn on_a_disk_that_vanishes() {
    let (disk, mounted) = (folder().join("disk"), folder().join("runs"));
    launch(LaunchOptions::new(2).with_device(Device::flex()), move |worker| {
        let (net, _) = trained(&worker)?;
        let root = mounted.join("a");
        let mut manager = CheckpointManager::new(&root, &worker)
            .with_on_save_error(OnSaveError::Warn)
            .with_background(true);
        let checkpoint = |step| Checkpoint::new(step).with_model("net", &net);
        let leads = worker.is_rank_zero();
        manager.save(&checkpoint(1))?;
        manager.finish()?;
        worker.barrier()?;
        if leads {
            run("umount", &[mounted.to_str().unwrap()]);
        }
        worker.barrier()?;
        let saved = manager.save(&checkpoint(2))?;
        let SaveOutcome::Failed(reason) = &saved.outcome else { panic!("{saved:?}") };
        assert!(reason.contains("another file system"), "{reason}");
        assert_eq!(fs::read_dir(&mounted).unwrap().count(), 0, "nothing is saved elsewhere");
        worker.barrier()?;
        if leads {
            run("mount", &["--bind", disk.to_str().unwrap(), mounted.to_str().unwrap()]);
        }
        worker.barrier()?;
        manager.save(&checkpoint(3))?;
        manager.finish()?;
        worker.barrier()?;
        assert_eq!((steps(&root), manager.failed_saves()), (vec![1, 3], 1));
        Ok::<_, Error>(())
    })
    .expect("the ranks go on");
}

/// An error of the program is no matter of the disk.
#[test]
fn errors_of_the_program_are_returned_all_the_same() {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().to_path_buf();
    let errors = on_ranks(2, move |worker| {
        let net = sharded(worker, 0.0, FsdpOptions::new())?;
        let mut manager =
            CheckpointManager::new(&root, worker).with_on_save_error(OnSaveError::Warn);
        // Ranks that save different things.
        let name = ["net", "other"][worker.rank().index()];
        let differing = manager.save(&Checkpoint::new(1).with_model(name, &net)).unwrap_err();
        assert!(
            matches!(&differing, Error::Checkpoint(CheckpointError::RanksDiffer { .. })),
            "{differing}"
        );
        // A folder of the user in the place of the checkpoint.
        if worker.is_rank_zero() {
            fs::create_dir_all(root.join("step-00000002/notes")).unwrap();
            fs::write(root.join("step-00000002/manifest.json"), "").unwrap();
        }
        worker.barrier()?;
        manager
            .save(&Checkpoint::new(2).with_model("net", &net))
            .map(|_| ())
            .map_or_else(Ok, |()| panic!("the folder of the user was replaced"))
    });
    assert!(
        matches!(&errors[0], Error::Checkpoint(CheckpointError::NotACheckpoint { .. })),
        "{}",
        errors[0]
    );
    assert!(
        matches!(&errors[1], Error::Collective(CollectiveError::PeerFailed { .. })),
        "{}",
        errors[1]
    );
}
