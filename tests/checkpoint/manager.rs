//! `CheckpointManager`: which checkpoints are kept, what is cleaned up, and saves in the
//! background.

use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, list};
use fsdp_runtime::prelude::*;

use crate::support::checkpoint::{Part, optimizer, schedule, sharded, train_step};
use crate::support::compare::{assert_same_bits, assert_same_state};
use crate::support::on_ranks;

#[test]
fn the_newest_checkpoints_are_kept_and_torn_ones_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_path_buf();
    for background in [false, true] {
        let at = root.join(format!("{background}"));
        std::fs::create_dir_all(at.join("step-00000001.tmp-dead")).unwrap();
        let manager_root = at.clone();
        on_ranks(2, move |worker| {
            let net = sharded(worker, 0.0, FsdpOptions::new())?;
            let mut manager = CheckpointManager::new(&manager_root, worker)
                .with_keep_last(2)
                .with_background(background);
            assert_eq!(manager.latest()?, None);
            for step in [3, 6, 9, 12, 12] {
                let saved = manager.save(&Checkpoint::new(step).with_model("net", &net))?;
                assert!(saved.folder.ends_with(format!("step-{step:08}")));
            }
            manager.finish()?;
            let latest = manager.latest()?.expect("some checkpoints are complete");
            assert!(latest.ends_with("step-00000012"), "{latest:?}");
            Ok(())
        });
        let listing = list(&at).unwrap();
        let steps: Vec<u64> = listing.complete.iter().map(|(step, _)| *step).collect();
        assert_eq!((steps, listing.torn.len()), (vec![9, 12], 0), "background: {background}");
        assert_eq!(std::fs::read_dir(&at).unwrap().count(), 2);
    }
}

/// A folder of checkpoints is no checkpoint: a save in its place would delete the checkpoints in
/// it.
#[test]
fn a_save_replaces_nothing_but_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_path_buf();
    let errors = on_ranks(2, move |worker| {
        let net = sharded(worker, 0.0, FsdpOptions::new())?;
        let mut manager = CheckpointManager::new(&root, worker);
        let saved = manager.save(&Checkpoint::new(3).with_model("net", &net))?.folder;
        let error = net.state().save(&root).unwrap_err();
        assert!(saved.join("manifest.json").is_file());
        net.state().save(&saved)?;
        Ok(error.to_string())
    });
    assert!(errors[0].contains("is no checkpoint"), "{}", errors[0]);
    assert!(
        errors[1].contains("rank 0") && errors[1].contains("is no checkpoint"),
        "{}",
        errors[1]
    );
}

#[test]
fn a_background_save_holds_the_state_of_its_step() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_path_buf();
    let part = Part::new(2).dropout(0.1);
    let (losses, state) = part.clone().until(12).launch();
    let manager_root = root.clone();
    on_ranks(2, move |worker| {
        let mut net = sharded(worker, 0.1, FsdpOptions::new().with_seed(7))?;
        let (mut optimizer, mut schedule) = (optimizer(), schedule());
        let mut manager = CheckpointManager::new(&manager_root, worker).with_background(true);
        for step in 0..8 {
            train_step(worker, &mut net, &mut optimizer, &mut schedule, step)?;
            if step % 2 == 1 {
                let checkpoint = Checkpoint::new(step as u64 + 1)
                    .with_model("net", &net)
                    .with_optimizer("adamw", &optimizer)
                    .with_scheduler("rate", &schedule);
                manager.save(&checkpoint)?;
            }
        }
        manager.finish()
    });
    assert_eq!(list(&root).unwrap().complete.len(), 4);
    for step in [2, 4, 6, 8] {
        let from = root.join(format!("step-{step:08}"));
        let (found, found_state) = part.clone().from(&from).until(12).launch();
        assert_same_bits(&found, &losses[step..], format_args!("losses from step {step}"));
        assert_same_state(&found_state, &state, format_args!("from step {step}"));
    }
}
