//! All-gathers and reductions in 8 bits: their errors, their bytes, and what they depend on.

use burn::tensor::{FloatDType, Tensor, TensorData};
use fsdp_runtime::errors::ShardError;
use fsdp_runtime::model::Counts;
use fsdp_runtime::prelude::*;

use crate::storage::assert_as_forecast;
use crate::storage::model::Run;
use crate::support::compare::{assert_same_bits, assert_same_state};
use crate::support::mlp::{Sizes, loss};
use crate::support::small::Weight;
use crate::support::transformer::Net;
use crate::support::{of_rank_0, on_ranks};

const ROWS: usize = 64;
const WIDTH: usize = 130;
const BLOCK: usize = 64;

/// The largest error of an element, as a share of the largest magnitude of its block: half a step of
/// 1/127, and the rounding of three products in f32.
const ERROR: f64 = 1.0 / 254.0 + 1e-6;

fn numbers(seed: usize) -> Vec<f32> {
    let number = |i: usize| {
        let size = [1.0, 1e-3, 30.0, 0.0][i / 50 % 4];
        ((i * 7919 + seed * 104_729) as f32 * 0.37).sin() * size
    };
    (0..ROWS * WIDTH).map(number).collect()
}

fn matrix(seed: usize, worker: &Worker) -> Tensor<2> {
    Tensor::from_data(TensorData::new(numbers(seed), [ROWS, WIDTH]), worker.device())
}

fn sharded(worker: &Worker, options: FsdpOptions) -> Result<Fsdp<Weight>, fsdp_runtime::Error> {
    fully_shard(Weight::new(matrix(0, worker), 0.0), worker, options)
}

/// Returns the matrix as a forward has it.
fn gathered(world: usize, options: FsdpOptions) -> Vec<f32> {
    of_rank_0(world, move |worker| {
        let net = sharded(worker, options.clone())?;
        let ones = Tensor::<2>::ones([ROWS, WIDTH], worker.device());
        Ok(net.forward(ones).into_data().iter().collect())
    })
}

/// Returns the largest magnitude of each element's block.
fn scales(elements: &[f32]) -> Vec<f64> {
    let scale = |block: &[f32]| {
        let largest = block.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        vec![f64::from(largest); block.len()]
    };
    elements.chunks(BLOCK).flat_map(scale).collect()
}

fn gathers() -> FsdpOptions {
    FsdpOptions::new().with_quantized_gathers(Some(BLOCK))
}

fn reductions() -> FsdpOptions {
    FsdpOptions::new().with_quantized_reductions(Some(BLOCK))
}

#[test]
fn a_gathered_element_is_within_the_stated_error() {
    let exact = numbers(0);
    let found = gathered(2, gathers());
    let mut most = 0.0f64;
    for ((found, exact), scale) in found.iter().zip(&exact).zip(scales(&exact)) {
        let error = (f64::from(*found) - f64::from(*exact)).abs();
        assert!(error <= ERROR * scale, "{found} {exact} {scale}");
        most = most.max(error / scale.max(f64::MIN_POSITIVE));
    }
    assert!(most > 0.9 / 254.0, "the bound is nearly reached: {most}");
    assert_eq!(gathered(2, FsdpOptions::new()), exact, "off by default");
}

#[test]
fn gathered_values_do_not_depend_on_world_and_strategy() {
    let expected = gathered(1, gathers());
    for world in [2, 3, 4] {
        assert_eq!(gathered(world, gathers()), expected, "{world}");
    }
    for options in [
        gathers().with_strategy(ShardingStrategy::ShardGradOp),
        gathers().with_strategy(ShardingStrategy::HybridShard).with_shard_size(2),
        gathers().with_offload(OffloadPolicy::Params { pin_memory: false }),
        gathers().with_offload(OffloadPolicy::OptimizerOnly),
    ] {
        assert_eq!(gathered(4, options.clone()), expected, "{options:?}");
    }
    let none = gathers().with_strategy(ShardingStrategy::NoShard);
    assert_eq!(gathered(2, none), numbers(0), "nothing is gathered");
}

/// Returns the mean gradient of the matrix, where rank `r` has the gradient `numbers(r + 1)`.
fn mean_gradient(world: usize, options: FsdpOptions) -> Vec<f32> {
    let ranks = on_ranks(world, move |worker| {
        let net = sharded(worker, options.clone())?;
        let output = net.forward(matrix(worker.rank().index() + 1, worker));
        let grads = net.backward(output.sum())?;
        let range = net.state().sharded()["weight"].range.clone();
        let own = grads.get::<2>(net.weight.id).map(|grad| grad.into_data());
        let own: Vec<f32> = own.map(|data| data.iter().collect()).unwrap_or_default();
        Ok((range, own))
    });
    let mut full = vec![f32::NAN; ROWS * WIDTH];
    for (range, own) in ranks {
        full[range.clone()].copy_from_slice(&own[..range.len()]);
    }
    full
}

#[test]
fn a_reduced_gradient_is_within_the_stated_error() {
    for world in [2, 3, 4] {
        let exact = mean_gradient(world, FsdpOptions::new());
        let found = mean_gradient(world, reductions());
        let scales: Vec<_> = (1..=world).map(|seed| scales(&numbers(seed))).collect();
        for (at, (found, exact)) in found.iter().zip(&exact).enumerate() {
            let scale = scales.iter().map(|scales| scales[at]).sum::<f64>() / world as f64;
            let error = (f64::from(*found) - f64::from(*exact)).abs();
            assert!(error <= ERROR * scale + 1e-6 * f64::from(exact.abs()), "{found} {exact}");
        }
        assert_ne!(found, exact);
        for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::FullShard] {
            let options = reductions().with_strategy(strategy);
            assert_eq!(mean_gradient(world, options), found, "{strategy}");
        }
    }
    // One rank sends nothing, and under `NO_SHARD` the gradient is replicated.
    assert_eq!(mean_gradient(1, reductions()), mean_gradient(1, FsdpOptions::new()));
    let none = |options: FsdpOptions| options.with_strategy(ShardingStrategy::NoShard);
    assert_eq!(mean_gradient(2, none(reductions())), mean_gradient(2, none(FsdpOptions::new())));
}

const SIZES: Sizes = Sizes { blocks: 2, width: 128, hidden: 384, outputs: 128 };

fn counts(world: usize, options: FsdpOptions) -> Counts {
    let counts = on_ranks(world, move |worker| {
        let model = fully_shard(SIZES.init(worker.device()), worker, options.clone())?;
        let output = model.forward(Tensor::ones([2, SIZES.width], worker.device()));
        model.backward(loss(output))?;
        Ok(model.stats().counts())
    });
    counts
        .into_iter()
        .reduce(|mut sum, counts| {
            sum.sent_bytes += counts.sent_bytes;
            sum.sent_gradient_bytes += counts.sent_gradient_bytes;
            sum
        })
        .unwrap()
}

#[test]
fn sent_bytes_show_the_saving() {
    for world in [2, 4] {
        let plain = counts(world, FsdpOptions::new().with_seed(1));
        let coded = counts(world, gathers().with_quantized_reductions(Some(BLOCK)).with_seed(1));
        // 8 bits and 1/64 of 32 bits.
        assert_eq!(coded.sent_bytes * 64, plain.sent_bytes * 17);
        let matrices = SIZES.blocks * 2 * SIZES.width * SIZES.hidden + SIZES.width * SIZES.outputs;
        let vectors = SIZES.blocks * (SIZES.hidden + SIZES.width) + SIZES.outputs;
        assert_eq!(plain.sent_gradient_bytes, world * 4 * (matrices + vectors));
        assert_eq!(coded.sent_gradient_bytes, world * (matrices / 64 * 68 + 4 * vectors));
    }
}

fn both(options: FsdpOptions) -> FsdpOptions {
    options.with_quantized_gathers(Some(BLOCK)).with_quantized_reductions(Some(128)).with_seed(3)
}

fn assert_same(found: &Run, expected: &Run) {
    let (a, b) = (found.launch(), expected.launch());
    assert_same_bits(&a.losses, &b.losses, format_args!("{found:?}"));
    assert_same_state(&a.state, &b.state, format_args!("{found:?}"));
}

/// Codes of frozen matrices and trained parameters in bf16 are in the units as well.
#[test]
fn options_of_schedule_and_offload_change_no_bit() {
    let half = StoragePolicy::new().with_trained(StorageType::Bf16).with_frozen(StorageType::NF4);
    for storage in [StoragePolicy::new(), half] {
        let options = || both(FsdpOptions::new()).with_storage(storage);
        let full = Run::new(4, options());
        for options in [
            options().with_strategy(ShardingStrategy::ShardGradOp),
            options().with_gather_buffers(1),
            options().with_reshard_after_forward(ReshardAfterForward::To(2)),
            options().with_offload(OffloadPolicy::Params { pin_memory: false }),
            options().with_offload(OffloadPolicy::OptimizerOnly),
            options().with_activation_checkpointing(ActivationCheckpointing::All),
            options().with_reductions_in_flight(2),
        ] {
            assert_same(&Run { options, ..full.clone() }, &full);
        }
        let [shard, zero2] = [ShardingStrategy::HybridShard, ShardingStrategy::HybridShardZero2]
            .map(|strategy| options().with_strategy(strategy).with_shard_size(2));
        assert_same(&Run::new(4, shard), &Run::new(4, zero2));
    }
}

#[test]
fn losses_fall_as_without_codes() {
    let run = |options| Run { steps: 25, same_rows: true, ..Run::new(2, options) }.launch().losses;
    let (plain, coded) = (run(FsdpOptions::new()), run(both(FsdpOptions::new())));
    let last = |losses: &[f64]| losses[15..].iter().sum::<f64>() / 10.0;
    assert!(last(&coded) < 0.85 * coded[0], "{coded:?}");
    assert!((last(&coded) - last(&plain)).abs() < 0.05, "{coded:?} {plain:?}");
    assert_ne!(plain, coded);
}

#[test]
fn memory_is_as_forecast() {
    let half = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    let options = || both(FsdpOptions::new());
    for options in [
        options(),
        options().with_strategy(ShardingStrategy::ShardGradOp),
        options().with_strategy(ShardingStrategy::NoShard),
        options().with_mixed_precision(half),
        options().with_offload(OffloadPolicy::OptimizerOnly),
        options().with_offload(OffloadPolicy::Params { pin_memory: false }),
    ] {
        let frozen = StoragePolicy::new().with_frozen(StorageType::NF4);
        assert_as_forecast(2, options.with_storage(frozen));
    }
}

/// A parameter has its exact values where it is stored, and in a full state.
#[test]
fn only_forwards_have_rounded_values() {
    on_ranks(2, |worker| {
        let net = sharded(worker, gathers())?;
        let state = net.state().full(Recipient::All)?;
        assert_eq!(state["weight"].iter::<f32>().collect::<Vec<_>>(), numbers(0));
        assert_eq!(net.weight.val().into_data().iter::<f32>().collect::<Vec<_>>(), numbers(0));
        net.backward(net.forward(matrix(1, worker)).sum())?;
        let after = net.state().full(Recipient::All)?;
        assert_same_state(&after, &state, "after a pass");
        Ok(())
    });
}

#[test]
fn blocks_are_checked() {
    of_rank_0(1, |worker| {
        for (name, options) in [
            ("quantized_gathers", FsdpOptions::new().with_quantized_gathers(Some(96))),
            ("quantized_reductions", FsdpOptions::new().with_quantized_reductions(Some(0))),
        ] {
            let net = Net::new(1, 0.0, worker.device());
            let error = fully_shard(net, worker, options).unwrap_err();
            let fsdp_runtime::Error::Shard(ShardError::InvalidOption { option, expected, .. }) =
                error
            else {
                panic!("{error}")
            };
            assert_eq!(option, name);
            assert!(expected.contains("4096"), "{expected}");
        }
        Ok(())
    });
}
