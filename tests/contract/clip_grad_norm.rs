//! `test_fully_shard_clip_grad_norm_`: clipping by any norm, over all ranks, with one all-reduce.

use burn::module::{Module, Param};
use burn::nn::LinearConfig;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use fsdp_runtime::Error;
use fsdp_runtime::Norm;
use fsdp_runtime::errors::ScheduleError;
use fsdp_runtime::prelude::*;

use super::mlp::{WIDTH, input, loss, on_ranks, sharded};
use super::support::trace::{only, record};

/// Returns the norm of all gradients as one vector before and after clipping to `max`, and the
/// all-reduces it took.
fn clipped(strategy: ShardingStrategy, norm: Norm, max: f64) -> (f64, f64, usize) {
    let ranks = on_ranks(4, move |worker| {
        let model =
            sharded(2, worker, FsdpOptions::new().with_strategy(strategy).with_shard_size(2))?;
        let x = input(worker.rank().index(), 0, 4, worker.device());
        let mut gradients = model.backward(loss(model.forward(x)))?;
        let (found, trace) = record(|| model.clip_grad_norm_by(&mut gradients, max, norm));
        let found = found?;
        let after = model.clip_grad_norm_by(&mut gradients, f64::MAX, norm)?;
        Ok((found, after, only(&trace, &["reduce_norm"]).len()))
    });
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "every rank has the same norms: {ranks:?}");
    ranks[0]
}

/// Returns the p-norm of the full gradients, which every rank holds under `NO_SHARD`, from the
/// definition.
fn expected(p: f64) -> f64 {
    on_ranks(4, move |worker| {
        let options = FsdpOptions::new().with_strategy(ShardingStrategy::NoShard);
        let model = sharded(2, worker, options)?;
        let x = input(worker.rank().index(), 0, 4, worker.device());
        let gradients = model.backward(loss(model.forward(x)))?;
        let mut all: Vec<f64> = Vec::new();
        let mut take = |data: Option<burn::tensor::TensorData>| {
            all.extend(data.expect("a gradient").iter::<f32>().map(|x| f64::from(x.abs())));
        };
        let linears = model.blocks.iter().flat_map(|block| [&block.up, &block.down]);
        for linear in linears.chain([&model.head]) {
            take(gradients.get::<2>(linear.weight.id).map(|x| x.into_data()));
            let bias = linear.bias.as_ref().expect("a bias").id;
            take(gradients.get::<1>(bias).map(|x| x.into_data()));
        }
        Ok(if p.is_infinite() {
            all.into_iter().fold(0.0, f64::max)
        } else {
            all.into_iter().map(|x| x.powf(p)).sum::<f64>().powf(1.0 / p)
        })
    })[0]
}

#[test]
fn clip_grad_norm_equals_the_unsharded_norm() {
    for p in [1.0, 2.0, f64::INFINITY, 3.5] {
        let norm = Norm::new(p).unwrap();
        let want = expected(p);
        assert!(want > 0.0, "{norm:?}: there are gradients");
        for strategy in
            [ShardingStrategy::FullShard, ShardingStrategy::NoShard, ShardingStrategy::HybridShard]
        {
            let max = want / 2.0;
            let (found, after, reductions) = clipped(strategy, norm, max);
            assert!((found - want).abs() <= 1e-6 * want, "{strategy} {norm:?}: {found} {want}");
            assert!((after - max).abs() <= 1e-5 * max, "{strategy} {norm:?}: {after} {max}");
            assert_eq!(reductions, usize::from(strategy.shards()), "one all-reduce");
        }
    }
}

#[test]
fn a_norm_below_the_bound_scales_nothing() {
    let (before, after, _) = clipped(ShardingStrategy::FullShard, Norm::Two, 1e6);
    assert!(before > 0.0);
    assert_eq!(before.to_bits(), after.to_bits());
}

#[derive(Module, Debug)]
#[fsdp_unit(root, tie("input" = "output"))]
struct Tied {
    input: Param<Tensor<2>>,
    output: Param<Tensor<2>>,
}

#[fsdp_unit]
impl Tied {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.matmul(self.input.val()).matmul(self.output.val().transpose())
    }
}

/// One weight at two places has one id, so that its gradient counts once and is scaled once.
#[test]
fn a_tied_weight_counts_once() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        let ranks = on_ranks(3, move |worker| {
            let input_weight = LinearConfig::new(WIDTH, WIDTH).init(worker.device()).weight;
            let model = Tied { output: input_weight.clone(), input: input_weight };
            let options = FsdpOptions::new().with_strategy(strategy);
            let model = fully_shard(model, worker, options)?;
            let x = input(worker.rank().index(), 0, 4, worker.device());
            let mut gradients = model.backward(loss(model.forward(x)))?;
            let gradient = gradients.get::<2>(model.input.id);
            let squares = gradient.map_or(0.0, |it| it.square().sum().into_scalar::<f32>());
            let mut all = [f64::from(squares)];
            worker.all_reduce_sum(&mut all)?;
            let copies = if strategy.shards() { 1.0 } else { 3.0 };
            let want = (all[0] / copies).sqrt();
            let found = model.clip_grad_norm(&mut gradients, want / 4.0)?;
            let after = model.clip_grad_norm(&mut gradients, f64::MAX)?;
            Ok((want, found, after))
        });
        for (want, found, after) in ranks {
            assert!(want > 0.0, "{strategy}: there is a gradient");
            assert!((found - want).abs() <= 1e-5 * want, "{strategy}: {found} {want}");
            assert!((after - want / 4.0).abs() <= 1e-4 * want, "{strategy}: {after} {want}");
        }
    }
}

/// Makes an element of the gradient of a block's matrix non-finite, on the rank that owns it. Returns the
/// results of clipping without and with the check, and whether the gradients are as before.
fn clipped_with(element: f32) -> Vec<(f64, Error, bool)> {
    on_ranks(2, move |worker| {
        let model = sharded(3, worker, FsdpOptions::new())?;
        let x = input(worker.rank().index(), 0, 4, worker.device());
        let mut gradients = model.backward(loss(model.forward(x)))?;
        // The second half of a matrix is on rank 1.
        for block in [1, 2].map(|at| &model.blocks[at]) {
            let id = block.down.weight.id;
            if worker.rank() == 1 {
                let gradient = gradients.remove::<2>(id).expect("a gradient");
                gradients.register(id, gradient.full_like(element));
            }
        }
        let id = model.head.weight.id;
        let read = |gradients: &GradientsParams| gradients.get::<2>(id).map(|it| it.into_data());
        let before = read(&gradients);
        let options = ClipOptions::new(0.1).with_error_if_nonfinite(true);
        let error = model
            .clip_grad_norm_with(&mut gradients, &options)
            .expect_err("the norm is not finite");
        let same = read(&gradients) == before;
        let norm = model.clip_grad_norm_with(&mut gradients, &ClipOptions::new(f64::INFINITY))?;
        Ok((norm, error, same))
    })
}

#[test]
fn a_non_finite_norm_names_the_first_parameter_and_the_rank() {
    for (element, text) in [(f32::NAN, "is NaN"), (f32::INFINITY, "is inf")] {
        for (norm, error, same) in clipped_with(element) {
            assert!(!norm.is_finite(), "without the check the norm is returned: {norm}");
            assert!(same, "no gradient was changed");
            let Error::Schedule(ScheduleError::NonFiniteNorm { first, .. }) = &error else {
                panic!("{error}")
            };
            let (path, rank) = first.as_ref().expect("a parameter");
            assert_eq!((path.as_str(), rank.index()), ("blocks.1.down.weight", 1));
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}

/// The squares of finite elements overflow.
#[test]
fn a_norm_of_finite_gradients_that_overflows_names_no_parameter() {
    let errors = on_ranks(2, |worker| {
        let model = sharded(1, worker, FsdpOptions::new())?;
        let x = input(worker.rank().index(), 0, 4, worker.device());
        let mut gradients = model.backward(loss(model.forward(x)))?;
        let id = model.head.weight.id;
        if let Some(gradient) = gradients.remove::<2>(id) {
            gradients.register(id, gradient.full_like(f32::MAX));
        }
        let options = ClipOptions::new(1.0).with_norm(Norm::P(20.0)).with_error_if_nonfinite(true);
        Ok(model.clip_grad_norm_with(&mut gradients, &options).expect_err("the norm overflows"))
    });
    for error in errors {
        assert!(
            matches!(&error, Error::Schedule(ScheduleError::NonFiniteNorm { first: None, .. })),
            "{error}"
        );
        assert!(error.to_string().contains("their norm overflows"), "{error}");
    }
}
