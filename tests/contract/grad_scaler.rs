//! `test_fully_shard_grad_scaler`: an overflow on one rank skips the step on all.

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Tensor;
use fsdp_runtime::Error;
use fsdp_runtime::optim::GradScalerConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use super::mlp::{Mlp, input, loss, on_ranks, sharded};
use super::support::compare::assert_same_state;
use super::support::trace::{only, record};

const STEPS: usize = 6;

/// A model, its optimizer and its scaler on one rank.
struct Training<'a> {
    worker: &'a Worker,
    model: Fsdp<Mlp>,
    optimizer: burn::optim::ModuleOptimizer,
    scaler: GradScaler,
    /// Multiplies every loss.
    factor: f32,
}

impl<'a> Training<'a> {
    fn new(worker: &'a Worker, options: FsdpOptions, scaler: GradScaler) -> Result<Self, Error> {
        let optimizer = AdamWConfig::new().init();
        let model = sharded(2, worker, options)?;
        Ok(Self { worker, model, optimizer, scaler, factor: 1.0 })
    }

    /// Takes one step with the gradients that `change` leaves. Returns whether they were finite.
    fn step(
        &mut self,
        step: usize,
        change: impl FnOnce(&Fsdp<Mlp>, &mut GradientsParams),
    ) -> Result<bool, Error> {
        let x = input(self.worker.rank().index(), step, 4, self.worker.device());
        let loss = loss(self.model.forward(x)).mul_scalar(self.factor);
        let mut gradients = self.model.backward(self.scaler.scale(loss))?;
        change(&self.model, &mut gradients);
        match self.scaler.unscale(&self.model, gradients)? {
            Unscaled::Finite(mut gradients) => {
                self.model.clip_grad_norm(&mut gradients, 0.1)?;
                self.model = self.optimizer.step(1e-2, self.model.clone(), gradients);
                Ok(true)
            }
            Unscaled::Overflow => Ok(false),
        }
    }

    fn state(&self) -> Result<FullState, Error> {
        self.model.state().full(Recipient::All)
    }
}

fn strategies() -> [FsdpOptions; 3] {
    let of = |strategy| FsdpOptions::new().with_strategy(strategy).with_shard_size(2);
    [ShardingStrategy::FullShard, ShardingStrategy::NoShard, ShardingStrategy::HybridShard].map(of)
}

/// A scale that is a power of two changes no bit of a gradient that neither overflows nor
/// underflows.
#[test]
fn scaled_training_has_the_bits_of_training_without_a_scale() {
    for options in strategies() {
        for accumulate in [false, true] {
            let options = options.clone();
            let ranks = on_ranks(4, move |worker| {
                let train = |scaler: Option<GradScaler>| {
                    let mut model = sharded(2, worker, options.clone())?;
                    let mut optimizer = AdamWConfig::new().init();
                    let mut scaler = scaler;
                    for step in 0..STEPS {
                        let scaled = |loss: Tensor<1>| match &scaler {
                            Some(scaler) => scaler.scale(loss),
                            None => loss,
                        };
                        let x = |rows| input(worker.rank().index(), step, rows, worker.device());
                        if accumulate {
                            model.accumulate(scaled(loss(model.forward(x(2)))))?;
                        }
                        let loss = scaled(loss(model.forward(x(4))));
                        let mut gradients = model.backward(loss)?;
                        if let Some(scaler) = &mut scaler {
                            gradients = match scaler.unscale(&model, gradients)? {
                                Unscaled::Finite(gradients) => gradients,
                                Unscaled::Overflow => panic!("nothing overflows"),
                            };
                        }
                        model = optimizer.step(1e-2, model, gradients);
                    }
                    model.state().full(Recipient::All)
                };
                Ok::<_, Error>((train(None)?, train(Some(GradScaler::new()))?))
            });
            for (plain, scaled) in ranks {
                assert_same_state(&scaled, &plain, "scaled training");
            }
        }
    }
}

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all() {
    for options in strategies() {
        for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for matrix in [true, false] {
                let options = options.clone();
                let ranks = on_ranks(4, move |worker| {
                    let scaler = GradScaler::new();
                    let mut training = Training::new(worker, options.clone(), scaler)?;
                    assert!(training.step(0, |_, _| {})?);
                    let (before, begin) = (training.state()?, training.scaler.loss_scale());
                    let (taken, trace) = record(|| {
                        training.step(1, |model, gradients| {
                            if worker.rank().index() == 2 {
                                overflow(model, gradients, value, matrix);
                            }
                        })
                    });
                    assert!(!taken?);
                    assert_eq!(only(&trace, &["reduce_finite"]).len(), 1, "one all-reduce");
                    assert_eq!(training.state()?, before);
                    assert_eq!(training.scaler.loss_scale(), begin / 2.0);
                    assert!(training.step(2, |_, _| {})?);
                    assert_ne!(training.state()?, before);
                    Ok(training.scaler)
                });
                assert!(ranks.iter().all(|scaler| *scaler == ranks[0]));
            }
        }
    }
}

/// Sets one element of this rank's gradients, of a matrix or of a vector, to `value`.
fn overflow(model: &Mlp, gradients: &mut GradientsParams, value: f32, matrix: bool) {
    if matrix {
        // The first matrix that this rank has a shard of.
        let linears = model.blocks.iter().flat_map(|block| [&block.up, &block.down]);
        let mut ids = linears.chain([&model.head]).map(|linear| linear.weight.id);
        let id = ids.find(|id| gradients.get::<2>(*id).is_some()).expect("a shard");
        let gradient = gradients.remove::<2>(id).expect("found above");
        let last = gradient.dims().map(|size| size - 1..size);
        let gradient = gradient.slice_fill(last, value);
        gradients.register(id, gradient);
    } else {
        let id = model.head.bias.as_ref().expect("a bias").id;
        let gradient = gradients.remove::<1>(id).expect("a gradient");
        gradients.register(id, gradient.slice_fill(1..2, value));
    }
}

/// A scale that is too large for f32 makes every gradient overflow until it has shrunk enough.
#[test]
fn the_scale_backs_off_until_gradients_are_finite_and_grows_again() {
    let ranks = on_ranks(2, |worker| {
        let config = GradScalerConfig::new().with_init_scale(f32::MAX / 2.0);
        let scaler = config.with_growth_interval(3).with_backoff_factor(2f32.powi(-10)).init()?;
        let mut training = Training::new(worker, FsdpOptions::new(), scaler)?;
        training.factor = 1e4;
        let mut before = training.state()?;
        let mut taken = Vec::new();
        for step in 0..12 {
            let scale = training.scaler.loss_scale();
            taken.push((training.step(step, |_, _| {})?, scale));
            let after = training.state()?;
            assert_eq!(
                after != before,
                taken[step].0,
                "a step is taken if and only if gradients are finite"
            );
            before = after;
        }
        Ok(taken)
    });
    assert_eq!(ranks[0], ranks[1]);
    assert!(!ranks[0][0].0, "the first scale overflows: {ranks:?}");
    let first = ranks[0].iter().position(|(taken, _)| *taken).expect("it ends");
    assert!(ranks[0][first..].iter().any(|(_, scale)| *scale > ranks[0][first].1), "{ranks:?}");
}

#[test]
fn a_finite_gradient_whose_square_overflows_is_no_overflow() {
    let finite = on_ranks(2, |worker| {
        let mut training = Training::new(worker, FsdpOptions::new(), GradScaler::new())?;
        training.step(0, |model, gradients| overflow(model, gradients, 1e30, true))
    });
    assert_eq!(finite, [true, true]);
}

#[test]
fn a_saved_scaler_continues_where_it_was() {
    let json = on_ranks(2, |worker| {
        let config = GradScalerConfig::new().with_growth_interval(2).with_init_scale(8.0);
        let mut training = Training::new(worker, FsdpOptions::new(), config.init()?)?;
        training.step(0, |_, _| {})?;
        let saved = serde_json::to_string(&training.scaler).expect("numbers can be written");
        training.scaler = serde_json::from_str(&saved).expect("what was written can be read");
        training.step(1, |_, _| {})?;
        assert_eq!(training.scaler.loss_scale(), 16.0, "two steps in a row");
        Ok(saved)
    });
    let wrong = json[0].replace("\"scale\":8.0", "\"scale\":-1.0");
    assert_ne!(wrong, json[0]);
    let error = serde_json::from_str::<GradScaler>(&wrong).unwrap_err();
    assert!(error.to_string().contains("above 0"), "{error}");
}

#[test]
fn ranks_with_different_scales_are_an_error_on_all() {
    let errors = on_ranks(2, |worker| {
        let scale = [4.0, 8.0][worker.rank().index()];
        let scaler = GradScalerConfig::new().with_init_scale(scale).init()?;
        let mut training = Training::new(worker, FsdpOptions::new(), scaler)?;
        Ok(training.step(0, |_, _| {}).unwrap_err().to_string())
    });
    assert!(errors[0].contains("rank 1 scales its loss by 8, rank 0 by 4"), "{}", errors[0]);
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn numbers_out_of_their_range_are_errors() {
    for wrong in [
        GradScalerConfig::new().with_init_scale(0.0),
        GradScalerConfig::new().with_init_scale(f32::INFINITY),
        GradScalerConfig::new().with_growth_factor(1.0),
        GradScalerConfig::new().with_backoff_factor(1.0),
        GradScalerConfig::new().with_backoff_factor(f32::NAN),
        GradScalerConfig::new().with_growth_interval(0),
    ] {
        assert!(wrong.init().is_err(), "{wrong:?}");
    }
    assert_eq!(GradScalerConfig::new().init().unwrap(), GradScaler::new());
}

#[test]
fn one_loss_through_several_models_moves_the_scale_once() {
    on_ranks(2, |worker| {
        let mut scaler =
            GradScalerConfig::new().with_init_scale(8.0).with_growth_interval(1).init().unwrap();
        let models =
            [sharded(1, worker, FsdpOptions::new())?, sharded(2, worker, FsdpOptions::new())?];
        let x = || input(worker.rank().index(), 0, 4, worker.device());
        let loss = |scale: f32| {
            let [a, b] = &models;
            (loss(a.forward(x())) + loss(b.forward(x()))).mul_scalar(scale)
        };
        let gradients =
            |loss| Ok::<_, Error>([models[0].backward(loss)?, models[1].collect_gradients()?]);
        let expected = gradients(loss(1.0))?;
        let scaled = gradients(loss(scaler.loss_scale()))?;
        for ((model, scaled), expected) in models.iter().zip(scaled).zip(expected) {
            let Unscaled::Finite(found) = scaler.unscale_only(model, scaled)? else {
                panic!("an overflow")
            };
            let of = |gradients: &GradientsParams| {
                gradients.get::<2>(model.head.weight.id).expect("a gradient").into_data()
            };
            assert_eq!(of(&found), of(&expected));
        }
        assert_eq!(scaler.loss_scale(), 8.0);
        scaler.update(true);
        assert_eq!(scaler.loss_scale(), 16.0);
        Ok(())
    });
}
