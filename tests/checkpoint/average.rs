//! The exponential moving average of a sharded model's parameters.

use std::collections::BTreeMap;
use std::path::PathBuf;

use fsdp_runtime::Error;
use fsdp_runtime::checkpoint::{Checkpoint, CheckpointManager, Restore};
use fsdp_runtime::errors::ScheduleError;
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::optim::{AdamWConfig, Ema};
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::compare::{assert_same_bits, assert_same_state};
use crate::support::{Net, batch, loss, of_rank_0, on_ranks};

const DECAY: f64 = 0.75;

fn sharded(worker: &Worker, strategy: ShardingStrategy) -> Result<Fsdp<Net>, Error> {
    let options = FsdpOptions::new().with_seed(3).with_strategy(strategy);
    fully_shard(Net::new(2, 0.0, worker.device()), worker, options)
}

/// Takes a step on a batch that is the same on every rank.
fn step(
    net: Fsdp<Net>,
    optimizer: &mut burn::optim::ModuleOptimizer,
    at: usize,
    worker: &Worker,
) -> Result<Fsdp<Net>, Error> {
    let (tokens, labels) = batch(at, 0..4, worker.device());
    let gradients = net.backward(loss(net.forward(tokens), labels))?;
    Ok(optimizer.step(1e-2, net, gradients))
}

fn logits(net: &Fsdp<Net>, worker: &Worker) -> Vec<f32> {
    let device = worker.device().clone().inner();
    net.valid().forward(batch(0, 0..4, &device).0).into_data().iter().collect()
}

/// Returns the elements of a state by name.
fn elements(state: &FullState) -> BTreeMap<String, Vec<f32>> {
    state.iter().map(|(name, data)| (name.clone(), data.iter().collect())).collect()
}

#[test]
fn the_average_is_the_formula_on_every_rank_and_strategy() {
    for (world, strategy) in [
        (1, ShardingStrategy::FullShard),
        (2, ShardingStrategy::FullShard),
        (3, ShardingStrategy::FullShard),
        (2, ShardingStrategy::NoShard),
    ] {
        let (states, average) = of_rank_0(world, move |worker| {
            let mut net = sharded(worker, strategy)?;
            let mut optimizer = AdamWConfig::new().init();
            let mut average = Ema::new(DECAY).of(&net);
            let mut states = vec![net.state().full(Recipient::All)?];
            for at in 0..4 {
                net = step(net, &mut optimizer, at, worker)?;
                average.update(&net);
                states.push(net.state().full(Recipient::All)?);
            }
            let averaged = average.swap_in(&mut net)?;
            Ok((states, averaged.state().full(Recipient::All)?))
        });
        let mut expected = elements(&states[0]);
        for state in &states[1..] {
            let state = elements(state);
            for (name, average) in &mut expected {
                for (average, value) in average.iter_mut().zip(&state[name]) {
                    *average = *average * DECAY as f32 + value * (1.0 - DECAY) as f32;
                }
            }
        }
        let found = elements(&average);
        assert_eq!(found.len(), expected.len());
        for (name, values) in &expected {
            assert_same_bits(&found[name], values, format_args!("{world} {strategy}: {name}"));
        }
        let last = elements(states.last().unwrap());
        assert!(found["head.weight"] != last["head.weight"]);
    }
}

#[test]
fn the_average_is_swapped_in_for_evaluation_and_training_goes_on_as_without() {
    let run = |averages: bool| {
        on_ranks(2, move |worker| {
            let mut net = sharded(worker, ShardingStrategy::FullShard)?;
            let mut optimizer = AdamWConfig::new().init();
            let mut average = Ema::new(DECAY).of(&net);
            let mut evaluated = Vec::new();
            for at in 0..3 {
                net = step(net, &mut optimizer, at, worker)?;
                if averages {
                    average.update(&net);
                    let before = logits(&net, worker);
                    let averaged = average.swap_in(&mut net)?;
                    evaluated.push(logits(&averaged, worker));
                    drop(averaged);
                    assert_eq!(logits(&net, worker), before);
                    assert_ne!(evaluated[at], before);
                }
            }
            if averages {
                let other = net.clone();
                let held = other.unshard()?;
                let error = average.swap_in(&mut net).expect_err("a unit is kept gathered");
                let expected =
                    matches!(error, Error::Schedule(ScheduleError::ChangedWhileUnsharded { .. }));
                assert!(expected, "{error}");
                drop(held);
            }
            Ok((net.state().full(Recipient::All)?, evaluated))
        })
    };
    let (with, without) = (run(true), run(false));
    for ((with, evaluated), (without, _)) in with.iter().zip(&without) {
        assert_same_state(with, without, "training beside an average");
        assert_eq!(evaluated.len(), 3);
        assert_ne!(evaluated[0], evaluated[2]);
    }
}

/// Trains from the newest checkpoint in `folder`, if any, to step `until`, and saves it. Returns the
/// model and the average.
fn train(world: usize, folder: PathBuf, until: usize) -> (FullState, FullState) {
    of_rank_0(world, move |worker| {
        let mut net = sharded(worker, ShardingStrategy::FullShard)?;
        let mut optimizer = AdamWConfig::new().init();
        let mut average = Ema::new(DECAY).of(&net);
        let mut checkpoints = CheckpointManager::new(&folder, worker);
        let mut at = 0;
        if let Some(newest) = checkpoints.latest()? {
            let restore = Restore::new().with_model("net", &mut net);
            let restore = restore.with_optimizer("adamw", &mut optimizer);
            let restored = restore.with_average("ema", &mut average).load(worker, newest)?;
            at = restored.progress.step as usize;
        }
        while at < until {
            net = step(net, &mut optimizer, at, worker)?;
            average.update(&net);
            at += 1;
        }
        let checkpoint = Checkpoint::new(at as u64)
            .with_model("net", &net)
            .with_optimizer("adamw", &optimizer)
            .with_average("ema", &average);
        checkpoints.save(&checkpoint)?;
        let state = net.state().full(Recipient::All)?;
        let averaged = average.swap_in(&mut net)?;
        Ok((state, averaged.state().full(Recipient::All)?))
    })
}

#[test]
fn the_average_is_saved_and_resumes_at_every_world_size() {
    let folder = tempfile::tempdir().unwrap();
    let (state, average) = train(2, folder.path().join("whole"), 5);
    for (first, second) in [(2, 2), (2, 3), (3, 1)] {
        let path = folder.path().join(format!("{first}-{second}"));
        let (_, interrupted) = train(first, path.clone(), 3);
        let (found, found_average) = train(second, path, 5);
        assert!(elements(&interrupted) != elements(&found_average));
        if first == second {
            assert_same_state(&found, &state, "the model");
            assert_same_state(&found_average, &average, "the average");
        }
        // Sums over other numbers of ranks differ by rounding.
        let (found, expected) = (elements(&found_average), elements(&average));
        assert_eq!(found.len(), expected.len());
        for (name, values) in &expected {
            let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-4;
            assert!(!values.is_empty() && values.len() == found[name].len());
            assert!(values.iter().zip(&found[name]).all(close), "{first}-{second}: {name}");
        }
    }
}

#[test]
fn only_trained_parameters_are_averaged_and_counted() {
    let measured = on_ranks(2, |worker| {
        let lora = LoraConfig::new(2).with_target_modules(["up"]);
        let net = lora.apply(Net::new(2, 0.0, worker.device()))?;
        let net = fully_shard(net, worker, FsdpOptions::new().with_seed(1))?;
        assert_eq!(net.stats().memory().averages.now, 0);
        let average = Ema::new(DECAY).of(&net);
        let adapters: usize = net
            .state()
            .sharded()
            .iter()
            .filter(|(name, _)| name.contains(".lora."))
            .map(|(_, shard)| shard.range.len() * size_of::<f32>())
            .sum();
        let counted = net.stats().memory();
        assert!(counted.to_string().contains("averages"), "{counted}");
        drop(average);
        let full = sharded(worker, ShardingStrategy::FullShard)?;
        let _average = Ema::new(DECAY).of(&full);
        let all = (full.stats().memory().averages.now, full.stats().sharded_bytes());
        let after = net.stats().memory().averages;
        Ok((adapters, counted.averages.now, after.now, after.peak, all))
    });
    for (adapters, counted, after, peak, (all, stored)) in measured {
        assert!(adapters > 0);
        // An empty shard is stored as one element.
        assert!((adapters..adapters + 64).contains(&counted), "{counted} {adapters}");
        assert_eq!((after, peak), (0, counted));
        assert!((stored..stored + 64).contains(&all), "{all} {stored}");
    }
}
