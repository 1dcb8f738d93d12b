//! A full disk is a typed error that names the file, and the previous checkpoint stays the latest.
//!
//! The tests start this program again, on a small disk of its own or with a limit on the size of
//! files.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Restore, list};
use fsdp_runtime::errors::{CheckpointError, CollectiveError};
use fsdp_runtime::prelude::*;

use crate::support;
use crate::support::checkpoint::{optimizer, schedule, sharded, train_step};
use crate::support::compare::assert_same_state;

/// Environment variable: the folder in which the program that is started again saves.
const FOLDER: &str = "FSDP_TEST_DISK_FULL";
/// Bytes of a page, the unit in which a file on a `tmpfs` grows.
const PAGE: u64 = 4096;

/// Starts this program again for an ignored test, after the shell commands `first`.
pub fn again(test: &str, first: &str, folder: &Path) -> Output {
    let program = std::env::current_exe().unwrap();
    let script = format!("{first}\nexec \"$0\" --exact {test} --ignored --nocapture");
    let shell = if first.starts_with("mount") { "unshare" } else { "sh" };
    let mut command = Command::new(shell);
    if shell == "unshare" {
        command.args(["--map-root-user", "--mount", "sh"]);
    }
    command.arg("-c").arg(script).arg(program).env(FOLDER, folder);
    command.output().expect("a shell can be started")
}

/// Returns whether a disk can be mounted in a new namespace.
pub fn can_mount() -> bool {
    let mount = "mount -t tmpfs none /mnt";
    let mut unshare = Command::new("unshare");
    let tried = unshare.args(["--map-root-user", "--mount", "sh", "-c", mount]);
    tried.output().is_ok_and(|output| output.status.success())
}

pub fn succeeds(output: &Output) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}\n{err}");
}

pub fn folder() -> PathBuf {
    PathBuf::from(std::env::var_os(FOLDER).expect("started by one of the tests"))
}

/// Returns a model, and an optimizer with moments, after a step.
pub fn trained(
    worker: &Worker,
) -> Result<(Fsdp<support::Net>, burn::optim::ModuleOptimizer), Error> {
    let mut net = sharded(worker, 0.0, FsdpOptions::new().with_seed(1))?;
    let mut optimizer = optimizer();
    train_step(worker, &mut net, &mut optimizer, &mut schedule(), 0)?;
    Ok((net, optimizer))
}

/// Asserts that an error of a full disk names the file on the rank that met it, and that rank on
/// the others.
fn check(error: &Error, kinds: &[ErrorKind]) {
    match error {
        Error::Checkpoint(CheckpointError::Io { kind, file, .. }) => {
            assert!(kinds.contains(kind) && file.contains("step-00000002.tmp-"), "{error}");
            assert!(error.to_string().starts_with("cannot write "), "{error}");
        }
        Error::Collective(CollectiveError::PeerFailed { reason, .. }) => {
            assert!(reason.starts_with("cannot write "), "{error}");
        }
        error => panic!("{error}"),
    }
}

#[test]
fn a_full_disk_is_a_typed_error_and_the_previous_checkpoint_stays() {
    let home = tempfile::tempdir().unwrap();
    if !can_mount() {
        eprintln!("skipped: no disk can be mounted here");
        return;
    }
    let mount = format!("mount -t tmpfs -o size=2m none \"${FOLDER}\"");
    succeeds(&again("disk_full::on_a_small_disk", &mount, home.path()));
}

/// Saves a second checkpoint with every number of free pages, from none until it fits.
#[test]
#[ignore = "started by the test above"]
fn on_a_small_disk() {
    let root = folder();
    let options = LaunchOptions::new(2).with_device(Device::flex());
    let failures = launch(options, move |worker| {
        let (net, optimizer) = trained(&worker)?;
        let state = net.state().full(Recipient::All)?;
        let checkpoint = |step| {
            Checkpoint::new(step).with_model("net", &net).with_optimizer("adamw", &optimizer)
        };
        let manager = || CheckpointManager::new(root.join("run"), &worker);
        let mut managers = [manager(), manager().with_background(true)];
        managers[0].save(&checkpoint(1))?;
        let leads = worker.is_rank_zero();
        let mut failures = 0;
        for free in 0.. {
            if leads {
                fill(&root.join("ballast"), free);
            }
            worker.barrier()?;
            let mut failed = 0;
            for manager in &mut managers {
                let saved = manager.save(&checkpoint(2)).and_then(|_| manager.finish());
                worker.barrier()?;
                let listing = list(&root.join("run")).unwrap();
                let steps: Vec<u64> = listing.complete.iter().map(|(step, _)| *step).collect();
                match saved {
                    Ok(()) => assert_eq!(steps, [1, 2], "{free} pages"),
                    Err(error) => {
                        check(&error, &[ErrorKind::StorageFull]);
                        assert_eq!(steps, [1], "{free} pages: {error}");
                        failed += 1;
                    }
                }
                assert!(listing.torn.is_empty(), "{listing:?}");
                worker.barrier()?;
                if leads {
                    let _ = fs::remove_dir_all(root.join("run/step-00000002"));
                }
                worker.barrier()?;
            }
            failures += failed;
            if failed == 0 {
                break;
            }
        }
        let mut loaded = sharded(&worker, 0.0, FsdpOptions::new().with_seed(9))?;
        let latest = managers[0].latest()?.expect("the first checkpoint");
        Restore::new().with_model("net", &mut loaded).load(&worker, latest)?;
        assert_same_state(&loaded.state().full(Recipient::All)?, &state, "the first checkpoint");
        Ok::<_, Error>(failures)
    })
    .expect("the process group is still whole");
    assert!(failures[0] > 20 && failures[0] == failures[1], "{failures:?}");
}

/// Fills the disk except for `free` pages.
fn fill(ballast: &Path, free: u64) {
    let mut file = File::create(ballast).unwrap();
    let page = [1; PAGE as usize];
    while file.write_all(&page).is_ok() {}
    let full = file.metadata().unwrap().len() / PAGE * PAGE;
    file.set_len(full - free * PAGE).unwrap();
}

#[test]
fn a_limit_on_file_size_is_a_typed_error_and_the_previous_checkpoint_stays() {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().to_path_buf();
    launch(LaunchOptions::new(2).with_device(Device::flex()), move |worker| {
        let (net, optimizer) = trained(&worker)?;
        let mut manager = CheckpointManager::new(root.join("run"), &worker);
        let checkpoint =
            Checkpoint::new(1).with_model("net", &net).with_optimizer("adamw", &optimizer);
        manager.save(&checkpoint).map(|_| ())
    })
    .expect("the ranks succeed");
    // 16 blocks of 512 bytes. The signal that the system sends before the error is ignored.
    let output = again("disk_full::with_small_files", "trap '' XFSZ; ulimit -f 16", home.path());
    succeeds(&output);
}

#[test]
#[ignore = "started by the test above"]
fn with_small_files() {
    let root = folder().join("run");
    launch(LaunchOptions::new(2).with_device(Device::flex()), move |worker| {
        let (net, optimizer) = trained(&worker)?;
        let checkpoint =
            Checkpoint::new(2).with_model("net", &net).with_optimizer("adamw", &optimizer);
        for background in [false, true] {
            let mut manager = CheckpointManager::new(&root, &worker).with_background(background);
            let saved = manager.save(&checkpoint).and_then(|_| manager.finish());
            check(&saved.unwrap_err(), &[ErrorKind::FileTooLarge]);
            worker.barrier()?;
            let listing = list(&root).unwrap();
            assert_eq!((listing.complete.len(), listing.torn.len()), (1, 0), "{listing:?}");
            let latest = manager.latest()?.expect("the first checkpoint");
            assert!(latest.ends_with("step-00000001"));
            let mut loaded = sharded(&worker, 0.0, FsdpOptions::new().with_seed(9))?;
            Restore::new().with_model("net", &mut loaded).load(&worker, latest)?;
        }
        Ok::<_, Error>(())
    })
    .expect("the process group is still whole");
}
