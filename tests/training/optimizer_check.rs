//! An optimizer that steps shards otherwise than whole matrices is an error in the first
//! three steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::grad_clipping::GradientClippingConfig;
use burn::module::ParamGroup;
use burn::optim::{
    self, AdaGradConfig, AdamConfig, AdamWState, AdanConfig, AdaptiveMomentumState,
    GradientsAccumulator, GradientsParams, LearningRate, LionConfig, ModuleOptimizer, Optimizer,
    RmsPropConfig, SgdConfig, SgdState,
};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::errors::ScheduleError;
use fsdp_runtime::optim::{AdadeltaConfig, AdamWConfig, WholeParam};
use fsdp_runtime::prelude::*;

use crate::support::ranks::launch_options;
use crate::support::whole_param::{OPTIMIZERS, lamb};
use crate::support::{Net, batch, loss, on_ranks};

fn sharded(worker: &Worker, options: FsdpOptions) -> Result<Fsdp<Net>, Error> {
    fully_shard(Net::new(2, 0.0, worker.device()), worker, options.with_seed(7))
}

fn gradients(net: &Fsdp<Net>, worker: &Worker) -> Result<GradientsParams, Error> {
    let (tokens, labels) = batch(0, 0..4, worker.device());
    net.backward(loss(net.forward(tokens), labels))
}

/// Number of steps that check an optimizer, and one more.
const STEPS: usize = 4;

/// Takes [`STEPS`] steps. Returns the error of the launch.
fn train(
    world: usize,
    options: FsdpOptions,
    optimizer: impl Fn() -> ModuleOptimizer + Send + Sync + 'static,
) -> Result<(), ScheduleError> {
    let stepped = launch(launch_options(world), move |worker| {
        let mut net = sharded(&worker, options.clone())?;
        let mut optimizer = optimizer();
        for _ in 0..STEPS {
            let gradients = gradients(&net, &worker)?;
            net = optimizer.step(1e-3, net, gradients);
        }
        Ok::<_, Error>(())
    });
    stepped.map(drop).map_err(|error| match error.source.downcast_ref::<Error>() {
        Some(Error::Schedule(error)) => error.clone(),
        other => panic!("{other:?} in {error}"),
    })
}

fn norm_clipping(max_norm: f32) -> GradientClippingConfig {
    GradientClippingConfig::Norm(max_norm)
}

type Named = (&'static str, fn() -> ModuleOptimizer);

const ELEMENT_WISE: [Named; 16] = [
    ("AdamW", || optim::AdamWConfig::new().init()),
    ("AdamW, AMSGrad", || optim::AdamWConfig::new().with_amsgrad(true).init()),
    ("Adam", || AdamConfig::new().init()),
    ("AdaGrad", || AdaGradConfig::new().init()),
    ("Adan", || AdanConfig::new().init()),
    ("Lion", || LionConfig::new().init()),
    ("RMSprop", || RmsPropConfig::new().with_centered(true).init()),
    ("SGD", || SgdConfig::new().init()),
    ("SGD by value", || {
        let clipping = GradientClippingConfig::Value(1e-4);
        SgdConfig::new().with_gradient_clipping(Some(clipping)).init()
    }),
    ("our AdamW", || AdamWConfig::new().init()),
    ("our AdamW by value", || {
        let clipping = GradientClippingConfig::Value(1e-4);
        AdamWConfig::new().with_grad_clipping(Some(clipping)).init()
    }),
    ("our Adam", || fsdp_runtime::optim::AdamConfig::new().with_amsgrad(true).init()),
    ("our Adam, L2 penalty", || {
        fsdp_runtime::optim::AdamConfig::new().with_weight_decay(0.1).init()
    }),
    ("our SGD", || fsdp_runtime::optim::SgdConfig::new().with_momentum(0.9).init()),
    ("our Adadelta", || AdadeltaConfig::new().with_weight_decay(0.01).init()),
    ("our Adadelta by value", || {
        let clipping = GradientClippingConfig::Value(1e-4);
        AdadeltaConfig::new().with_grad_clipping(Some(clipping)).init()
    }),
];

#[test]
fn element_wise_optimizers_pass() {
    for (name, optimizer) in ELEMENT_WISE {
        for world in [1, 2] {
            assert_eq!(train(world, FsdpOptions::new(), optimizer), Ok(()), "{name}");
        }
    }
}

#[test]
fn clipping_by_norm_is_an_error_that_names_clip_grad_norm() {
    let optimizers: [Named; 7] = [
        ("our Adam", || {
            let config = fsdp_runtime::optim::AdamConfig::new();
            config.with_grad_clipping(Some(norm_clipping(1.0))).init()
        }),
        ("our Adadelta", || {
            AdadeltaConfig::new().with_grad_clipping(Some(norm_clipping(1.0))).init()
        }),
        ("our AdamW", || AdamWConfig::new().with_grad_clipping(Some(norm_clipping(1.0))).init()),
        ("our SGD", || {
            let config = fsdp_runtime::optim::SgdConfig::new();
            config.with_grad_clipping(Some(norm_clipping(1e9))).init()
        }),
        ("AdamW", || optim::AdamWConfig::new().with_grad_clipping(Some(norm_clipping(5.0))).init()),
        ("Lion", || LionConfig::new().with_grad_clipping(Some(norm_clipping(1.0))).init()),
        ("set later", || AdamWConfig::new().init().with_grad_clipping(norm_clipping(1.0).init())),
    ];
    for (name, optimizer) in optimizers {
        for world in [1, 2] {
            let error = train(world, FsdpOptions::new(), optimizer).expect_err(name);
            assert!(matches!(error, ScheduleError::OptimizerClipsByNorm { .. }), "{name}: {error}");
            let text = error.to_string();
            assert!(text.contains("model.clip_grad_norm(&mut gradients"), "{text}");
        }
    }
}

#[test]
fn an_optimizer_that_needs_whole_matrices_is_an_error_that_names_whole_param() {
    for (name, optimizer) in OPTIMIZERS {
        for world in [1, 2] {
            let error = train(world, FsdpOptions::new(), optimizer).expect_err(name);
            assert!(matches!(error, ScheduleError::OptimizerNeedsMatrix { .. }), "{name}: {error}");
            assert!(error.to_string().contains("`optim::WholeParam::new(optimizer)`"), "{error}");
        }
    }
    let error = train(2, FsdpOptions::new(), OPTIMIZERS[2].1).unwrap_err().to_string();
    assert!(error.contains("`blocks.0.up.weight`"), "Muon steps the blocks only: {error}");
}

/// Returns whether a parameter is a matrix of 128 or more rows and columns.
fn is_large<const D: usize>(tensor: &Tensor<D>) -> bool {
    D == 2 && tensor.dims().iter().all(|size| *size >= 128)
}

/// Scales the update of a parameter to the largest of its elements.
#[derive(Clone)]
struct Largest {
    /// Whether only large matrices are scaled. All others have a step of SGD.
    large: bool,
}

impl Optimizer for Largest {
    type State<const D: usize> = SgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        mut grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        if !self.large || is_large(&tensor) {
            let largest = grad.clone().abs().max().unsqueeze::<D>();
            grad = grad / largest;
        }
        (tensor - grad * lr, state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, _: &Device) -> Self::State<D> {
        state
    }
}

/// Clips the gradients of large matrices only, by norm.
#[derive(Clone)]
struct ClipsLarge;

impl Optimizer for ClipsLarge {
    type State<const D: usize> = SgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        mut grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        if is_large(&tensor) {
            grad = norm_clipping(1.0).init().clip_gradient(grad);
        }
        (tensor - grad * lr, state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, _: &Device) -> Self::State<D> {
        state
    }
}

/// AdamW with the update clipping of StableAdamW: where the root mean square of `g / √v` over the
/// matrix is above 1, it divides the step size.
///
/// Wortsman et al., [*Stable and low-precision training for large-scale vision-language
/// models*](https://arxiv.org/abs/2304.13013), 2023, algorithm 2.
#[derive(Clone)]
struct StableAdamW {
    /// Whether only matrices of 128 or more rows and columns are clipped.
    large: bool,
}

impl Optimizer for StableAdamW {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let (time, m, v) = match state {
            Some(AdamWState { momentum }) => {
                (momentum.time + 1, momentum.moment_1, momentum.moment_2)
            }
            None => (1, grad.zeros_like(), grad.zeros_like()),
        };
        let square = grad.clone() * grad.clone();
        let m = m * 0.9 + grad * 0.1;
        let v = v * 0.99 + square.clone() * 0.01;
        let [m_hat, v_hat] = [(&m, 0.9f32), (&v, 0.99)]
            .map(|(moment, beta)| moment.clone() / (1.0 - beta.powi(time as i32)));
        let clipped = !self.large || tensor.dims().iter().all(|size| *size >= 128);
        let mut scale = 1.0;
        if clipped {
            let ratio = (square / (v_hat.clone() + 1e-37)).mean().into_scalar::<f32>();
            // `max` is 1 for NaN, which huge gradients give.
            scale = ratio.sqrt().max(1.0);
        }
        let update = m_hat / (v_hat.sqrt() + 1e-15) / scale;
        (tensor - update * lr, Some(AdamWState::new(AdaptiveMomentumState::new(time, m, v))))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        AdamWState::new(state.momentum.to_device(device))
    }
}

/// Momentum that steps only the elements whose momentum and gradient have the same sign, and scales
/// these up to the number of all elements.
///
/// Liang et al., [*Cautious Optimizers*](https://arxiv.org/abs/2411.16085), 2024, algorithm 1.
#[derive(Clone)]
struct Cautious;

impl Optimizer for Cautious {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let momentum =
            state.map_or_else(|| grad.zeros_like(), |state| state.momentum.moment_1) * 0.9;
        let momentum = momentum + grad.clone();
        let mask = (momentum.clone().sign() * grad.sign()).greater_scalar(0).float();
        let scale = mask.clone().mean().into_scalar::<f32>().max(1e-3);
        let state = AdaptiveMomentumState::new(1, momentum.clone(), momentum.zeros_like());
        (tensor - momentum * mask / scale * lr, Some(AdamWState::new(state)))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        AdamWState::new(state.momentum.to_device(device))
    }
}

const COMBINE_ELEMENTS: [Named; 6] = [
    ("largest", || Largest { large: false }.into()),
    ("largest of large", || Largest { large: true }.into()),
    ("clips large", || ClipsLarge.into()),
    ("cautious", || Cautious.into()),
    ("StableAdamW", || StableAdamW { large: false }.into()),
    ("StableAdamW of large", || StableAdamW { large: true }.into()),
];

#[test]
fn a_users_optimizer_that_combines_elements_is_an_error() {
    for world in [1, 2] {
        for (name, optimizer) in COMBINE_ELEMENTS {
            let stepped = train(world, FsdpOptions::new(), optimizer);
            let refused = matches!(stepped, Err(ScheduleError::OptimizerNeedsMatrix { .. }));
            assert!(refused, "{name}: {stepped:?}");
        }
    }
}

#[test]
fn check_optimizer_refuses_a_users_optimizer_that_combines_elements() {
    on_ranks(1, |worker| {
        let net = sharded(worker, FsdpOptions::new())?;
        for (name, optimizer) in COMBINE_ELEMENTS {
            let checked = net.check_optimizer(&optimizer());
            let path = "embed.word.weight".into();
            assert_eq!(checked, Err(ScheduleError::OptimizerNeedsMatrix { path }.into()), "{name}");
        }
        Ok::<_, Error>(())
    });
}

#[test]
fn unsharded_parameters_the_option_and_whole_param_are_not_checked() {
    let no_shard = FsdpOptions::new().with_strategy(ShardingStrategy::NoShard);
    assert_eq!(train(2, no_shard, lamb), Ok(()));
    assert_eq!(train(2, FsdpOptions::new().with_optimizer_check(false), lamb), Ok(()));
    on_ranks(2, |worker| {
        let net = sharded(worker, FsdpOptions::new())?;
        let gradients = gradients(&net, worker)?;
        let lamb = lamb().with_grad_clipping(norm_clipping(1e-3).init());
        WholeParam::new(lamb).step(1e-3, net, gradients).map(drop)
    });
}

/// A learning rate of 0 in the first steps of a warm-up shows nothing.
#[test]
fn the_check_waits_for_a_learning_rate() {
    let steps = Arc::new(AtomicUsize::new(0));
    let counted = steps.clone();
    let failed = launch(launch_options(1), move |worker| {
        let mut net = sharded(&worker, FsdpOptions::new())?;
        let mut optimizer = lamb();
        for lr in [0.0, 0.0, 1e-3] {
            let gradients = gradients(&net, &worker)?;
            net = optimizer.step(lr, net, gradients);
            steps.fetch_add(1, Ordering::Relaxed);
        }
        Ok::<_, Error>(())
    });
    let error = failed.unwrap_err().to_string();
    assert!(error.contains("needs the whole matrix"), "{error}");
    assert_eq!(counted.load(Ordering::Relaxed), 2);
}

#[test]
fn accumulated_gradients_are_checked_and_foreign_ones_are_refused() {
    let failed = launch(launch_options(2), |worker| {
        let net = sharded(&worker, FsdpOptions::new())?;
        let mut accumulator = GradientsAccumulator::new();
        for _ in 0..2 {
            accumulator.accumulate(&net, gradients(&net, &worker)?);
        }
        let mut optimizer = AdamWConfig::new().init();
        for _ in 0..STEPS {
            optimizer.step(1e-3, net.clone(), accumulator.grads());
            accumulator.accumulate(&net, gradients(&net, &worker)?);
        }
        lamb().step(1e-3, net, accumulator.grads());
        Ok::<_, Error>(())
    });
    assert!(failed.is_ok(), "the first optimizer has passed, and clones share the check");
    let foreign = |check: bool| {
        launch(launch_options(2), move |worker| {
            let net = sharded(&worker, FsdpOptions::new())?;
            let mut optimizer = AdamWConfig::new().init();
            let (id, mut own) = (net.head.weight.id, GradientsParams::new());
            let gradient = gradients(&net, &worker)?.remove::<2>(id).expect("a shard");
            own.register(id, gradient);
            if check {
                net.check_optimizer(&optimizer)?;
            }
            optimizer.step(1e-3, net, own);
            Ok::<_, Error>(())
        })
    };
    let error = foreign(false).unwrap_err().to_string();
    assert!(error.contains("call `model.check_optimizer(&optimizer)?`"), "{error}");
    assert!(foreign(true).is_ok());
}

#[test]
fn check_optimizer_finds_groups_by_id_and_leaves_the_optimizer_as_it_is() {
    for world in [1, 2] {
        let errors = on_ranks(world, |worker| {
            let net = sharded(worker, FsdpOptions::new())?;
            for (_, optimizer) in ELEMENT_WISE {
                let optimizer = optimizer();
                net.check_optimizer(&optimizer)?;
                assert!(optimizer.to_record().is_empty());
            }
            let group = ParamGroup::from_ids(vec![net.head.weight.id]);
            let by_id = AdamWConfig::new().init().with_group(group, Largest { large: false }, None);
            let clips = AdamWConfig::new().with_grad_clipping(Some(norm_clipping(1.0))).init();
            Ok([by_id, clips].map(|optimizer| net.check_optimizer(&optimizer).unwrap_err()))
        });
        for [by_id, clips] in errors {
            let path = "head.weight".to_string();
            assert_eq!(by_id, ScheduleError::OptimizerNeedsMatrix { path }.into());
            assert!(matches!(clips, Error::Schedule(ScheduleError::OptimizerClipsByNorm { .. })));
        }
    }
}
