//! A checkpoint is merged into files that transformers loads, without the model's code.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, MergeOptions, merge};
use fsdp_runtime::errors::CheckpointError;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, SavePretrained};

use crate::support::checkpoint::{BLOCKS, optimizer, schedule, sharded, train_step};
use crate::support::compare::assert_same_state;
use crate::support::{self, Net, batch, of_rank_0, on_ranks};

/// Returns a sharded model with one ignored matrix.
fn ignoring(worker: &Worker) -> Result<Fsdp<Net>, Error> {
    let net = Net::new(BLOCKS, 0.0, worker.device());
    let ignored = [net.blocks[1].down.weight.id];
    fully_shard(net, worker, FsdpOptions::new().with_seed(3).with_ignored_params(ignored))
}

/// Returns the files of a folder by name.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let file = |entry: fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
    };
    entries.map(file).collect()
}

#[test]
fn a_merged_checkpoint_is_what_save_pretrained_writes() {
    let home = tempfile::tempdir().unwrap();
    for (world, ignore) in [(1, false), (3, false), (2, true)] {
        let folder = home.path().join(format!("{world}-{ignore}"));
        let saved = folder.clone();
        on_ranks(world, move |worker| {
            let mut net = match ignore {
                true => ignoring(worker)?,
                false => sharded(worker, 0.0, FsdpOptions::new().with_seed(3))?,
            };
            let mut own = optimizer();
            train_step(worker, &mut net, &mut own, &mut schedule(), 0)?;
            let checkpoint =
                Checkpoint::new(1).with_model("net", &net).with_optimizer("adamw", &own);
            checkpoint.save(worker, saved.join("checkpoint"))?;
            net.state().save_pretrained(saved.join("one"), &SavePretrained::new())?;
            let small = SavePretrained::new().with_max_shard_size(10_000);
            net.state().save_pretrained(saved.join("several"), &small)
        });
        let merge = |to: &str, options: &MergeOptions| {
            merge(folder.join("checkpoint"), folder.join(to), options).unwrap()
        };
        let merged = merge("merged", &MergeOptions::new());
        assert_eq!((merged.model.as_str(), merged.files.len()), ("net", 1));
        assert_eq!(files(&folder.join("merged")).len(), 1);
        assert_eq!(files(&folder.join("merged")), files(&folder.join("one")));
        // Several files replace the one, and one replaces the several.
        let merged = merge("merged", &MergeOptions::new().with_max_shard_size(10_000));
        assert!(merged.files.len() > 3, "{merged:?}");
        assert_eq!(files(&folder.join("merged")), files(&folder.join("several")));
        merge("merged", &MergeOptions::new());
        assert_eq!(files(&folder.join("merged")), files(&folder.join("one")));

        let merged = merge("paths", &MergeOptions::new().with_module_paths(true));
        let bytes = fs::read(&merged.files[0]).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let up = file.tensor("blocks.0.up.weight").unwrap();
        assert_eq!(up.shape(), [support::WIDTH, support::HIDDEN]);
        assert_eq!(file.len(), merged.tensors);
        let loaded = loaded_bytes(&folder.join("merged"), ignore);
        assert_eq!(loaded, merged.bytes);
    }
}

/// Loads merged files into the model. Returns the bytes of its parameters.
fn loaded_bytes(folder: &Path, ignore: bool) -> u64 {
    let folder = folder.to_path_buf();
    of_rank_0(2, move |worker| {
        let mut net = match ignore {
            true => ignoring(worker)?,
            false => sharded(worker, 0.0, FsdpOptions::new().with_seed(9))?,
        };
        net.state_mut().load_safetensors(&folder, &LoadOptions::new())?;
        let (tokens, _) = batch(0, 0..2, worker.device());
        let logits: Vec<f32> = net.forward(tokens).into_data().iter().collect();
        assert_eq!(logits.len(), 2 * support::CLASSES);
        assert!(logits.iter().all(|logit| logit.is_finite()), "{logits:?}");
        let state = net.state().full(Recipient::All)?;
        Ok(state.values().map(|data| data.as_bytes().len() as u64).sum::<u64>())
    })
}

#[test]
fn the_newest_complete_checkpoint_of_a_folder_is_merged() {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("run");
    let saved = root.clone();
    let states = on_ranks(2, move |worker| {
        let mut net = sharded(worker, 0.0, FsdpOptions::new().with_seed(3))?;
        let (mut own, mut rate) = (optimizer(), schedule());
        let mut manager = CheckpointManager::new(&saved, worker);
        for step in 1..4 {
            train_step(worker, &mut net, &mut own, &mut rate, step)?;
            manager.save(&Checkpoint::new(step as u64).with_model("net", &net))?;
        }
        net.state().full(Recipient::All)
    });
    fs::create_dir_all(root.join("step-00000009.tmp-dead")).unwrap();
    let output = home.path().join("merged");
    let merged = merge(&root, &output, &MergeOptions::new()).unwrap();
    assert!(merged.checkpoint.ends_with("step-00000003"), "{merged:?}");
    let loaded = on_ranks(1, move |worker| {
        let mut net = sharded(worker, 0.0, FsdpOptions::new().with_seed(9))?;
        net.state_mut().load_safetensors(&output, &LoadOptions::new())?;
        net.state().full(Recipient::All)
    });
    assert_same_state(&loaded[0], &states[0], "merged");
}

#[test]
fn a_merge_that_fails_is_a_typed_error_and_writes_nothing() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("two");
    let saved = folder.clone();
    on_ranks(2, move |worker| {
        let a = sharded(worker, 0.0, FsdpOptions::new().with_seed(3))?;
        let b = sharded(worker, 0.0, FsdpOptions::new().with_seed(4))?;
        Checkpoint::new(1).with_model("a", &a).with_model("b", &b).save(worker, &saved)
    });
    let output = home.path().join("merged");
    let refused = |folder: &Path, options: &MergeOptions| {
        let Error::Checkpoint(error) = merge(folder, &output, options).unwrap_err() else {
            panic!("an error of the checkpoint")
        };
        assert!(!output.exists() || files(&output).is_empty());
        error
    };
    for (options, asked) in
        [(MergeOptions::new(), None), (MergeOptions::new().with_model("c"), Some("c".to_string()))]
    {
        let error = refused(&folder, &options);
        assert!(error.to_string().ends_with("it holds `a`, `b`"), "{error}");
        let CheckpointError::NoSuchModel { asked: found, .. } = error else { panic!("{error}") };
        assert_eq!(found, asked);
    }
    let absent = refused(&home.path().join("absent"), &MergeOptions::new());
    assert!(matches!(absent, CheckpointError::Io { .. }), "{absent}");
    let torn = home.path().join("torn");
    fs::create_dir_all(torn.join("step-00000001.tmp-1")).unwrap();
    let error = refused(&torn, &MergeOptions::new());
    assert!(matches!(error, CheckpointError::NoCheckpoint { .. }), "{error}");

    let file = folder.join("rank-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let error = refused(&folder, &MergeOptions::new().with_model("b"));
    assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("rank-00001.safetensors"), "{error}");
}
