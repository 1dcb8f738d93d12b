//! Loads and saves of a part of a model's weights, and loads into a model that has changed.

use std::path::Path;

use burn::optim::AdamWConfig;
use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Restore};
use fsdp_runtime::errors::{CheckpointError, LoadError, SaveError};
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, SavePretrained, from_pretrained};
use fsdp_runtime::state::{FullState, LoadReport, ParamFilter};

use super::pretrained::{read, save, sharded};
use crate::support::compare::assert_same_state;
use crate::support::{Net, batch, loss, of_rank_0, on_ranks};

/// Returns a model of another seed than that of [`save`].
fn other(worker: &Worker, blocks: usize) -> Result<Fsdp<Net>, Error> {
    let net = Net::new(blocks, 0.0, worker.device());
    fully_shard(net, worker, FsdpOptions::new().with_seed(99))
}

/// Loads a file into a model of another seed. Returns its state before and after, and the report.
fn load(
    world: usize,
    path: &Path,
    options: LoadOptions,
    blocks: usize,
) -> (FullState, Result<(FullState, LoadReport), Error>) {
    let path = path.to_path_buf();
    of_rank_0(world, move |worker| {
        let mut net = other(worker, blocks)?;
        let before = net.state().full(Recipient::All)?;
        let loaded = net.state_mut().load_safetensors(&path, &options);
        let after = net.state().full(Recipient::All)?;
        Ok((before, loaded.map(|report| (after, report))))
    })
}

/// Asserts which values a state has from the file, and which from before.
#[track_caller]
pub(super) fn assert_loaded(
    after: &FullState,
    before: &FullState,
    file: &FullState,
    is_loaded: impl Fn(&str) -> bool,
) {
    let mut counts = [0, 0];
    for (name, value) in after.iter() {
        let loaded = is_loaded(name);
        counts[usize::from(loaded)] += 1;
        let expected = if loaded { &file[name.as_str()] } else { &before[name.as_str()] };
        assert!(value == expected, "{name}, loaded: {loaded}");
    }
    assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
}

#[test]
fn a_submodule_is_loaded_and_the_rest_keeps_its_values() {
    let folder = tempfile::tempdir().unwrap();
    let file = save(2, folder.path(), &SavePretrained::new());
    for world in [1, 3] {
        let filter = ParamFilter::new().with_submodule("blocks").without_submodule("blocks.0.up");
        let options = LoadOptions::new().with_filter(filter);
        let (before, loaded) = load(world, folder.path(), options, 2);
        let (after, report) = loaded.unwrap();
        let inside = |name: &str| name.starts_with("blocks.") && !name.starts_with("blocks.0.up.");
        assert_loaded(&after, &before, &file, inside);
        assert!(report.filtered.contains(&"blocks.0.up.weight".to_string()), "{report:?}");
        assert!(report.filtered.contains(&"embed.norm.weight".to_string()), "{report:?}");
        assert_eq!(report.loaded + report.filtered.len(), file.len());
        assert!(report.missing.is_empty() && report.unexpected.is_empty());
    }
    let wrong = |filter| load(2, folder.path(), LoadOptions::new().with_filter(filter), 2).1;
    let error = wrong(ParamFilter::new().with_submodule("block")).unwrap_err();
    assert!(matches!(&error, Error::Load(LoadError::Filter { .. })), "{error}");
    assert!(error.to_string().contains("`block`"), "{error}");
    let error = wrong(ParamFilter::new().with_adapters_only()).unwrap_err();
    assert!(error.to_string().contains("no parameter"), "{error}");
}

#[test]
fn a_filtered_file_has_the_selected_parameters_only() {
    let folder = tempfile::tempdir().unwrap();
    let filter = ParamFilter::new().with_submodule("head");
    let file = save(2, folder.path(), &SavePretrained::new().with_filter(filter.clone()));
    let names: Vec<_> = read(&folder.path().join("model.safetensors")).into_keys().collect();
    assert_eq!(names, ["head.bias", "head.weight"]);
    let (before, loaded) = load(3, folder.path(), LoadOptions::new().with_filter(filter), 2);
    let (after, _) = loaded.unwrap();
    assert_loaded(&after, &before, &file, |name| name.starts_with("head."));

    let path = folder.path().to_path_buf();
    let errors = on_ranks(2, move |worker| {
        let net = sharded(worker)?;
        let filter = ParamFilter::new().with_submodule("tail");
        let options = SavePretrained::new().with_filter(filter);
        Ok(net.state().save_pretrained(&path, &options).unwrap_err())
    });
    for error in errors {
        assert!(matches!(&error, Error::Save(SaveError::Filter { .. })), "{error}");
    }
}

#[test]
fn adapters_and_trainable_parameters_are_saved_and_loaded_without_the_frozen_base() {
    let folder = tempfile::tempdir().unwrap();
    for (name, filter, count) in [
        ("adapters", ParamFilter::new().with_adapters_only(), 4),
        ("trainable", ParamFilter::new().with_trainable_only(), 6),
    ] {
        let path = folder.path().join(name);
        let file = path.join("model.safetensors");
        let results = on_ranks(2, move |worker| {
            let lora =
                LoraConfig::new(2).with_target_modules(["up"]).with_modules_to_save(["head"]);
            let model = |seed| {
                let net = lora.apply(Net::new(2, 0.0, worker.device()))?;
                fully_shard(net, worker, FsdpOptions::new().with_seed(seed))
            };
            let mut net = model(3)?;
            let mut optimizer = AdamWConfig::new().init();
            for step in 0..2 {
                let (tokens, labels) = batch(step, 0..4, worker.device());
                let gradients = net.backward(loss(net.forward(tokens), labels))?;
                net = optimizer.step(1e-1, net, gradients);
            }
            let options = SavePretrained::new().with_filter(filter.clone());
            net.state().save_pretrained(&path, &options)?;
            let mut other = model(99)?;
            let before = other.state().full(Recipient::All)?;
            let options = LoadOptions::new().with_filter(filter.clone());
            let report = other.state_mut().load_safetensors(&path, &options)?;
            let saved = net.state().full(Recipient::All)?;
            // Frozen parameters cannot be left out of a model that is built from the file.
            let built = from_pretrained(
                lora.apply(Net::new(2, 0.0, worker.device()))?,
                worker,
                FsdpOptions::new(),
                &path,
                &options,
            );
            Ok((saved, before, other.state().full(Recipient::All)?, report, built.err()))
        });
        let names = read(&file).into_keys().collect::<Vec<_>>();
        assert_eq!(names.len(), count, "{names:?}");
        for (saved, before, after, report, built) in results {
            assert_eq!(report.loaded, count);
            let is_loaded =
                |path: &str| path.contains(".lora.") || (count == 6 && path.starts_with("head."));
            assert_loaded(&after, &before, &saved, is_loaded);
            let refused = matches!(&built, Some(Error::Load(LoadError::Filter { .. })));
            assert_eq!(refused, count == 6, "{built:?}");
        }
    }
}

#[test]
fn without_strict_everything_that_fits_is_loaded_and_the_rest_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    let file = save(2, folder.path(), &SavePretrained::new());
    // A model with a third block, and a file with a head of another shape and one more tensor.
    let path = folder.path().join("model.safetensors");
    let mut tensors = read(&path);
    let (dtype, _, bytes) = tensors.remove("head.bias").unwrap();
    let bias = (dtype, vec![1, bytes.len() / 4], bytes);
    tensors.insert("head.bias".into(), bias.clone());
    tensors.insert("extra".into(), bias);
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();

    let (_, strict) = load(2, &path, LoadOptions::new(), 3);
    let Error::Load(LoadError::Mismatch { missing, unexpected, misshapen, .. }) =
        strict.unwrap_err()
    else {
        panic!("no mismatch")
    };
    assert!(missing.len() > 3 && missing.iter().all(|name| name.starts_with("blocks.2.")));
    assert_eq!(unexpected, ["extra"]);
    assert_eq!(misshapen.len(), 1);
    for world in [1, 2, 3] {
        let (before, loaded) = load(world, &path, LoadOptions::new().with_strict(false), 3);
        let (after, report) = loaded.unwrap();
        assert_loaded(&after, &before, &file, |name| {
            !name.starts_with("blocks.2.") && name != "head.bias"
        });
        assert_eq!(report.missing, missing);
        assert_eq!(report.unexpected, unexpected);
        assert_eq!(report.misshapen, misshapen);
        assert!(misshapen[0].contains("head.bias: [1, "), "{misshapen:?}");
    }
}

#[test]
fn a_checkpoint_is_imported_into_a_changed_model_with_its_optimizer_state() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_path_buf();
    let saved = of_rank_0(2, {
        let root = root.clone();
        move |worker| {
            let mut net = sharded(worker)?;
            let mut optimizer = AdamWConfig::new().init();
            let (tokens, labels) = batch(0, 0..4, worker.device());
            let gradients = net.backward(loss(net.forward(tokens), labels))?;
            net = optimizer.step(1e-2, net, gradients);
            let checkpoint =
                Checkpoint::new(1).with_model("net", &net).with_optimizer("adamw", &optimizer);
            CheckpointManager::new(&root, worker).save(&checkpoint)?;
            let state = net.state().full(Recipient::All)?;
            Ok((state, net.state().full_optimizer(&optimizer, Recipient::All)?))
        }
    });
    let (file, state_of_optimizer) = saved;
    for world in [1, 3] {
        let root = root.clone();
        let (before, after, left, optimizer, strict) = of_rank_0(world, move |worker| {
            // One block more than the checkpoint has.
            let mut net = other(worker, 3)?;
            let mut optimizer = AdamWConfig::new().init();
            let before = net.state().full(Recipient::All)?;
            let newest = CheckpointManager::new(&root, worker).latest()?.expect("a checkpoint");
            let strict = Restore::new().with_model("net", &mut net).load(worker, &newest);
            let restore = Restore::new().with_strict(false).with_model("net", &mut net);
            let restored = restore.with_optimizer("adamw", &mut optimizer).load(worker, &newest)?;
            let after = net.state().full(Recipient::All)?;
            let optimizer = net.state().full_optimizer(&optimizer, Recipient::All)?;
            Ok((before, after, restored.left, optimizer, strict.err()))
        });
        let strict = strict.expect("the model differs");
        let Error::Checkpoint(CheckpointError::Mismatch { differences, .. }) = &strict else {
            panic!("{strict}")
        };
        assert_eq!(left, *differences);
        assert!(left.len() > 3 && left.iter().all(|text| text.contains("missing: `blocks.2.")));
        assert_loaded(&after, &before, &file, |name| !name.starts_with("blocks.2."));
        assert_eq!(optimizer, state_of_optimizer);
    }
    // A model that the checkpoint lacks stays an error.
    let error = of_rank_0(2, move |worker| {
        let mut net = other(worker, 2)?;
        let newest = CheckpointManager::new(&root, worker).latest()?.expect("a checkpoint");
        let restore = Restore::new().with_strict(false).with_model("another", &mut net);
        Ok(restore.load(worker, &newest).unwrap_err())
    });
    assert!(error.to_string().contains("missing: model `another`"), "{error}");
}

#[test]
fn a_filter_that_selects_everything_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = save(2, folder.path(), &SavePretrained::new().with_filter(ParamFilter::new()));
    let filter = ParamFilter::new().with_submodule("embed").with_submodule("blocks");
    let filter = filter.with_submodule("head");
    let (_, loaded) = load(2, folder.path(), LoadOptions::new().with_filter(filter), 2);
    assert_same_state(&loaded.unwrap().0, &file, "loaded");
}
