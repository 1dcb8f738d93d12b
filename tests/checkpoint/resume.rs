//! A run that stops, saves and resumes in a new launch has the results of a run that did not stop.

use std::path::Path;

use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdafactorConfig, AdamWConfig, ModuleOptimizer, SgdConfig};
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Manifest, Restore, list};
use fsdp_runtime::errors::CheckpointError;
use fsdp_runtime::optim::AdadeltaConfig;
use fsdp_runtime::optim::GradScalerConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, unit_types};

use crate::support::checkpoint::{Part, optimizer, resumed, schedule, sharded, train_step};
use crate::support::compare::{Within, assert_close, assert_same_bits, assert_same_state};
use crate::support::{self, batch, of_rank_0, on_ranks};

/// The rounding of losses where gradients are summed in another order.
const ROUNDING: Within = Within::Absolute(1e-6);

#[test]
fn the_same_world_resumes_bit_for_bit_with_dropout() {
    for world in [1, 2, 3] {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
            let part = Part::new(world).dropout(0.1).with_strategy(strategy);
            let (losses, state) = part.clone().until(20).launch();
            let (found, found_state) = resumed(part.clone().until(10), part.until(20));
            let what = format!("{strategy} on {world} ranks");
            assert_same_bits(&found, &losses, &what);
            assert_same_state(&found_state, &state, &what);
        }
    }
}

#[test]
fn the_state_of_adadelta_resumes_bit_for_bit_and_on_another_number_of_ranks() {
    let part = |world| Part::new(world).optimizer(|| AdadeltaConfig::new().init());
    let (losses, state) = part(2).until(20).launch();
    let (found, found_state) = resumed(part(2).until(10), part(2).until(20));
    assert_same_bits(&found, &losses, "adadelta");
    assert_same_state(&found_state, &state, "adadelta");
    let (found, _) = resumed(part(2).until(10), part(3).until(20));
    assert_close(&found, &losses, ROUNDING, "from 2 ranks to 3");
}

#[test]
fn a_world_of_another_size_resumes_a_run() {
    for (from, to) in [(4, 2), (2, 3), (3, 1), (1, 4)] {
        let (losses, _) = Part::new(from).until(20).launch();
        let (found, _) = resumed(Part::new(from).until(10), Part::new(to).until(20));
        assert_close(&found, &losses, ROUNDING, format_args!("{from} to {to}"));
    }
}

#[test]
fn runs_resume_under_other_strategies_and_worlds() {
    use ShardingStrategy::{FullShard, HybridShard, HybridShardZero2, NoShard, ShardGradOp};
    let part = |world: usize, strategy| {
        let options = FsdpOptions::new().with_seed(7).with_strategy(strategy);
        let grouped = if strategy.is_hybrid() { options.with_shard_size(2) } else { options };
        Part::new(world).options(grouped)
    };
    let (losses, _) = part(4, FullShard).until(12).launch();
    for (first, second) in [
        (part(4, FullShard), part(4, HybridShard)),
        (part(4, HybridShard), part(4, NoShard)),
        (part(4, HybridShardZero2), part(2, FullShard)),
        (part(2, NoShard), part(4, HybridShard)),
        (part(3, ShardGradOp), part(4, HybridShard)),
    ] {
        let (found, _) = resumed(first.clone().until(6), second.clone().until(12));
        assert_close(&found, &losses, ROUNDING, format_args!("{first:?} {second:?}"));
    }
    // Replicas hold the same shards, of which each writes a part.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hybrid");
    part(4, HybridShard).until(1).save(&path).launch();
    let text = std::fs::read(path.join("manifest.json")).unwrap();
    let manifest = Manifest::parse(&text, "manifest.json").unwrap();
    assert_eq!((manifest.models["net"].mesh.replicate, manifest.models["net"].mesh.shard), (2, 2));
    let largest = manifest.files.iter().max().unwrap();
    let smallest = manifest.files.iter().min().unwrap();
    assert!(*smallest * 2 > *largest, "{:?}", manifest.files);
}

#[test]
fn runs_resume_under_other_strategies_and_wrappings() {
    let full = FsdpOptions::new();
    let variants = [
        full.clone(),
        full.clone().with_strategy(ShardingStrategy::NoShard),
        full.clone().with_wrap(WrapPolicy::TransformerBased(unit_types![support::Block])),
        full.clone().with_strategy(ShardingStrategy::HybridShard).with_shard_size(1),
        full.clone().with_strategy(ShardingStrategy::ShardGradOp),
        full.clone().with_persist_below(1000),
        full.with_gather_buffers(1),
    ];
    let part =
        |options: &FsdpOptions| Part::new(2).dropout(0.1).options(options.clone().with_seed(7));
    let (losses, state) = part(&variants[0]).until(6).launch();
    for first in &variants {
        for second in &variants {
            let (found, found_state) = resumed(part(first).until(3), part(second).until(6));
            // Layers of dropout keep their paths, so that masks are the same, and only sums are
            // rounded differently.
            assert_close(&found, &losses, ROUNDING, format_args!("{first:?} {second:?}"));
            assert!(found_state.keys().eq(state.keys()), "{first:?} {second:?}");
        }
    }
    // `FULL_SHARD` and `NO_SHARD` agree in every bit.
    let (found, found_state) = resumed(part(&variants[0]).until(3), part(&variants[1]).until(6));
    assert_same_bits(&found, &losses, "losses");
    assert_same_state(&found_state, &state, "parameters");
}

#[test]
fn one_checkpoint_holds_several_models_and_optimizers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("both");
    let saved = path.clone();
    let run = |worker: &Worker, steps: usize, from: Option<&Path>, to: Option<&Path>| {
        let mut a = sharded(worker, 0.1, FsdpOptions::new().with_seed(1))?;
        let mut b = sharded(worker, 0.0, FsdpOptions::new().with_seed(2))?;
        let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        let (mut first, mut second): (_, ModuleOptimizer) = (optimizer(), momentum.init());
        let (mut rate_a, mut rate_b) = (schedule(), schedule());
        let mut values = Default::default();
        // A scaler that has stepped, with a scale that decimal text would round.
        let config = GradScalerConfig::new().with_init_scale(1e30 / 3.0).with_growth_interval(7);
        let mut used = config.init().expect("a sound scaler");
        let grads = a.backward(a.forward(batch(0, 0..2, worker.device()).0).mean())?;
        let Unscaled::Finite(_) = used.unscale(&a, grads)? else { panic!("no overflow") };
        let mut scaler = GradScaler::new();
        if let Some(path) = from {
            let restored = Restore::new()
                .with_optimizer("first", &mut first)
                .with_optimizer("second", &mut second)
                .with_model("a", &mut a)
                .with_model("b", &mut b)
                .with_scheduler("a", &mut rate_a)
                .with_scheduler("b", &mut rate_b)
                .with_grad_scaler("scaler", &mut scaler)
                .load(worker, path)?;
            assert_eq!(restored.progress.loss_scale, Some(scaler.loss_scale()));
            assert_eq!(scaler, used);
            assert_eq!((restored.progress.epoch, restored.progress.position), (3, 17));
            values = restored.values;
        }
        let mut losses = Vec::new();
        for step in 0..steps {
            losses.push(train_step(worker, &mut a, &mut first, &mut rate_a, step)?);
            losses.push(train_step(worker, &mut b, &mut second, &mut rate_b, step)?);
        }
        if let Some(path) = to {
            Checkpoint::new(steps as u64)
                .with_data_position(3, 17)
                .with_value("note", "kept")
                .with_model("a", &a)
                .with_model("b", &b)
                .with_optimizer("first", &first)
                .with_optimizer("second", &second)
                .with_scheduler("a", &rate_a)
                .with_scheduler("b", &rate_b)
                .with_grad_scaler("scaler", &used)
                .save(worker, path)?;
            for step in 0..3 {
                losses.push(train_step(worker, &mut a, &mut first, &mut rate_a, step)?);
                losses.push(train_step(worker, &mut b, &mut second, &mut rate_b, step)?);
            }
        }
        Ok::<_, Error>((losses, values))
    };
    let (losses, _) = of_rank_0(2, move |worker| run(worker, 4, None, Some(&saved)));
    let (found, values) = of_rank_0(2, move |worker| run(worker, 3, Some(&path), None));
    assert_same_bits(&found, &losses[8..], "losses");
    assert_eq!(values["note"], "kept");
}

#[test]
fn a_model_alone_is_saved_and_loaded_by_its_own_methods() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    let saved = path.clone();
    let state = on_ranks(3, move |worker| {
        let net = sharded(worker, 0.0, FsdpOptions::new().with_seed(5))?;
        net.state().save(&saved)?;
        net.state().full(Recipient::All)
    });
    let loaded = on_ranks(2, move |worker| {
        let mut net = sharded(worker, 0.0, FsdpOptions::new().with_seed(6))?;
        assert_eq!(net.state_mut().load(&path)?.world_size, 3);
        net.state().full(Recipient::All)
    });
    assert_same_state(&loaded[1], &state[0], "loaded");
}

/// With `deferred_init` no rank initialises the parameters that a checkpoint holds.
#[test]
fn a_deferred_model_resumes_from_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let part = Part::new(2);
    let (losses, state) = part.clone().until(8).launch();
    part.clone().until(4).save(&path).launch();
    let deferred = part.options(FsdpOptions::new().with_deferred_init(true));
    let (found, found_state) = deferred.clone().from(&path).until(8).launch();
    assert_same_bits(&found, &losses[4..], "losses");
    assert_same_state(&found_state, &state, "parameters");
    // 12 ranks, some of which have no shard of some matrices.
    let many = Part { world: 12, ..deferred };
    let (found, _) = many.from(&path).until(8).launch();
    assert_close(&found, &losses[4..], ROUNDING, "12 ranks");
    // State dicts load a deferred model as well. One that does not fit leaves it unloaded.
    on_ranks(2, move |worker| {
        let deferred = || FsdpOptions::new().with_deferred_init(true);
        let saved = sharded(worker, 0.0, FsdpOptions::new().with_seed(7))?;
        let full = saved.state().full(Recipient::All)?;
        let mut nets = Vec::new();
        for _ in 0..3 {
            nets.push(sharded(worker, 0.0, deferred())?);
        }
        nets[0].state_mut().load_sharded(&saved.state().sharded())?;
        nets[1].state_mut().load_local(&saved.state().local())?;
        nets[2].state_mut().load_full(&full, Recipient::All)?;
        for net in &nets {
            assert_same_state(&net.state().full(Recipient::All)?, &full, "loaded");
        }
        let mut net = sharded(worker, 0.0, deferred())?;
        net.state_mut().load_full(&Default::default(), Recipient::All).unwrap_err();
        let error = net.state().full(Recipient::All).unwrap_err();
        assert!(error.to_string().contains("load"), "{error}");
        Ok(())
    });
}

#[test]
fn an_error_on_one_rank_is_one_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_path_buf();
    for background in [false, true] {
        let root = root.clone();
        let errors = on_ranks(3, move |worker| {
            let net = sharded(worker, 0.0, FsdpOptions::new())?;
            let mut manager = CheckpointManager::new(&root, worker).with_background(background);
            // On rank 1, the optimizer of another model.
            let mut other = sharded(worker, 0.0, FsdpOptions::new())?;
            let (mut optimizer, mut schedule) = (optimizer(), schedule());
            train_step(worker, &mut other, &mut optimizer, &mut schedule, 0)?;
            let fresh = support::checkpoint::optimizer();
            let used = if worker.rank().index() == 1 { &optimizer } else { &fresh };
            let checkpoint =
                Checkpoint::new(1).with_model("net", &net).with_optimizer("adamw", used);
            let error = manager.save(&checkpoint).and_then(|_| manager.finish()).unwrap_err();
            // The process group is still whole.
            manager.save(&Checkpoint::new(2).with_model("net", &net))?;
            manager.finish()?;
            Ok(error)
        });
        assert!(
            matches!(&errors[1], Error::Checkpoint(CheckpointError::ForeignState { count, .. }) if *count > 5),
            "{:?}",
            errors[1]
        );
        for rank in [0, 2] {
            assert!(errors[rank].to_string().starts_with("rank 1 failed: "), "{}", errors[rank]);
        }
        assert!(list(folder.path()).unwrap().torn.is_empty());
    }
}

#[test]
fn ranks_must_save_the_same_things() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_path_buf();
    let errors = on_ranks(2, move |worker| {
        let net = sharded(worker, 0.0, FsdpOptions::new())?;
        let step = 5 + worker.rank().index() as u64;
        Ok(Checkpoint::new(step).with_model("net", &net).save(worker, root.join("a")).unwrap_err())
    });
    for error in errors {
        let Error::Checkpoint(CheckpointError::RanksDiffer { rank, expected, found }) = error
        else {
            panic!("{error}")
        };
        assert_eq!(rank.index(), 1);
        assert!(expected.contains("step 5") && found.contains("step 6"));
    }
}

#[test]
fn every_difference_is_listed_and_a_failed_load_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    Part::new(2).until(2).save(&path).launch();
    on_ranks(2, move |worker| {
        let device = worker.device();
        let wider = support::Net::new(3, 0.0, device);
        let mut net = fully_shard(wider, worker, FsdpOptions::new().with_seed(3))?;
        let before = net.state().full(Recipient::All)?;
        let mut sgd = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
        let mut rate = burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler::new(0.1);
        let error = Restore::new()
            .with_model("net", &mut net)
            .with_optimizer("adamw", &mut sgd)
            .with_scheduler("rate", &mut rate)
            .with_grad_scaler("scaler", &mut GradScaler::new())
            .load(worker, &path)
            .unwrap_err();
        let Error::Checkpoint(CheckpointError::Mismatch { differences, .. }) = &error else {
            panic!("{error}")
        };
        let has = |text: &str| differences.iter().any(|line| line.contains(text));
        assert!(has("missing: `blocks.2.up.weight`") && has("missing: `blocks.2.norm.gamma`"));
        assert!(
            has("optimizer `adamw`: it has no `momentum.moment_1` for `head.weight`"),
            "{error}"
        );
        assert!(has("scheduler `rate`"), "{error}");
        assert!(has("loss scaler `scaler`: it is missing"), "{error}");
        assert_same_state(&net.state().full(Recipient::All)?, &before, "after a failed load");
        // AdamW needs state that a checkpoint of SGD does not hold.
        let mut small = sharded(worker, 0.0, FsdpOptions::new())?;
        train_step(worker, &mut small, &mut sgd, &mut schedule(), 0)?;
        let of_sgd = path.with_file_name("sgd");
        Checkpoint::new(1)
            .with_model("net", &small)
            .with_optimizer("adamw", &sgd)
            .save(worker, &of_sgd)?;
        let error = Restore::new()
            .with_model("net", &mut small)
            .with_optimizer("adamw", &mut optimizer())
            .load(worker, &of_sgd)
            .unwrap_err();
        let expected = "optimizer `adamw`: its state of `head.weight` is of another kind";
        assert!(error.to_string().contains(expected), "{error}");
        // A name that the checkpoint does not have.
        let error = Restore::new().with_model("other", &mut net).load(worker, &path).unwrap_err();
        assert!(error.to_string().contains("missing: model `other`"), "{error}");
        Ok(())
    });
}

#[test]
fn optimizers_of_other_kinds_keep_their_state() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_path_buf();
    fn kinds() -> Vec<(&'static str, ModuleOptimizer, ShardingStrategy)> {
        let full = ShardingStrategy::FullShard;
        vec![
            ("sgd", SgdConfig::new().init(), full),
            ("amsgrad", AdamWConfig::new().with_amsgrad(true).init(), full),
            ("adafactor", AdafactorConfig::new().init(), ShardingStrategy::NoShard),
        ]
    }
    for index in 0..kinds().len() {
        let folder = folder.clone();
        on_ranks(2, move |worker| {
            let (name, mut own, strategy) = kinds().swap_remove(index);
            let options = FsdpOptions::new().with_seed(4).with_strategy(strategy);
            let mut net = sharded(worker, 0.0, options.clone())?;
            let mut rate = schedule();
            train_step(worker, &mut net, &mut own, &mut rate, 0)?;
            train_step(worker, &mut net, &mut own, &mut rate, 1)?;
            let path = folder.join(name);
            Checkpoint::new(2)
                .with_model("net", &net)
                .with_optimizer("own", &own)
                .save(worker, &path)?;
            let mut again = sharded(worker, 0.0, options)?;
            let mut loaded = kinds().swap_remove(index).1;
            Restore::new()
                .with_model("net", &mut again)
                .with_optimizer("own", &mut loaded)
                .load(worker, &path)?;
            let mut other_rate = schedule();
            other_rate.step();
            other_rate.step();
            for step in 2..5 {
                let expected = train_step(worker, &mut net, &mut own, &mut rate, step)?;
                let found = train_step(worker, &mut again, &mut loaded, &mut other_rate, step)?;
                assert_eq!(found.to_bits(), expected.to_bits(), "{name}, step {step}");
            }
            Ok(())
        });
    }
    // Factored moments of a shard cannot be resharded.
    on_ranks(2, move |worker| {
        let mut net = sharded(worker, 0.0, FsdpOptions::new().with_optimizer_check(false))?;
        let mut own = AdafactorConfig::new().init();
        train_step(worker, &mut net, &mut own, &mut schedule(), 0)?;
        let checkpoint = Checkpoint::new(1).with_model("net", &net).with_optimizer("own", &own);
        let error = checkpoint.save(worker, folder.join("factored")).unwrap_err();
        assert!(
            matches!(&error, Error::Checkpoint(CheckpointError::NotElementwise { .. })),
            "{error}"
        );
        assert!(!folder.join("factored").exists());
        Ok(())
    });
}

#[test]
fn the_manifest_describes_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    Part::new(3).until(2).save(&path).launch();
    let text = std::fs::read(path.join("manifest.json")).unwrap();
    let manifest = Manifest::parse(&text, "manifest.json").unwrap();
    let net = &manifest.models["net"];
    assert_eq!((manifest.world_size, net.mesh.shard, manifest.progress.step), (3, 3, 2));
    assert_eq!(net.strategy, "FULL_SHARD");
    assert_eq!(
        net.units.iter().map(|unit| unit.path.as_str()).collect::<Vec<_>>(),
        ["", "embed", "blocks.0", "blocks.1"]
    );
    assert_eq!(net.random.len(), 3);
    let word = &net.tensors["embed.word.weight"];
    assert_eq!(word.shape, [support::VOCABULARY, support::WIDTH]);
    assert!(word.pieces.len() > 1);
    let state = &manifest.optimizers["adamw"].models["net"]["embed.word.weight"];
    assert_eq!(state.scalars["momentum.time"], fsdp_runtime::checkpoint::Scalar::UInt(2));
    assert_eq!(state.tensors["momentum.moment_1"].shape, word.shape);
    // Every rank's file is a safetensors file.
    for rank in 0..3 {
        let bytes = std::fs::read(path.join(format!("rank-{rank:05}.safetensors"))).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert!(file.names().iter().any(|name| name.starts_with("model/net/")));
    }
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 4);
}
