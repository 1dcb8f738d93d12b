//! Checkpoints: a run that stops and goes on in a new launch is the run that did not stop.

use std::path::Path;

use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdafactorConfig, AdamWConfig, ModuleOptimizer, SgdConfig};
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Manifest, Restore, list};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{CheckpointError, Error, GradScalerConfig, unit_types};

use crate::support::checkpoint::{
    Part, bits, optimizer, resumed, same_bits, schedule, sharded, train_step,
};
use crate::support::{self, batch, on};

#[test]
fn the_same_world_resumes_bit_for_bit_with_dropout() {
    for world in [1, 2, 3] {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
            let part = Part::new(world).dropout(0.1).with_strategy(strategy);
            let (losses, state) = part.clone().until(20).launch();
            let (found, found_state) = resumed(part.clone().until(10), part.until(20));
            assert_eq!(bits(&found), bits(&losses), "{world} {strategy}");
            assert!(same_bits(&found_state, &state), "{world} {strategy}");
        }
    }
}

#[test]
fn another_world_goes_on_where_the_first_stopped() {
    for (from, to) in [(4, 2), (2, 3), (3, 1), (1, 4)] {
        let (losses, _) = Part::new(from).until(20).launch();
        let (found, _) = resumed(Part::new(from).until(10), Part::new(to).until(20));
        assert_eq!(found.len(), losses.len());
        for (a, b) in found.iter().zip(&losses) {
            assert!((a - b).abs() <= 1e-6, "{from} to {to}: {found:?} {losses:?}");
        }
    }
}

#[test]
fn full_shard_goes_to_hybrid_and_to_no_shard() {
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
        for (a, b) in found.iter().zip(&losses) {
            assert!((a - b).abs() <= 1e-6, "{first:?} {second:?}: {found:?} {losses:?}");
        }
    }
    // Copies of one group hold the same, and each writes a part of it.
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
fn strategies_and_wrappings_load_each_others() {
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
    let (losses, state) = part(&variants[0]).until(12).launch();
    for first in &variants {
        for second in &variants {
            let (found, found_state) = resumed(part(first).until(6), part(second).until(12));
            // Dropout's layers keep their paths, so all but the sums' order is the same.
            for (a, b) in found.iter().zip(&losses) {
                assert!((a - b).abs() <= 1e-6, "{first:?} {second:?}: {found:?} {losses:?}");
            }
            assert_eq!(found_state.len(), state.len());
        }
    }
    // These agree in every bit.
    let (found, found_state) = resumed(part(&variants[0]).until(6), part(&variants[1]).until(12));
    assert_eq!(bits(&found), bits(&losses));
    assert!(same_bits(&found_state, &state));
}

#[test]
fn several_models_and_optimizers_lie_in_one_folder() {
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
        // One that has stepped, with a scale that JSON would not hold to the last bit.
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
    let (losses, _) = on(2, move |worker| run(worker, 4, None, Some(&saved))).swap_remove(0);
    let (found, values) = on(2, move |worker| run(worker, 3, Some(&path), None)).swap_remove(0);
    assert_eq!(bits(&found), bits(&losses[8..]));
    assert_eq!(values["note"], "kept");
}

#[test]
fn a_model_alone_is_saved_and_loaded_by_its_own_methods() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    let saved = path.clone();
    let state = on(3, move |worker| {
        let net = sharded(worker, 0.0, FsdpOptions::new().with_seed(5))?;
        net.state().save(&saved)?;
        net.state().full(Recipient::All)
    });
    let loaded = on(2, move |worker| {
        let mut net = sharded(worker, 0.0, FsdpOptions::new().with_seed(6))?;
        assert_eq!(net.state_mut().load(&path)?.world_size, 3);
        net.state().full(Recipient::All)
    });
    assert!(same_bits(&state[0], &loaded[1]));
}

/// No rank initialises what a checkpoint brings.
#[test]
fn a_model_whose_start_was_deferred_trains_on_from_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let part = Part::new(2);
    let (losses, state) = part.clone().until(8).launch();
    part.clone().until(4).save(&path).launch();
    let deferred = part.options(FsdpOptions::new().with_deferred_init(true));
    let (found, found_state) = deferred.clone().from(&path).until(8).launch();
    assert_eq!(bits(&found), bits(&losses[4..]));
    assert!(same_bits(&found_state, &state));
    // Ranks that hold nothing of some matrices.
    let many = Part { world: 12, ..deferred };
    let (found, _) = many.from(&path).until(8).launch();
    for (a, b) in found.iter().zip(&losses[4..]) {
        assert!((a - b).abs() <= 1e-6, "{found:?} {losses:?}");
    }
    // States in memory count as loaded as well, and one that does not fit does not.
    on(2, move |worker| {
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
            assert!(same_bits(&net.state().full(Recipient::All)?, &full));
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
        let errors = on(3, move |worker| {
            let net = sharded(worker, 0.0, FsdpOptions::new())?;
            let mut manager = CheckpointManager::new(&root, worker).with_background(background);
            // An optimizer that stepped another model, on one rank.
            let mut other = sharded(worker, 0.0, FsdpOptions::new())?;
            let (mut optimizer, mut schedule) = (optimizer(), schedule());
            train_step(worker, &mut other, &mut optimizer, &mut schedule, 0)?;
            let fresh = support::checkpoint::optimizer();
            let used = if worker.rank().index() == 1 { &optimizer } else { &fresh };
            let checkpoint =
                Checkpoint::new(1).with_model("net", &net).with_optimizer("adamw", used);
            let error = manager.save(&checkpoint).and_then(|_| manager.finish()).unwrap_err();
            // The group is still good.
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
    let errors = on(2, move |worker| {
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
fn every_difference_is_listed_and_nothing_changes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    Part::new(2).until(2).save(&path).launch();
    on(2, move |worker| {
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
        assert!(same_bits(&before, &net.state().full(Recipient::All)?));
        // The other way round: AdamW needs what this one has not.
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
        on(2, move |worker| {
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
    // Factored moments of a shard mean nothing elsewhere.
    on(2, move |worker| {
        let mut net = sharded(worker, 0.0, FsdpOptions::new())?;
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
fn the_manifest_says_what_lies_where() {
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
