//! Ranks whose shards lie in one memory have the losses, norms and parameters of ranks that gather.

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use fsdp_runtime::optim;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::{FullState, StateDictOptions};

use crate::support::checkpoint::{Part, resumed};
use crate::support::{Net, Run, batch, loss, of_rank_0};

const WORLD: usize = 2;

fn run(world: usize, in_place: bool) -> Run {
    let run = Run { dropout: 0.1, clip: Some(0.5), ..Run::new(world) };
    Run { options: run.options.clone().with_gather_in_place(in_place), ..run }
}

#[test]
fn every_strategy_has_the_same_bits_without_gather_buffers() {
    let hybrid = [ShardingStrategy::HybridShard, ShardingStrategy::HybridShardZero2];
    let whole = [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp];
    for (strategy, shard_size) in
        whole.map(|it| (it, 4)).into_iter().chain(hybrid.map(|it| (it, 2)))
    {
        let of = |in_place| {
            let run = run(4, in_place).with_strategy(strategy);
            if shard_size == 4 {
                run
            } else {
                Run::with_options(&run, |it| it.with_shard_size(shard_size))
            }
            .launch()
        };
        let (expected, outcome) = (of(false), of(true));
        outcome.assert_bitwise(&expected);
        assert_eq!(outcome.counts.all_gathers, expected.counts.all_gathers, "{strategy:?}");
        assert_eq!(outcome.gather_buffer_bytes, 0, "{strategy:?}");
        assert!(expected.gather_buffer_bytes > 0, "{strategy:?}");
    }
}

/// An optimizer that makes new tensors, and one that updates the shards in place.
#[test]
fn shards_stay_in_place_under_both_kinds_of_optimizers() {
    let optimizers: [fn() -> ModuleOptimizer; 2] =
        [|| AdamWConfig::new().init(), || optim::AdamWConfig::new().init()];
    for optimizer in optimizers {
        let of = |in_place| Run { optimizer, ..run(3, in_place) }.launch();
        let outcome = of(true);
        outcome.assert_bitwise(&of(false));
        assert_eq!(outcome.gather_buffer_bytes, 0);
    }
}

#[test]
fn units_that_are_stored_in_another_dtype_are_gathered() {
    let policy = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    let of = |in_place| {
        Run::with_options(&run(2, in_place), |it| it.with_mixed_precision(policy)).launch()
    };
    let outcome = of(true);
    outcome.assert_bitwise(&of(false));
    assert!(outcome.gather_buffer_bytes > 0);

    let stored = StoragePolicy::new().with_trained(StorageType::Bf16);
    let of = |in_place| {
        let bf16 = |it: FsdpOptions| it.with_mixed_precision(policy).with_storage(stored);
        Run::with_options(&run(2, in_place), bf16).launch()
    };
    let outcome = of(true);
    outcome.assert_bitwise(&of(false));
    assert_eq!(outcome.gather_buffer_bytes, 0);
}

#[test]
fn units_that_stay_gathered_have_the_same_bits() {
    for reshard in [ReshardAfterForward::Never, ReshardAfterForward::To(2)] {
        let of = |in_place| {
            Run::with_options(&run(4, in_place), |it| it.with_reshard_after_forward(reshard))
                .launch()
        };
        let outcome = of(true);
        outcome.assert_bitwise(&of(false));
        assert_eq!(outcome.gather_buffer_bytes, 0, "{reshard:?}");
    }
    assert_same_bits(
        |options| options.with_reshard_after_backward(false),
        |it| {
            for step in 0..3 {
                for part in 0..3 {
                    it.net().accumulate(it.loss(4 * step + part))?;
                }
                it.train(4 * step + 3)?;
            }
            Ok(())
        },
    );
}

#[test]
fn a_loaded_model_is_in_place_and_has_the_same_bits() {
    let part = |in_place| {
        let options = FsdpOptions::new().with_gather_in_place(in_place);
        Part::new(3).dropout(0.1).options(options)
    };
    let of = |in_place| resumed(part(in_place).until(4), part(in_place));
    let ((losses, state), (expected, expected_state)) = (of(true), of(false));
    assert_eq!(losses, expected);
    assert_eq!(state, expected_state);
}

/// A clone of the model keeps its values, and the model is gathered until the clone is gone.
#[test]
fn a_clone_keeps_its_values_while_the_model_trains() {
    assert_same_bits(
        |options| options,
        |it| {
            it.train(0)?;
            let clone = it.net().clone();
            let before = clone.state().full(Recipient::All)?;
            it.train(1)?;
            it.train(2)?;
            assert_eq!(clone.state().full(Recipient::All)?, before);
            assert_ne!(it.net().state().full(Recipient::All)?, before);
            if it.in_place {
                assert!(it.net().stats().gather_buffer_bytes() > 0, "the last step was gathered");
            }
            drop(clone);
            (3..5).try_for_each(|step| it.train(step))
        },
    );
}

/// The first graph has views of the gather buffers, and the second forward is in place.
#[test]
fn the_graph_of_a_gathered_forward_is_gathered_in_backward() {
    assert_same_bits(
        |options| options,
        |it| {
            let clone = it.net().clone();
            it.train(0)?;
            let gathered = it.loss(1);
            drop(clone);
            it.train(2)?;
            let in_place = it.loss(3);
            let gradients = it.gradients(gathered)?;
            it.step(gradients);
            let gradients = it.gradients(in_place)?;
            it.step(gradients);
            it.train(4)
        },
    );
}

/// The parameters change between a forward and its backward, once to shards elsewhere and once to shards
/// that are in place again.
#[test]
fn a_graph_has_the_values_of_its_forward() {
    let of = |script: Script| state_after(true, |options| options, script);
    let early = of(|it| {
        it.train(0)?;
        let (first, second) = (it.gradients(it.loss(1))?, it.gradients(it.loss(2))?);
        it.step(first);
        let third = it.gradients(it.loss(3))?;
        it.step(third);
        it.step(second);
        it.train(4)
    });
    let late = of(|it| {
        it.train(0)?;
        let first = it.gradients(it.loss(1))?;
        let second = it.loss(2);
        it.step(first);
        let third = it.gradients(it.loss(3))?;
        it.step(third);
        let second = it.gradients(second)?;
        it.step(second);
        it.train(4)
    });
    assert_eq!(late, early);
}

/// A forward without a backward refers to the shards of other ranks until the next pass.
#[test]
fn a_step_after_an_evaluation_changes_no_value_that_others_read() {
    assert_same_bits(
        |options| options,
        |it| {
            for step in 0..3 {
                let gradients = it.gradients(it.loss(2 * step))?;
                drop(it.loss(2 * step + 1));
                it.step(gradients);
            }
            Ok(())
        },
    );
}

/// The load waits until all ranks have ended the evaluation, and so finds the places of shards free.
#[test]
fn a_model_that_is_evaluated_and_loaded_in_turns_stays_in_place() {
    assert_same_bits(
        |options| options,
        |it| {
            it.train(0)?;
            let saved = it.net().state().sharded();
            it.train(1)?;
            for _ in 0..3 {
                it.evaluate(2);
                let net = it.net.as_mut().expect("the model is there between steps");
                net.state_mut().load_sharded_with(&saved, &StateDictOptions::new())?;
                it.evaluate(3);
            }
            assert_eq!(it.net().stats().gather_buffer_bytes() == 0, it.in_place);
            Ok(())
        },
    );
}

#[test]
fn a_guard_has_buffers_of_its_own() {
    assert_same_bits(
        |options| options,
        |it| {
            it.train(0)?;
            let guard = it.net().unshard()?;
            drop(it.loss(1));
            drop(guard);
            it.train(2)
        },
    );
}

/// What a test does with a model on each rank.
type Script = fn(&mut Training) -> Result<(), Error>;

/// A model on one rank, with its optimizer.
struct Training {
    /// Empty only while a step runs.
    net: Option<Fsdp<Net>>,
    optimizer: ModuleOptimizer,
    rank: usize,
    device: Device,
    in_place: bool,
}

impl Training {
    fn net(&self) -> &Fsdp<Net> {
        self.net.as_ref().expect("the model is there between steps")
    }

    fn batch(&self, number: usize, device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
        batch(number, 4 * self.rank..4 * (self.rank + 1), device)
    }

    fn loss(&self, number: usize) -> Tensor<1> {
        let (tokens, labels) = self.batch(number, &self.device);
        loss(self.net().forward(tokens), labels)
    }

    /// Runs a forward without a graph.
    fn evaluate(&self, number: usize) {
        let (tokens, labels) = self.batch(number, &self.device.clone().inner());
        drop(loss(self.net().valid().forward(tokens), labels));
    }

    fn gradients(&self, loss: Tensor<1>) -> Result<GradientsParams, Error> {
        self.net().backward(loss)
    }

    fn step(&mut self, gradients: GradientsParams) {
        let net = self.net.take().expect("the model is there between steps");
        self.net = Some(self.optimizer.step(1e-2, net, gradients));
    }

    fn train(&mut self, number: usize) -> Result<(), Error> {
        let gradients = self.gradients(self.loss(number))?;
        self.step(gradients);
        Ok(())
    }
}

/// Runs a script on two ranks, with an optimizer that updates shards in place. Returns the parameters.
fn state_after(
    in_place: bool,
    options: fn(FsdpOptions) -> FsdpOptions,
    script: Script,
) -> FullState {
    of_rank_0(WORLD, move |worker| {
        let device = worker.device().clone();
        let options = options(FsdpOptions::new().with_seed(7).with_gather_in_place(in_place));
        let net = fully_shard(Net::new(3, 0.0, &device), worker, options)?;
        let optimizer = optim::AdamWConfig::new().init();
        let rank = worker.rank().index();
        let mut training = Training { net: Some(net), optimizer, rank, device, in_place };
        script(&mut training)?;
        training.net().state().full(Recipient::All)
    })
}

/// Asserts that a script leaves the same parameters whether shards are in one memory or not.
#[track_caller]
fn assert_same_bits(options: fn(FsdpOptions) -> FsdpOptions, script: Script) {
    let of = |in_place| state_after(in_place, options, script);
    assert_eq!(of(true), of(false));
}
