//! Burn's own records and files of sharded models, saved and loaded.

use std::path::Path;

use burn::module::{Lora, Module, ParamGroup};
use burn::nn::LinearConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor, Tolerance};
use fsdp_runtime::Error;
use fsdp_runtime::errors::LoadError;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::LoadOptions;

use super::initialisation::Counted;
use super::pretrained::{Tied, files, sharded, tied, tokens};
use crate::support::{self, Net, on_ranks};

#[test]
fn plain_burn_loads_the_record_of_a_sharded_model_and_a_sharded_model_loads_burns() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("net");
    let device = Device::flex();
    let data = |model: &Net| {
        let input = support::batch(0, 0..4, &device).0;
        model.forward(input).into_data()
    };
    let file = path.clone();
    let ranks = on_ranks(2, move |worker| {
        let net = sharded(worker)?;
        net.state().save_burnpack(&file)?;
        let device = worker.device().clone().inner();
        Ok((net.valid().forward(support::batch(0, 0..4, &device).0).into_data(), net.into_record()))
    });
    assert_eq!(files(folder.path()), ["net.bpk"]);
    let plain = Net::new(2, 0.0, &device).try_load_file(&path).unwrap();
    assert_eq!(data(&plain), ranks[0].0);
    for (_, record) in ranks {
        let plain = Net::new(2, 0.0, &device).try_load_record(record).unwrap();
        assert_eq!(data(&plain), data(&Net::new(2, 0.0, &device).try_load_file(&path).unwrap()));
    }

    // A sharded model loads the file of an unsharded one.
    let plain = Net::new(2, 0.0, &device);
    let expected = data(&plain);
    plain.save_file(folder.path().join("plain.bpk")).unwrap();
    for world in [1, 3] {
        let file = folder.path().join("plain");
        let ranks = on_ranks(world, move |worker| {
            let mut net = sharded(worker)?;
            let report = net.state_mut().load_burnpack(&file, &LoadOptions::new())?;
            assert_eq!((report.missing.len(), report.unexpected.len()), (0, 0));
            let device = worker.device().clone().inner();
            Ok(net.valid().forward(support::batch(0, 0..4, &device).0).into_data())
        });
        assert!(ranks.iter().all(|logits| *logits == expected));
    }
}

#[test]
fn a_record_holds_running_statistics_and_tied_places() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tied.bpk");
    let file = path.clone();
    let device = Device::flex();
    let ranks = on_ranks(2, move |worker| {
        let model = fully_shard(tied(worker.device()), worker, FsdpOptions::new().with_seed(1))?;
        // In training, `BatchNorm` updates its running mean.
        for _ in 0..3 {
            model.forward(tokens(worker.device()));
        }
        model.state().save_burnpack(&file)?;
        let mut other =
            fully_shard(tied(worker.device()), worker, FsdpOptions::new().with_seed(2))?;
        other.state_mut().load_burnpack(&file, &LoadOptions::new())?;
        let device = worker.device().clone().inner();
        let logits = |model: &Fsdp<Tied>| model.valid().forward(tokens(&device)).into_data();
        Ok((logits(&model), logits(&other)))
    });
    let plain = tied(&device).try_load_file(&path).unwrap();
    let expected = plain.valid().forward(tokens(&device)).into_data();
    let fresh = tied(&device).valid().forward(tokens(&device)).into_data();
    assert_ne!(expected, fresh);
    for (saved, loaded) in ranks {
        assert_eq!(saved, expected);
        assert_eq!(loaded, expected);
    }
}

/// Burn's own methods give a record of the full state. The second place of a tied weight has the
/// value of the first.
#[test]
fn a_record_of_a_group_holds_full_parameters() {
    let ranks = on_ranks(2, move |worker| {
        let options = FsdpOptions::new().with_seed(1);
        let model = fully_shard(tied(worker.device()), worker, options)?;
        let whole = model.clone().into_record();
        model.forward(tokens(worker.device()));
        let part = model.clone().into_record_group(ParamGroup::from_predicate("embed"));
        let again = model.clone().into_record();
        // A forward after a record gathers again.
        model.backward(model.forward(tokens(worker.device())).sum())?;
        Ok((whole, part, again, model.state().full(Recipient::All)?))
    });
    let device = Device::flex();
    for (whole, part, again, state) in ranks {
        for record in [whole, again] {
            let plain = tied(&device).try_load_record(record).unwrap();
            let embedding = plain.embedding();
            assert_eq!(embedding.as_bytes(), state["embed.weight"].as_bytes());
        }
        let plain = tied(&device).try_load_record(part.allow_partial(true)).unwrap();
        assert_eq!(plain.embedding().as_bytes(), state["embed.weight"].as_bytes());
    }
}

#[test]
fn a_record_that_does_not_fit_or_is_truncated_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("net.bpk");
    Net::new(3, 0.0, &Device::flex()).save_file(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let load = |path: &Path| {
        let path = path.to_path_buf();
        on_ranks(2, move |worker| {
            let mut net = sharded(worker)?;
            Ok(net.state_mut().load_burnpack(&path, &LoadOptions::new()).map(|_| ()))
        })
        .swap_remove(0)
        .unwrap_err()
    };
    let Error::Load(LoadError::Mismatch { unexpected, missing, .. }) = load(&path) else {
        panic!()
    };
    assert!(missing.is_empty() && unexpected.contains(&"blocks.2.up.weight".to_string()));
    for keep in [0, 9, 300, whole.len() - 1] {
        std::fs::write(&path, &whole[..keep]).unwrap();
        let error = load(&path);
        assert!(
            matches!(&error, Error::Load(LoadError::Format { .. } | LoadError::Io { .. })),
            "{keep}: {error}"
        );
        assert!(error.to_string().contains("net.bpk"), "{error}");
    }
    let error = load(&folder.path().join("none"));
    assert!(matches!(&error, Error::Load(LoadError::Io { .. })), "{error}");
}

#[test]
fn plain_burn_loads_a_record_with_lora_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapted.bpk");
    let build = |device: &Device| {
        let linear = || LinearConfig::new(16, 24).init(device);
        Counted { body: linear(), head: linear() }.apply_lora(Lora::new(2, 4.0))
    };
    let file = path.clone();
    let ranks = on_ranks(2, move |worker| {
        let device = worker.device();
        let mut model = fully_shard(build(device), worker, FsdpOptions::new())?;
        let mut optimizer = AdamWConfig::new().init();
        // A factor of an adapter starts at zero, and changes with training.
        for _ in 0..3 {
            let loss = model.forward(Tensor::ones([2, 16], device)).powf_scalar(2.0).mean();
            let gradients = model.backward(loss)?;
            model = optimizer.step(1e-1, model, gradients);
        }
        model.state().save_burnpack(&file)?;
        Ok(model.forward(Tensor::ones([2, 16], device)).into_data())
    });
    let device = Device::flex();
    let plain = build(&device).try_load_file(&path).unwrap();
    let logits = plain.forward(Tensor::ones([2, 16], &device)).into_data();
    logits.assert_approx_eq::<f32>(&ranks[0], Tolerance::default());
}
