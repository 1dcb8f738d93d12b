//! The running statistics of a `BatchNorm` differ from rank to rank. They are saved with the
//! parameters in checkpoints, state dicts and files of weights.

use std::path::Path;

use burn::tensor::{Int, Tensor, TensorData};
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, Restore};
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, SavePretrained};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::pretrained::{Tied, tied};
use crate::support::on_ranks;

const MEAN: &str = "norm.running_mean";

fn sharded(worker: &Worker, seed: u64) -> Result<Fsdp<Tied>, Error> {
    fully_shard(tied(worker.device()), worker, FsdpOptions::new().with_seed(seed))
}

/// Returns a model that has seen different batches on each rank.
fn trained(worker: &Worker) -> Result<Fsdp<Tied>, Error> {
    let model = sharded(worker, 1)?;
    let first = worker.rank().index() as i32;
    for at in 0..3 {
        let tokens = Tensor::<2, Int>::from_data([[first + at, 5, 9, 12 - at]], worker.device());
        model.forward(tokens);
    }
    Ok(model)
}

/// Returns this rank's running mean.
fn own(model: &Fsdp<Tied>) -> TensorData {
    model.state().sharded()[MEAN].data.clone()
}

#[test]
fn a_checkpoint_restores_the_statistics_of_each_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let file = path.clone();
    let saved = on_ranks(2, move |worker| {
        let model = trained(worker)?;
        Checkpoint::new(3).with_model("tied", &model).save(worker, &file)?;
        let valid = model.valid().norm.running_mean.value().into_data();
        assert_eq!(own(&model).as_bytes(), valid.as_bytes(), "with the last update");
        Ok(own(&model))
    });
    assert_ne!(saved[0], saved[1]);
    let restored = |world| {
        let path = path.clone();
        on_ranks(world, move |worker| {
            let mut model = sharded(worker, 2)?;
            // An update from before the load must not overwrite the loaded statistics.
            model.forward(super::pretrained::tokens(worker.device()));
            Restore::new().with_model("tied", &mut model).load(worker, &path)?;
            let valid = model.valid().norm.running_mean.value().into_data();
            assert_eq!(own(&model).as_bytes(), valid.as_bytes());
            Ok(own(&model))
        })
    };
    assert_eq!(restored(2), saved);
    let [first, second] = [&saved[0], &saved[1]].map(Clone::clone);
    assert_eq!(restored(3), [first.clone(), second, first]);
}

#[test]
fn full_states_and_files_hold_the_statistics_of_rank_0() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_path_buf();
    let ranks = on_ranks(2, move |worker| {
        let model = trained(worker)?;
        model.state().save_pretrained(&path, &SavePretrained::new())?;
        let full = model.state().full(Recipient::All)?;
        let mut other = sharded(worker, 2)?;
        other.state_mut().load_full(&full, Recipient::All)?;
        assert_eq!(own(&other).as_bytes(), full[MEAN].as_bytes());
        let mut other = sharded(worker, 2)?;
        other.state_mut().load_safetensors(&path, &LoadOptions::new())?;
        assert_eq!(own(&other).as_bytes(), full[MEAN].as_bytes());
        Ok((own(&model), full[MEAN].clone()))
    });
    for (_, full) in &ranks {
        assert_eq!(full.as_bytes(), ranks[0].0.as_bytes());
    }
}

/// PyTorch saves the number of batches too, which a load ignores.
#[test]
fn a_file_saved_by_pytorch_loads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let floats = |len: usize, first: f32| -> Vec<u8> {
        (0..len).flat_map(|at| (first + at as f32).to_le_bytes()).collect()
    };
    let write = |path: &Path, counter: &str| {
        let tensors = [
            ("norm.weight", floats(8, 1.0)),
            ("norm.bias", floats(8, 0.5)),
            (MEAN, floats(8, -3.0)),
            ("norm.running_var", floats(8, 2.0)),
            ("wte.weight", floats(13 * 8, 0.0)),
        ];
        let count = 7i64.to_le_bytes();
        let counter = (counter, TensorView::new(Dtype::I64, vec![], &count).unwrap());
        let views = tensors.iter().map(|(name, bytes)| {
            let shape = if *name == "wte.weight" { vec![13, 8] } else { vec![8] };
            (*name, TensorView::new(Dtype::F32, shape, bytes).unwrap())
        });
        safetensors::serialize_to_file(views.chain([counter]), None, path).unwrap();
    };
    write(&path, "norm.num_batches_tracked");
    let file = path.clone();
    let found = on_ranks(2, move |worker| {
        let mut model = sharded(worker, 2)?;
        let report = model.state_mut().load_safetensors(&file, &LoadOptions::new())?;
        assert_eq!(report.unexpected, ["norm.num_batches_tracked"]);
        Ok(own(&model))
    });
    assert_eq!(found[1].as_bytes(), floats(8, -3.0));
    // The number of batches of a norm that the model lacks is an unexpected tensor.
    write(&path, "other.num_batches_tracked");
    let errors = on_ranks(2, move |worker| {
        Ok(sharded(worker, 2)?
            .state_mut()
            .load_safetensors(&path, &LoadOptions::new())
            .unwrap_err()
            .to_string())
    });
    assert!(errors[0].contains("other.num_batches_tracked"), "{}", errors[0]);
}
