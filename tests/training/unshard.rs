//! Units that a guard keeps gathered, and the plain module of a sharded model.

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{FloatDType, Int, Tensor};
use fsdp_runtime::errors::ScheduleError;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::compare::{assert_same_bits, assert_same_state};
use crate::support::{Net, batch, loss, of_rank_0, on_ranks, ranks};

const BLOCKS: usize = 3;
/// The root, the embeddings and the blocks, each with one flat range.
const UNITS: usize = 2 + BLOCKS;

const BF16: MixedPrecisionPolicy = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);

fn sharded(worker: &Worker, options: FsdpOptions) -> Result<Fsdp<Net>, Error> {
    fully_shard(Net::new(BLOCKS, 0.1, worker.device()), worker, options.with_seed(7))
}

/// Returns this rank's batch, without autodiff.
fn tokens(worker: &Worker) -> Tensor<2, Int> {
    let first = worker.rank().index() * 4;
    batch(0, first..first + 4, worker.device()).0.inner()
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.to_data().convert::<f32>().try_to_vec().expect("floats")
}

#[test]
fn a_held_evaluation_gathers_each_unit_once_in_total() {
    on_ranks(2, |worker| {
        let model = sharded(worker, FsdpOptions::new())?.valid();
        let tokens = tokens(worker);
        let expected = values(&model.forward(tokens.clone()));
        let (before, memory) = (model.stats().counts(), model.stats().memory().gathered.now);
        let guard = model.unshard()?;
        let held = model.stats().memory().gathered.now;
        for _ in 0..3 {
            assert_same_bits(&values(&model.forward(tokens.clone())), &expected, "logits");
        }
        let counts = model.stats().counts();
        assert_eq!(counts.all_gathers - before.all_gathers, UNITS);
        assert_eq!(counts.single_gathers, before.single_gathers);
        let unsharded: usize =
            model.stats().wrapping().units.iter().map(|unit| unit.unsharded_bytes).sum();
        assert_eq!(held - memory, unsharded, "each unit has memory of its own");
        drop(guard);
        assert_eq!(model.stats().memory().gathered.now, memory);
        assert_same_bits(&values(&model.forward(tokens)), &expected, "logits after the guard");
        assert!(model.stats().counts().all_gathers > counts.all_gathers);
        Ok(())
    });
}

#[test]
fn ranks_may_run_different_numbers_of_forwards_under_a_guard() {
    let logits = on_ranks(3, |worker| {
        let model = sharded(worker, FsdpOptions::new())?.valid();
        let _guard = model.unshard()?;
        let gathers = model.stats().counts();
        let mut last = Vec::new();
        for step in 0..=worker.rank().index() {
            last = values(&model.forward(batch(step, 0..2, worker.device()).0.inner()));
        }
        // Outside of a forward too, a parameter that is kept gathered needs no collective.
        if worker.rank().index() == 1 {
            last.extend(values(&model.blocks[0].up.weight.val()));
        }
        assert_eq!(model.stats().counts(), gathers);
        Ok(last)
    });
    assert!(logits.iter().flatten().all(|logit| logit.is_finite()));
    assert_ne!(logits[0], logits[2], "the ranks' batches differ");
}

/// When a training step holds its units.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Held {
    Never,
    /// For an evaluation between two steps.
    ForEvaluation,
    /// From before the forward until after the backward.
    ForStep,
    /// Until between the forward and the backward.
    ForForward,
    /// One block only, from before the forward until after the backward.
    OneUnit,
}

fn train(
    worker: &Worker,
    options: FsdpOptions,
    held: Held,
) -> Result<(Vec<f64>, FullState), Error> {
    let mut model = sharded(worker, options)?;
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    let first = worker.rank().index() * 4;
    for step in 0..4 {
        let (tokens, labels) = batch(step, first..first + 4, worker.device());
        if held == Held::ForEvaluation {
            let snapshot = model.valid();
            let _guard = snapshot.unshard()?;
            snapshot.forward(tokens.clone().inner());
        }
        let gradients: GradientsParams = {
            let mut guard = match held {
                Held::ForStep | Held::ForForward => Some(model.unshard()?),
                Held::OneUnit => Some(model.unit("blocks.1")?.unshard()?),
                Held::Never | Held::ForEvaluation => None,
            };
            let loss = loss(model.forward(tokens), labels);
            guard.take_if(|_| held == Held::ForForward);
            losses.push(f64::from(loss.clone().into_scalar::<f32>()));
            model.backward(loss)?
        };
        model = optimizer.step(1e-2, model, gradients);
    }
    Ok((losses, model.state().full(Recipient::All)?))
}

#[test]
fn training_has_the_same_bits_with_and_without_guards() {
    let options = FsdpOptions::new;
    let variants = [
        ("full", options()),
        ("grad op", options().with_strategy(ShardingStrategy::ShardGradOp)),
        ("none", options().with_strategy(ShardingStrategy::NoShard)),
        ("recomputed", options().with_activation_checkpointing(ActivationCheckpointing::All)),
        ("part", options().with_reshard_after_forward(ReshardAfterForward::To(2))),
        ("bf16", options().with_mixed_precision(BF16)),
        ("offloaded", options().with_offload(OffloadPolicy::Params { pin_memory: false })),
    ];
    for (name, options) in variants {
        let run = |held| {
            let options = options.clone();
            of_rank_0(4, move |worker| train(worker, options.clone(), held))
        };
        let (losses, state) = run(Held::Never);
        for held in [Held::ForEvaluation, Held::ForStep, Held::ForForward, Held::OneUnit] {
            let (held_losses, held_state) = run(held);
            assert_same_bits(&held_losses, &losses, format_args!("{name}, {held:?}"));
            assert_same_state(&held_state, &state, format_args!("{name}, {held:?}"));
        }
    }
}

#[test]
fn a_held_step_gathers_each_unit_once() {
    on_ranks(2, |worker| {
        let model = sharded(worker, FsdpOptions::new())?;
        let memory = model.stats().memory().gathered.now;
        let guard = model.unshard()?;
        let (tokens, labels) = batch(0, 0..4, worker.device());
        let loss = loss(model.forward(tokens), labels);
        drop(guard);
        // The graph has views of the buffers, so they are counted until its backward.
        assert!(model.stats().memory().gathered.now > memory);
        model.backward(loss)?;
        assert_eq!(model.stats().memory().gathered.now, memory);
        let counts = model.stats().counts();
        assert_eq!((counts.all_gathers, counts.reduce_scatters), (UNITS, UNITS));
        Ok(())
    });
}

#[test]
fn guards_of_the_same_units_nest() {
    on_ranks(2, |worker| {
        let model = sharded(worker, FsdpOptions::new())?.valid();
        let outer = model.unit("blocks.0")?.unshard()?;
        let inner = model.unshard()?;
        assert_eq!(model.stats().counts().all_gathers, UNITS, "no unit is gathered twice");
        drop(outer);
        model.forward(tokens(worker));
        assert_eq!(model.stats().counts().all_gathers, UNITS);
        drop(inner);
        model.forward(tokens(worker));
        assert_eq!(model.stats().counts().all_gathers, 2 * UNITS);
        Ok(())
    });
}

/// Returns the error of rank 0 on two ranks that run `rank`, which must fail.
#[track_caller]
fn schedule_error(
    rank: impl Fn(&Worker) -> Result<(), Error> + Send + Sync + 'static,
) -> ScheduleError {
    let outcome = launch(ranks::launch_options(2), move |worker| rank(&worker));
    let error = outcome.expect_err("the use is refused");
    match error.source.downcast_ref::<Error>() {
        Some(Error::Schedule(error)) => error.clone(),
        _ => panic!("{error:?}"),
    }
}

#[test]
fn a_guard_is_refused_between_forward_and_backward() {
    let error = schedule_error(|worker| {
        let model = sharded(worker, FsdpOptions::new())?;
        let (tokens, labels) = batch(0, 0..4, worker.device());
        let loss = loss(model.forward(tokens), labels);
        let refused = model.unshard().map(|_| ());
        // The pass itself goes on.
        model.backward(loss)?;
        drop(model.unshard()?);
        refused
    });
    assert!(matches!(error, ScheduleError::UnshardDuringPass { .. }), "{error}");
}

#[test]
fn a_step_of_a_clone_under_a_guard_is_refused() {
    let error = schedule_error(|worker| {
        let model = sharded(worker, FsdpOptions::new())?;
        let (tokens, labels) = batch(0, 0..4, worker.device());
        let gradients = model.backward(loss(model.forward(tokens), labels))?;
        let snapshot = model.valid();
        let _guard = snapshot.unit("blocks.0")?.unshard()?;
        AdamWConfig::new().init().step(1e-2, model, gradients);
        Ok(())
    });
    let ScheduleError::ChangedWhileUnsharded { unit } = error else { panic!("{error}") };
    assert_eq!(unit, "`blocks.0`");
}

#[test]
fn loading_a_state_under_a_guard_is_refused() {
    let error = schedule_error(|worker| {
        let mut model = sharded(worker, FsdpOptions::new())?;
        let state = model.state().full(Recipient::All)?;
        let snapshot = model.valid();
        let _guard = snapshot.unshard()?;
        model.state_mut().load_full(&state, Recipient::All)?;
        Ok(())
    });
    assert!(matches!(error, ScheduleError::ChangedWhileUnsharded { .. }), "{error}");
}

#[test]
fn an_unknown_unit_is_an_error_that_lists_the_units() {
    let error = schedule_error(|worker| {
        let model = sharded(worker, FsdpOptions::new())?;
        model.unit("block.0").map(|_| ())
    });
    let ScheduleError::UnknownUnit { path, units } = error else { panic!("{error}") };
    assert_eq!(path, "block.0");
    assert_eq!(units, ["", "embed", "blocks.0", "blocks.1", "blocks.2"]);
}

#[test]
fn the_plain_module_computes_what_the_sharded_one_does() {
    for options in [FsdpOptions::new(), FsdpOptions::new().with_strategy(ShardingStrategy::NoShard)]
    {
        on_ranks(2, move |worker| {
            let model = sharded(worker, options.clone())?.valid();
            let tokens = tokens(worker);
            let expected = values(&model.forward(tokens.clone()));
            let singles = model.stats().counts().single_gathers;
            let plain = model.gathered(|plain| values(&plain.forward(tokens.clone())))?;
            assert_same_bits(&plain, &expected, "logits of the module in `gathered`");
            assert_eq!(model.stats().counts().single_gathers, singles);
            let plain = model.into_plain()?;
            assert_same_bits(&values(&plain.forward(tokens)), &expected, "logits afterwards");
            Ok(())
        });
    }
}

#[test]
fn the_plain_module_has_f32_parameters_under_mixed_precision() {
    on_ranks(2, |worker| {
        let options = FsdpOptions::new().with_mixed_precision(BF16);
        let model = sharded(worker, options)?.valid();
        let state = model.state().full(Recipient::All)?;
        let weight = model.gathered(|plain| values(&plain.blocks[1].up.weight.val()))?;
        let expected: Vec<f32> = state["blocks.1.up.weight"].try_to_vec().expect("f32");
        // A linear layer of Burn has the transpose of the checkpoint's matrix.
        let mut found = weight;
        let mut sorted = expected;
        found.sort_by(f32::total_cmp);
        sorted.sort_by(f32::total_cmp);
        assert_same_bits(&found, &sorted, "elements of the weight");
        Ok(())
    });
}

#[test]
fn one_rank_gets_the_plain_module() {
    let ranks = on_ranks(3, |worker| {
        let model = sharded(worker, FsdpOptions::new())?.valid();
        let tokens = batch(0, 0..2, worker.device()).0.inner();
        let expected = values(&model.forward(tokens.clone()));
        let second = worker.world().ranks().nth(1).expect("there are three ranks");
        let plain = model.into_plain_on(second)?;
        Ok(plain.map(|plain| (values(&plain.forward(tokens)), expected)))
    });
    assert_eq!(ranks.iter().map(Option::is_some).collect::<Vec<_>>(), [false, true, false]);
    let (found, expected) = ranks[1].as_ref().expect("rank 1 has the module");
    assert_same_bits(found, expected, "logits");
}
