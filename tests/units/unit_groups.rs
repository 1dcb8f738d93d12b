//! Several fields as one unit, by `#[fsdp(unit = "name")]`: one all-gather and one reduction for all
//! of them, and the numbers of separate units.

mod recomputed;
mod tied;

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData, Tolerance};
use fsdp_runtime::memory::MemoryForecast;
use fsdp_runtime::model::{Counts, HookedForward};
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;
use fsdp_runtime::{Error, Mesh, Rank, WorldSize};

use crate::support::compare::{
    Within, assert_close, assert_parameters_close, assert_same_bits, assert_same_state,
};
use crate::support::ranks::launch_options;
use crate::support::trace::{only, record};
use crate::support::{of_rank_0, on_ranks};

const WIDTH: usize = 16;
const VOCABULARY: usize = 24;
const LENGTH: usize = 8;
const STEPS: usize = 3;

/// A unit between the fields of a group.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    up: Linear,
    down: Linear,
}

#[fsdp_unit]
impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        x.clone() + self.down.forward(gelu(self.up.forward(x)))
    }
}

fn linear(device: &Device) -> Linear {
    LinearConfig::new(WIDTH, WIDTH).init(device)
}

fn block(device: &Device) -> Block {
    Block { up: linear(device), down: linear(device) }
}

/// Defines a language model, with these attributes on the embedding, the norm and the head.
macro_rules! model {
    ($model:ident: $($unit:tt)*) => {
        #[derive(Module, Debug)]
        #[fsdp_unit(root)]
        struct $model {
            #[fsdp($($unit)*)]
            embed: Embedding,
            blocks: Vec<Block>,
            #[fsdp($($unit)*)]
            norm: LayerNorm,
            #[fsdp($($unit)*, key = "lm_head")]
            head: Linear,
            scale: Linear,
        }

        impl $model {
            fn new(device: &Device) -> Self {
                Self {
                    embed: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
                    blocks: (0..3).map(|_| block(device)).collect(),
                    norm: LayerNormConfig::new(WIDTH).init(device),
                    head: LinearConfig::new(WIDTH, VOCABULARY).init(device),
                    scale: linear(device),
                }
            }
        }

        #[fsdp_unit(field_units)]
        impl $model {
            fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
                let x = self.scale.forward(self.embed.forward(tokens));
                let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
                self.head.forward(self.norm.forward(x))
            }

            /// A forward without one of the fields, and with another twice.
            fn forward_part(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
                let x = self.embed.forward(tokens.clone()) + self.embed.forward(tokens.flip([1]));
                let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
                self.head.forward(x)
            }

            /// A forward that ends between two fields.
            fn forward_panics(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
                let x = self.embed.forward(tokens);
                assert!(x.dims()[0] == 0, "between two fields");
                self.head.forward(x)
            }

            /// A forward that reads a weight of the group between two calls.
            fn forward_value(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
                let x = self.embed.forward(tokens);
                let y = x.clone().matmul(self.head.weight.val().unsqueeze()).tanh().powf_scalar(2.0);
                let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
                self.head.forward(self.norm.forward(x)) + y.exp().tanh().sin().cos()
            }
        }
    };
}

model!(Separate: unit);
model!(Grouped: unit = "ends");

fn tokens(step: usize, rank: usize, device: &Device) -> Tensor<2, Int> {
    let value = |i: usize| ((i * 7 + step * 5 + rank * 3) % VOCABULARY) as i64;
    let data: Vec<i64> = (0..2 * LENGTH).map(value).collect();
    Tensor::from_data(TensorData::new(data, [2, LENGTH]), device)
}

fn loss(logits: Tensor<3>) -> Tensor<1> {
    (logits - 0.5).powf_scalar(2.0).mean()
}

/// What rank 0 has at the end of a run.
struct Outcome {
    losses: Vec<f32>,
    state: FullState,
    counts: Counts,
    gather_buffer_bytes: usize,
}

fn train<M: HookedForward + 'static>(
    world: usize,
    options: FsdpOptions,
    model: fn(&Device) -> M,
    forward: fn(&M, Tensor<2, Int>) -> Tensor<3>,
) -> Outcome {
    of_rank_0(world, move |worker| {
        let device = worker.device();
        let mut net = fully_shard(model(device), worker, options.clone().with_seed(5))?;
        let mut optimizer = AdamWConfig::new().init();
        let mut losses = Vec::new();
        for step in 0..STEPS {
            // Two micro-batches a step.
            let first = loss(forward(&net, tokens(step, worker.rank().index() + 7, device)));
            net.accumulate(first)?;
            let loss = loss(forward(&net, tokens(step, worker.rank().index(), device)));
            losses.push(loss.clone().into_scalar::<f32>());
            let grads: GradientsParams = net.backward(loss)?;
            net = optimizer.step(1e-2, net, grads);
        }
        let (counts, gather_buffer_bytes) =
            (net.stats().counts(), net.stats().gather_buffer_bytes());
        let state = net.state().full(Recipient::All)?;
        Ok(Outcome { losses, state, counts, gather_buffer_bytes })
    })
}

#[track_caller]
fn assert_same(found: &Outcome, expected: &Outcome) {
    assert!(expected.losses.iter().all(|loss| loss.is_finite()), "{:?}", expected.losses);
    assert_same_bits(&found.losses, &expected.losses, "losses");
    assert_same_state(&found.state, &expected.state, "parameters");
}

/// Compares runs whose sums of gradients round in different orders.
#[track_caller]
fn assert_near(found: &Outcome, expected: &Outcome) {
    assert_close(&found.losses, &expected.losses, Within::Relative(1e-5), "losses");
    let [found, expected] = [found, expected].map(|outcome| {
        let values = |data: &TensorData| data.try_to_vec::<f32>().expect("parameters are f32");
        outcome.state.iter().map(|(path, data)| (path.clone(), values(data))).collect()
    });
    assert_parameters_close(&found, &expected, Within::Absolute(1e-4), "parameters");
}

#[test]
fn a_group_has_the_bits_of_separate_units() {
    let accumulate = |how| FsdpOptions::new().with_gradient_accumulation(how);
    let options = [
        FsdpOptions::new(),
        FsdpOptions::new().with_strategy(ShardingStrategy::ShardGradOp),
        FsdpOptions::new().with_strategy(ShardingStrategy::NoShard),
        FsdpOptions::new().with_offload(OffloadPolicy::Params { pin_memory: false }),
        FsdpOptions::new().with_backward_prefetch(BackwardPrefetch::Post),
        FsdpOptions::new().with_reshard_after_backward(false),
        accumulate(GradientAccumulation::HoldUnsharded),
    ];
    for world in [1, 2, 3] {
        for options in &options[..if world == 2 { options.len() } else { 3 }] {
            let separate = train(world, options.clone(), Separate::new, Separate::forward);
            let grouped = train(world, options.clone(), Grouped::new, Grouped::forward);
            assert_same(&grouped, &separate);
            assert_eq!(grouped.counts.single_gathers, 0);
        }
    }
}

#[test]
fn a_group_is_gathered_once_in_forward_and_reduced_once() {
    let separate = train(2, FsdpOptions::new(), Separate::new, Separate::forward);
    let grouped = train(2, FsdpOptions::new(), Grouped::new, Grouped::forward);
    let passes = 2 * STEPS;
    // The root; three blocks; the group.
    assert_eq!(grouped.counts.reduce_scatters, passes * 5);
    assert_eq!(separate.counts.reduce_scatters, passes * 7);
    // Blocks are gathered twice in a pass. The root and the group, which runs last, stay gathered.
    assert_eq!(grouped.counts.all_gathers, passes * (1 + 2 * 3 + 1));
    assert_eq!(grouped.counts.mis_prefetches, 0);
    assert_eq!(grouped.counts.added_gather_buffers, 0);
}

#[test]
fn the_order_of_a_pass_has_the_group_around_the_units_between_its_fields() {
    on_ranks(2, |worker| {
        let device = worker.device();
        let options = FsdpOptions::new().with_forward_prefetch(false).with_seed(5);
        let net = fully_shard(Grouped::new(device), worker, options)?;
        let pass = || {
            let loss = loss(net.forward(tokens(0, 0, device)));
            net.backward(loss).map(drop)
        };
        pass()?;
        let (done, lines) = record(pass);
        done?;
        let lines = only(&lines, &["unshard", "reshard", "reduce_scatter"]);
        let of_group: Vec<_> = lines.iter().filter(|line| line.ends_with(" ends")).collect();
        assert_eq!(of_group, ["unshard ends", "reshard ends"], "{lines:?}");
        let at = |line: &str| lines.iter().position(|it| it == line).expect(line);
        assert!(at("unshard ends") < at("unshard blocks.0"), "{lines:?}");
        let last = lines.iter().rposition(|it| it == "reshard blocks.0").expect("a block");
        assert!(at("reshard ends") > last, "{lines:?}");
        Ok(())
    });
}

#[test]
fn checkpoint_keys_and_paths_are_those_of_the_fields() {
    let (names, units) = of_rank_0(2, |worker| {
        let net = fully_shard(Grouped::new(worker.device()), worker, FsdpOptions::new())?;
        let separate = fully_shard(Separate::new(worker.device()), worker, FsdpOptions::new())?;
        let names = [net.state().sharded(), separate.state().sharded()];
        let names = names.map(|state| state.keys().cloned().collect::<Vec<_>>());
        let units = net.stats().wrapping().units;
        Ok((names, units.into_iter().map(|unit| (unit.path, unit.ty)).collect::<Vec<_>>()))
    });
    assert_eq!(names[0], names[1]);
    assert!(names[0].iter().any(|name| name == "norm.gamma"), "{names:?}");
    let block = |i: usize| (format!("blocks.{i}"), "Block");
    let root = (String::new(), "Grouped");
    assert_eq!(units, [root, ("ends".to_string(), "ends"), block(0), block(1), block(2)]);
}

#[test]
fn a_field_may_be_left_out_or_run_twice() {
    for world in [1, 2] {
        let separate = train(world, FsdpOptions::new(), Separate::new, Separate::forward_part);
        let grouped = train(world, FsdpOptions::new(), Grouped::new, Grouped::forward_part);
        // A group sums the gradients of both runs before it reduces them.
        assert_near(&grouped, &separate);
        // The group is one call all the same: the forward of the root ends it. The root's own
        // parameters have no gradient.
        assert_eq!(grouped.counts.reduce_scatters, 2 * STEPS * 4);
        assert_eq!(grouped.counts.single_gathers, 0);
    }
}

/// A value between two calls lies outside of the group's forwards: its backward may come before the
/// group is gathered again.
#[test]
fn a_weight_that_is_read_between_two_calls_is_gathered_alone() {
    let separate = train(2, FsdpOptions::new(), Separate::new, Separate::forward_value);
    let grouped = train(2, FsdpOptions::new(), Grouped::new, Grouped::forward_value);
    assert_near(&grouped, &separate);
    assert_eq!(grouped.counts.single_gathers, 2 * STEPS);
}

#[test]
fn wrap_policies_take_a_group_as_a_whole() {
    let of_group = VOCABULARY * WIDTH + 2 * WIDTH + WIDTH * VOCABULARY + VOCABULARY;
    let of_block = 2 * (WIDTH * WIDTH + WIDTH);
    assert!(of_block < of_group);
    let annotated = train(2, FsdpOptions::new(), Separate::new, Separate::forward);
    let policies = [
        (WrapPolicy::SizeBased { min_num_params: of_block }, 5),
        (WrapPolicy::SizeBased { min_num_params: of_group }, 2),
        (WrapPolicy::SizeBased { min_num_params: of_group + 1 }, 1),
        (WrapPolicy::TransformerBased(unit_types![Block]), 4),
        (WrapPolicy::NoWrap, 1),
    ];
    for (policy, units) in policies {
        let options = FsdpOptions::new().with_wrap(policy);
        let wrapped = train(2, options, Grouped::new, Grouped::forward);
        assert_same(&wrapped, &annotated);
        assert_eq!(wrapped.counts.reduce_scatters, 2 * STEPS * units, "{policy:?}");
    }
}

#[test]
fn the_forecast_counts_the_buffers_of_a_group() {
    let outcome = train(2, FsdpOptions::new(), Grouped::new, Grouped::forward);
    let mesh = Mesh::new(Rank::ZERO, WorldSize::new(2).expect("two ranks"));
    let grouped = Grouped::new(&Device::flex());
    let options = FsdpOptions::new().with_seed(5);
    let forecast = MemoryForecast::new(&grouped, mesh, &options).expect("a forecast");
    assert_eq!(forecast.gathered, outcome.gather_buffer_bytes);
    // The root, two blocks at a time, and the group.
    let matrices = WIDTH * WIDTH + 2 * 2 * WIDTH * WIDTH + 2 * VOCABULARY * WIDTH;
    assert_eq!(outcome.gather_buffer_bytes, matrices * size_of::<f32>());
    let peaks = on_ranks(2, move |worker| {
        let device = worker.device();
        let net = fully_shard(Grouped::new(device), worker, FsdpOptions::new().with_seed(5))?;
        let loss = loss(net.forward(tokens(0, 0, device)));
        net.backward(loss)?;
        Ok(net.stats().memory().gradients.peak)
    });
    // The forecast counts the gradient of the embedding, which arrives last, from the beginning.
    let of_embedding = VOCABULARY * WIDTH * size_of::<f32>();
    for peak in peaks {
        assert!(peak <= forecast.gradients, "{peak} {}", forecast.gradients);
        assert!(peak + of_embedding >= forecast.gradients, "{peak} {}", forecast.gradients);
    }
}

#[test]
fn a_group_computes_in_the_precision_of_its_path() {
    let policy = MixedPrecisionPolicy::new()
        .with_param_dtype(FloatDType::BF16)
        .with_output_dtype(FloatDType::F32);
    let losses = |options: FsdpOptions| train(2, options, Grouped::new, Grouped::forward).losses;
    let plain = losses(FsdpOptions::new());
    let group = losses(FsdpOptions::new().with_mixed_precision_at(["ends"], policy));
    assert_ne!(plain, group, "the group computes in bf16");
    let repeated = losses(FsdpOptions::new().with_mixed_precision_at(["ends"], policy));
    assert_same_bits(&group, &repeated, "losses");
}

#[test]
fn a_frozen_field_of_a_group_stays_as_it_is() {
    fn frozen(device: &Device) -> Grouped {
        let net = Grouped::new(device);
        Grouped { norm: net.norm.clone().freeze(), embed: net.embed.clone().freeze(), ..net }
    }
    fn separate(device: &Device) -> Separate {
        let net = Separate::new(device);
        Separate { norm: net.norm.clone().freeze(), embed: net.embed.clone().freeze(), ..net }
    }
    let separate = train(2, FsdpOptions::new(), separate, Separate::forward);
    let grouped = train(2, FsdpOptions::new(), frozen, Grouped::forward);
    assert_same(&grouped, &separate);
}

/// Panics between two fields of a sharded model, and runs it again.
fn panic_between_two_fields<M: HookedForward + 'static>(
    model: fn(&Device) -> M,
    forward: fn(&M, Tensor<2, Int>) -> Tensor<3>,
    panics: fn(&M, Tensor<2, Int>) -> Tensor<3>,
) {
    of_rank_0(1, move |worker| {
        let device = worker.device();
        let net = fully_shard(model(device), worker, FsdpOptions::new().with_seed(5))?;
        let pass = || {
            let loss = loss(forward(&net, tokens(0, 0, device)));
            let value = loss.clone().into_scalar::<f32>();
            net.backward(loss).map(|_| value)
        };
        let before = pass()?;
        let run = || panics(&net, tokens(0, 0, device));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        assert!(panicked.is_err());
        assert_eq!(before, pass()?);
        Ok(())
    });
}

#[test]
fn a_panic_between_two_fields_ends_the_call() {
    panic_between_two_fields(Separate::new, Separate::forward, Separate::forward_panics);
    panic_between_two_fields(Grouped::new, Grouped::forward, Grouped::forward_panics);
}

/// A group outside of a launch of several ranks, without sharding.
#[test]
fn an_unsharded_model_runs_with_the_same_code() {
    let run = launch(launch_options(1), |worker| {
        let device = worker.device();
        let net = Grouped::new(device);
        let plain = net.forward(tokens(0, 0, device)).into_data();
        let options = FsdpOptions::new().with_strategy(ShardingStrategy::FullShard);
        let net = fully_shard(net, &worker, options)?;
        Ok::<_, Error>((plain, net.forward(tokens(0, 0, device)).into_data()))
    });
    let (plain, sharded) = run.expect("the rank succeeds").swap_remove(0);
    plain.assert_approx_eq::<f32>(&sharded, Tolerance::relative(1e-5));
}
