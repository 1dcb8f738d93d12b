//! Ignored parameters are saved with the others in checkpoints and state dicts: once where all
//! ranks have the same values, and once for each rank where they differ.

use std::path::{Path, PathBuf};

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Tensor, TensorData};
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, Manifest, Restore, TensorEntry};
use fsdp_runtime::errors::CheckpointError;
use fsdp_runtime::prelude::*;

use crate::support::checkpoint::{BLOCKS, optimizer};
use crate::support::compare::{Within, assert_close, assert_same_state};
use crate::support::{Net, batch, loss, on_ranks};

/// The ignored parameter.
pub(super) const PATH: &str = "blocks.0.up.weight";

/// Returns a sharded model with one ignored matrix, whose elements are `own` on this rank.
pub(super) fn ignoring(worker: &Worker, seed: u64, own: f32) -> Result<Fsdp<Net>, Error> {
    let mut net = Net::new(BLOCKS, 0.0, worker.device());
    let weight = net.blocks[0].up.weight.clone();
    net.blocks[0].up.weight = weight.map(|it| (it.ones_like() * own).detach().require_grad());
    let ignored = [net.blocks[0].up.weight.id];
    fully_shard(net, worker, FsdpOptions::new().with_seed(seed).with_ignored_params(ignored))
}

/// Takes one step, with the same rows on all ranks or with rows of its own on each.
fn step(
    worker: &Worker,
    net: Fsdp<Net>,
    optimizer: &mut ModuleOptimizer,
    at: usize,
    alike: bool,
) -> Result<Fsdp<Net>, Error> {
    let first = if alike { 0 } else { worker.rank().index() * 4 };
    let (tokens, labels) = batch(at, first..first + 4, worker.device());
    let grads: GradientsParams = net.backward(loss(net.forward(tokens), labels))?;
    Ok(optimizer.step(1e-2, net, grads))
}

/// Returns this rank's values of the ignored matrix.
pub(super) fn own(net: &Fsdp<Net>) -> TensorData {
    net.blocks[0].up.weight.val().into_data()
}

/// Saves the checkpoint of step 2.
fn save(worker: &Worker, path: &Path, net: &Fsdp<Net>, own: &ModuleOptimizer) -> Result<(), Error> {
    Checkpoint::new(2).with_model("net", net).with_optimizer("adamw", own).save(worker, path)
}

/// Trains two steps, saves, and trains two more. Returns each rank's ignored matrix.
fn first_run(path: PathBuf, alike: bool) -> Vec<TensorData> {
    on_ranks(2, move |worker| {
        let scale = if alike { 0.1 } else { 0.1 + 0.1 * worker.rank().index() as f32 };
        let (mut net, mut optimizer) = (ignoring(worker, 7, scale)?, optimizer());
        for at in 0..4 {
            if at == 2 {
                save(worker, &path, &net, &optimizer)?;
            }
            net = step(worker, net, &mut optimizer, at, alike)?;
        }
        Ok(own(&net))
    })
}

/// Resumes after two steps and trains two more. Returns each rank's ignored matrix.
fn second_run(world: usize, path: PathBuf, alike: bool) -> Vec<TensorData> {
    on_ranks(world, move |worker| {
        let (mut net, mut optimizer) = (ignoring(worker, 99, 9.0)?, optimizer());
        Restore::new()
            .with_model("net", &mut net)
            .with_optimizer("adamw", &mut optimizer)
            .load(worker, &path)?;
        for at in 2..4 {
            net = step(worker, net, &mut optimizer, at, alike)?;
        }
        Ok(own(&net))
    })
}

/// Returns the manifest's entries of the ignored matrix and of its first moment.
fn entries(path: &Path) -> [TensorEntry; 2] {
    let text = std::fs::read(path.join("manifest.json")).unwrap();
    let manifest = Manifest::parse(&text, "manifest.json").unwrap();
    let state = &manifest.optimizers["adamw"].models["net"][PATH];
    let moment = state.tensors["momentum.moment_1"].clone();
    [manifest.models["net"].tensors[PATH].clone(), moment]
}

#[test]
fn a_parameter_that_is_the_same_on_all_ranks_is_saved_once_for_any_world() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("alike");
    let expected = first_run(path.clone(), true);
    assert_eq!(expected[0].as_bytes(), expected[1].as_bytes());
    assert!(entries(&path).iter().all(|tensor| tensor.copies == 1));
    let found = second_run(2, path.clone(), true);
    assert!(found.iter().all(|found| found.as_bytes() == expected[0].as_bytes()));
    let elements = |data: &TensorData| data.iter::<f32>().collect::<Vec<_>>();
    for found in second_run(3, path, true) {
        let (found, expected) = (elements(&found), elements(&expected[0]));
        assert_close(&found, &expected, Within::Absolute(1e-6), "3 ranks");
    }
}

#[test]
fn a_parameter_that_differs_is_saved_by_every_rank_and_restored_on_each() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("differing");
    let expected = first_run(path.clone(), false);
    assert_ne!(expected[0].as_bytes(), expected[1].as_bytes());
    assert!(entries(&path).iter().all(|tensor| tensor.copies == 2));
    let found = second_run(2, path.clone(), false);
    assert_eq!(found, expected);
    // A rank that the saving world did not have gets rank 0's values.
    let scales = |world: usize| {
        let path = path.clone();
        on_ranks(world, move |worker| {
            let mut net = ignoring(worker, 99, 9.0)?;
            Restore::new().with_model("net", &mut net).load(worker, &path)?;
            Ok(own(&net).iter::<f32>().next().unwrap())
        })
    };
    let (two, three) = (scales(2), scales(3));
    assert_ne!(two[0], two[1]);
    assert_eq!(three, [two[0], two[1], two[0]]);
    // A model that shards the parameter gets rank 0's values too.
    let loaded = path.clone();
    let sharded = on_ranks(2, move |worker| {
        let options = FsdpOptions::new().with_seed(1);
        let mut net = fully_shard(Net::new(BLOCKS, 0.0, worker.device()), worker, options)?;
        let mut optimizer = optimizer();
        Restore::new()
            .with_model("net", &mut net)
            .with_optimizer("adamw", &mut optimizer)
            .load(worker, &loaded)?;
        Ok(net.state().full(Recipient::All)?[PATH].iter::<f32>().next().unwrap())
    });
    assert_eq!(sharded, [two[0]; 2]);
}

#[test]
fn a_background_save_holds_ignored_parameters_too() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_path_buf();
    let ranks = on_ranks(2, move |worker| {
        let mut net = ignoring(worker, 7, worker.rank().index() as f32)?;
        let mut manager = fsdp_runtime::checkpoint::CheckpointManager::new(&root, worker);
        manager = manager.with_background(true);
        let saved = manager.save(&Checkpoint::new(1).with_model("net", &net))?.folder;
        net = step(worker, net, &mut optimizer(), 0, true)?;
        manager.finish()?;
        let moved = own(&net).iter::<f32>().next().unwrap();
        Restore::new().with_model("net", &mut net).load(worker, &saved)?;
        Ok((moved, own(&net).iter::<f32>().next().unwrap()))
    });
    assert_eq!((ranks[0].1, ranks[1].1), (0.0, 1.0));
    assert!(ranks[0].0 != 0.0 && ranks[1].0 != 1.0);
}

#[test]
fn state_dicts_of_all_kinds_hold_ignored_parameters() {
    let ranks = on_ranks(2, |worker| {
        let rank = worker.rank().index() as f32;
        let (net, mut adamw) = (ignoring(worker, 7, rank)?, optimizer());
        let net = step(worker, net, &mut adamw, 0, true)?;
        let full = net.state().full(Recipient::All)?;
        let moments = net.state().full_optimizer(&adamw, Recipient::All)?;
        assert!(moments.parameters[PATH].tensors.contains_key("momentum.moment_1"));
        let only = net.state().full(Recipient::Only(fsdp_runtime::Rank::ZERO))?;
        assert_eq!(only.len(), if rank == 0.0 { full.len() } else { 0 });
        let (sharded, local) = (net.state().sharded(), net.state().local());
        assert_eq!(sharded[PATH].range, 0..full[PATH].num_elements());
        let all = |net: &Fsdp<Net>| (own(net), net.state().full(Recipient::All));
        let before = own(&net);

        let mut other = ignoring(worker, 99, 9.0)?;
        other.state_mut().load_sharded(&sharded)?;
        assert_eq!(all(&other).0.as_bytes(), before.as_bytes(), "the rank's own values");
        let mut other = ignoring(worker, 99, 9.0)?;
        other.state_mut().load_local(&local)?;
        assert_eq!(all(&other).0.as_bytes(), before.as_bytes(), "the rank's own values");
        let mut other = ignoring(worker, 99, 9.0)?;
        other.state_mut().load_full(&only, Recipient::Only(fsdp_runtime::Rank::ZERO))?;
        assert_eq!(all(&other).0.as_bytes(), full[PATH].as_bytes(), "rank 0's");
        assert_same_state(&all(&other).1?, &full, "rank 0's state");
        let mut fresh = optimizer();
        other.state().load_full_optimizer(&mut fresh, &moments)?;
        assert_eq!(other.state().full_optimizer(&fresh, Recipient::All)?, moments);
        Ok((full, before))
    });
    assert_same_state(&ranks[0].0, &ranks[1].0, "full states");
    assert_eq!(ranks[0].0[PATH].as_bytes(), ranks[0].1.as_bytes(), "the full state has rank 0's");
    assert_ne!(ranks[0].1.as_bytes(), ranks[1].1.as_bytes());
}

#[test]
fn optimizer_state_that_only_some_ranks_have_is_an_error_on_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("some");
    let errors = on_ranks(2, move |worker| {
        let (net, mut adamw) = (ignoring(worker, 7, 1.0)?, optimizer());
        let (tokens, labels) = batch(0, 0..4, worker.device());
        let mut grads = net.backward(loss(net.forward(tokens), labels))?;
        if worker.rank().index() == 1 {
            let left_out: Option<Tensor<2>> = grads.remove(net.blocks[0].up.weight.id);
            assert!(left_out.is_some());
        }
        let net = adamw.step(1e-2, net, grads);
        let error = save(worker, &path, &net, &adamw).unwrap_err();
        assert!(!path.exists());
        Ok(error)
    });
    for error in errors {
        let Error::Checkpoint(CheckpointError::RanksDiffer { rank, found, .. }) = &error else {
            panic!("{error}")
        };
        assert_eq!(rank.index(), 1);
        assert!(found.contains(PATH), "{found}");
    }
}
