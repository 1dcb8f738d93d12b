//! The gradients of sums and their weights are those of one process on the whole batch.

use std::ops::Range;

use burn::module::{Module, ParamId};
use burn::optim::SgdConfig;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use fsdp_runtime::Error;
use fsdp_runtime::optim::GradScalerConfig;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::compare::{Within, assert_close, assert_same_bits, assert_same_state};
use crate::support::{Net, batch, of_rank_0, on_ranks};

mod errors;
mod ignored;

/// Rows of a micro-batch of a rank, counted or not.
const ROWS: usize = 6;
/// Counted rows of each micro-batch of each rank. Rank 2 counts none in a step of two micro-batches.
const COUNTED: [[usize; 3]; 4] = [[5, 0, 2], [0, 1, 6], [0, 0, 3], [3, 6, 1]];

/// One step of SGD on micro-batches with different numbers of counted rows.
#[derive(Clone, Debug)]
struct Step {
    world: usize,
    micro_batches: usize,
    counted: [[usize; 3]; 4],
    options: FsdpOptions,
    clip: Option<f64>,
    scale: Option<f32>,
    /// Multiplies sums and weights.
    factor: f64,
}

/// What a step's gradients are made of.
#[derive(Clone, Copy, Debug)]
enum Losses {
    /// `backward_sum` of each rank's sum.
    Sums,
    /// `backward` of each rank's mean, divided by the number of micro-batches.
    Means,
    /// `backward` of the mean over all rows, on one rank.
    Whole,
}

/// What a step has led to.
#[derive(Debug)]
struct Outcome {
    state: FullState,
    /// Norm of the gradients before clipping.
    norm: f64,
}

impl Step {
    fn new(world: usize, micro_batches: usize) -> Self {
        let options = FsdpOptions::new().with_seed(7);
        let (clip, scale) = (None, None);
        Self { world, micro_batches, counted: COUNTED, options, clip, scale, factor: 1.0 }
    }

    fn with(self, options: impl FnOnce(FsdpOptions) -> FsdpOptions) -> Self {
        Self { options: options(self.options), ..self }
    }

    /// Takes the step, and returns what rank 0 has.
    #[track_caller]
    fn take(&self, losses: Losses) -> Outcome {
        let (mut step, mut world) = (self.clone(), self.world);
        if matches!(losses, Losses::Whole) {
            // One rank has no replicas.
            step = step.with(|options| options.with_strategy(ShardingStrategy::FullShard));
            world = 1;
        }
        of_rank_0(world, move |worker| step.rank(worker, losses))
    }

    fn rank(&self, worker: &Worker, losses: Losses) -> Result<Outcome, Error> {
        let net = Net::new(2, 0.0, worker.device());
        let mut net = fully_shard(net, worker, self.options.clone())?;
        let scaler = self.scale.map(|scale| GradScalerConfig::new().with_init_scale(scale).init());
        let mut scaler = scaler.transpose()?;
        let scaled = |loss: Tensor<1>| match &scaler {
            Some(scaler) => scaler.scale(loss),
            None => loss,
        };
        let mut gradients = match losses {
            Losses::Whole => {
                let micro_batches = (0..self.world)
                    .flat_map(|rank| (0..self.micro_batches).map(move |at| (rank, at)));
                let counted: Vec<_> =
                    micro_batches.map(|(rank, at)| self.counted[rank][at]).collect();
                let (sum, weight) = sum(&net, 0, &counted);
                net.backward(scaled(sum.div_scalar(weight)))?
            }
            Losses::Sums | Losses::Means => {
                let rank = worker.rank().index();
                let loss = |at: usize| {
                    let first = (rank * self.micro_batches + at) * ROWS;
                    let (sum, weight) = sum(&net, first, &[self.counted[rank][at]]);
                    (scaled(sum.mul_scalar(self.factor)), weight * self.factor)
                };
                let last = self.micro_batches - 1;
                let mean = |(sum, weight): (Tensor<1>, f64)| {
                    sum.div_scalar(weight.max(1.0) * self.micro_batches as f64)
                };
                if matches!(losses, Losses::Sums) {
                    for at in 0..last {
                        let (sum, weight) = loss(at);
                        net.accumulate_sum(sum, weight)?;
                    }
                    let (sum, weight) = loss(last);
                    net.backward_sum(sum, weight)?
                } else {
                    for at in 0..last {
                        net.accumulate(mean(loss(at)))?;
                    }
                    net.backward(mean(loss(last)))?
                }
            }
        };
        if let Some(scaler) = &mut scaler {
            gradients = match scaler.unscale(&net, gradients)? {
                Unscaled::Finite(gradients) => gradients,
                Unscaled::Overflow => panic!("the gradients overflow"),
            };
        }
        let max_norm = self.clip.unwrap_or(f64::INFINITY);
        let norm = net.clip_grad_norm(&mut gradients, max_norm)?;
        // With this rate, the change of the parameters is the gradient.
        net = SgdConfig::new().init().step(1.0, net, gradients);
        Ok(Outcome { state: net.state().full(Recipient::All)?, norm })
    }

    /// Asserts that sums have the gradients of one process on the whole batch.
    #[track_caller]
    fn assert_equals_whole(&self, bound: f64) -> Outcome {
        let (found, expected) = (self.take(Losses::Sums), self.take(Losses::Whole));
        assert_close(&[found.norm], &[expected.norm], Within::Relative(bound), "norm");
        assert!(distance(&found.state, &expected.state) <= bound, "{self:?}");
        found
    }
}

/// Returns the sum of the losses of the counted rows, and their number. Each element of `counted` stands
/// for a micro-batch, whose first rows are counted. `first` is the first row.
fn sum(net: &Fsdp<Net>, first: usize, counted: &[usize]) -> (Tensor<1>, f64) {
    let device = net.head.weight.device();
    let rows: Range<usize> = first..first + counted.len() * ROWS;
    let mask = counted.iter().flat_map(|count| (0..ROWS).map(|row| f32::from(row < *count)));
    let mask: Vec<f32> = mask.collect();
    let weight = counted.iter().sum::<usize>() as f64;
    let (tokens, labels) = batch(0, rows, &device);
    (masked_sum(net.forward(tokens), labels, mask, &device), weight)
}

/// - logits: `[rows, classes]`
/// - labels: `[rows]`
/// - output: `[1]`
fn masked_sum(
    logits: Tensor<2>,
    labels: Tensor<1, Int>,
    mask: Vec<f32>,
    device: &Device,
) -> Tensor<1> {
    let losses = log_softmax(logits, 1).gather(1, labels.unsqueeze_dim(1)).neg();
    let shape = [mask.len(), 1];
    (losses * Tensor::<2>::from_data(TensorData::new(mask, shape), device)).sum()
}

/// Returns the largest difference of a parameter's element.
fn distance(one: &FullState, other: &FullState) -> f64 {
    assert!(!one.is_empty() && one.len() == other.len());
    let mut largest = 0f64;
    for (path, data) in one {
        assert_eq!(data.shape(), other[path].shape(), "{path}");
        for (a, b) in data.iter::<f64>().zip(other[path].iter::<f64>()) {
            assert!(a.is_finite() && b.is_finite(), "{path}");
            largest = largest.max((a - b).abs());
        }
    }
    largest
}

#[test]
fn sums_have_the_gradients_of_one_process_and_means_have_others() {
    for world in 1..=4 {
        for micro_batches in [1, 3] {
            let step = Step::new(world, micro_batches);
            step.assert_equals_whole(1e-6);
            let whole = step.take(Losses::Whole);
            let means = distance(&step.take(Losses::Means).state, &whole.state);
            let is_same = world == 1 && micro_batches == 1;
            assert_eq!(means > 1e-3, !is_same, "{world} ranks, {micro_batches} micro-batches");
        }
    }
}

#[test]
fn a_step_may_begin_with_micro_batches_without_a_counted_row() {
    let counted = [[0, 0, 2], [0, 0, 5], [0, 0, 0], [0, 0, 0]];
    for world in [1, 2, 4] {
        Step { counted, ..Step::new(world, 3) }.assert_equals_whole(1e-6);
    }
}

#[test]
fn gradients_are_clipped_by_the_norm_of_the_mean() {
    for world in [2, 3] {
        let step = Step { clip: Some(0.05), ..Step::new(world, 3) };
        let clipped = step.assert_equals_whole(1e-6);
        assert!(clipped.norm > 0.05, "the norm is above the bound: {}", clipped.norm);
    }
}

#[test]
fn replicas_held_gradients_recomputation_and_offload_change_no_gradient() {
    let hybrid = |options: FsdpOptions| {
        options.with_strategy(ShardingStrategy::HybridShard).with_shard_size(2)
    };
    let held = GradientAccumulation::HoldUnsharded;
    let variants: [fn(FsdpOptions) -> FsdpOptions; 3] = [
        |options| options.with_gradient_accumulation(GradientAccumulation::ReduceInGroup),
        |options| options.with_activation_checkpointing(ActivationCheckpointing::All),
        |options| options.with_offload(OffloadPolicy::Params { pin_memory: false }),
    ];
    Step::new(4, 3).with(hybrid).assert_equals_whole(1e-6);
    Step::new(4, 1).with(hybrid).assert_equals_whole(1e-6);
    Step::new(3, 3)
        .with(|options| options.with_gradient_accumulation(held))
        .assert_equals_whole(1e-6);
    for variant in variants {
        Step::new(4, 3).with(hybrid).with(variant).assert_equals_whole(1e-6);
    }
}

#[test]
fn strategies_agree_bit_for_bit() {
    for world in [1, 3, 4] {
        let step = |strategy| {
            Step { clip: Some(0.05), ..Step::new(world, 3) }
                .with(|options| options.with_strategy(strategy))
                .take(Losses::Sums)
        };
        let full = step(ShardingStrategy::FullShard);
        for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
            let other = step(strategy);
            assert_same_bits(&[other.norm], &[full.norm], "norms");
            assert_same_state(&other.state, &full.state, strategy);
        }
    }
}

#[test]
fn equal_weights_have_the_bits_of_the_plain_mean() {
    for world in [1, 2, 4] {
        let step = Step { counted: [[ROWS; 3]; 4], ..Step::new(world, 1) };
        let (sums, means) = (step.take(Losses::Sums), step.take(Losses::Means));
        assert_same_state(&sums.state, &means.state, "sums and means");
    }
}

#[test]
fn the_gradient_divide_factor_has_no_effect() {
    for factor in [1.0, 3.0, 0.5] {
        let step = Step::new(3, 3);
        let plain = step.take(Losses::Sums);
        let set = step.with(|options| options.with_gradient_divide_factor(factor));
        assert_same_state(&set.take(Losses::Sums).state, &plain.state, factor);
    }
}

/// A scale that is a power of two changes no bit.
#[test]
fn a_loss_scale_is_that_of_the_sum() {
    for micro_batches in [1, 3] {
        let step = Step::new(3, micro_batches);
        let scaled = Step { scale: Some(1024.0), ..step.clone() };
        let (plain, scaled) = (step.take(Losses::Sums), scaled.take(Losses::Sums));
        assert_same_state(&scaled.state, &plain.state, "scaled");
    }
}

/// Sums of a million losses overflow f16, their mean does not.
#[test]
fn large_sums_do_not_overflow_in_half_precision() {
    let policy = MixedPrecisionPolicy::new()
        .with_param_dtype(FloatDType::F16)
        .with_reduce_dtype(FloatDType::F16)
        .with_output_dtype(FloatDType::F32);
    for micro_batches in [1, 3] {
        let step = Step { factor: 1e6, scale: Some(1024.0), ..Step::new(3, micro_batches) };
        step.with(|options| options.with_mixed_precision(policy)).assert_equals_whole(5e-3);
    }
}

/// The hook on gradients gets those of the mean.
#[test]
fn a_hook_gets_the_gradients_that_are_returned() {
    on_ranks(2, |worker| {
        let options = FsdpOptions::new().with_seed(7);
        let mut net = fully_shard(Net::new(1, 0.0, worker.device()), worker, options)?;
        let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::<f32>::new()));
        let hooked = seen.clone();
        net.set_gradient_hook(move |of, gradient| {
            if of.path == "head.bias" {
                hooked.lock().unwrap().extend(gradient.to_data().iter::<f32>());
            }
            gradient
        });
        let count = [[5, 1], [2, 4]][worker.rank().index()];
        let (first, weight) = sum(&net, 0, &count[..1]);
        net.accumulate_sum(first, weight)?;
        let (second, weight) = sum(&net, ROWS, &count[1..]);
        let gradients = net.backward_sum(second, weight)?;
        let bias: ParamId = net.head.bias.as_ref().expect("a bias").id;
        let returned = gradients.get::<1>(bias).expect("a gradient").into_data();
        let returned: Vec<f32> = returned.iter().collect();
        assert_same_bits(&seen.lock().unwrap(), &returned, "hooked");
        assert!(net.num_params() > 0);
        Ok(())
    });
}
