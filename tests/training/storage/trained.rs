//! Trained parameters that are stored in bf16, and rounded at random after each step.

use burn::optim::SgdConfig;
use burn::tensor::{FloatDType, Tensor};
use fsdp_runtime::Mesh;
use fsdp_runtime::memory::MemoryForecast;
use fsdp_runtime::prelude::*;

use super::model::Run;
use super::{assert_as_forecast, assert_same, assert_whole_matrices_are_stepped};
use crate::support::checkpoint::{Part, resumed};
use crate::support::compare::{Within, assert_close, assert_same_bits, assert_same_state};
use crate::support::mlp::{Sizes, loss};
use crate::support::small::Weight;
use crate::support::{of_rank_0, on_ranks};

/// Everything in bf16, and the frozen matrices in `frozen`.
fn options(frozen: StorageType) -> FsdpOptions {
    let policy = StoragePolicy::new().with_trained(StorageType::Bf16).with_frozen(frozen);
    FsdpOptions::new().with_storage(policy).with_seed(3)
}

const FROZEN: [StorageType; 3] = [StorageType::F32, StorageType::Bf16, StorageType::NF4];

/// Every rank has the same rows, so that the mean of the gradients does not round on 1, 2 and 4 ranks.
#[test]
fn the_rounding_does_not_depend_on_the_world() {
    let run =
        |world| Run { same_rows: true, clip: None, ..Run::new(world, options(StorageType::NF4)) };
    for world in [2, 4] {
        assert_same(&run(world), &run(1));
    }
    let other = Run { options: options(StorageType::NF4).with_seed(4), ..run(1) };
    assert_ne!(other.launch().losses, run(1).launch().losses, "another seed rounds otherwise");
}

#[test]
fn the_rounding_does_not_depend_on_strategy_schedule_offload_and_wrapping() {
    for frozen in FROZEN {
        let options = || options(frozen);
        let full = Run { clip: None, ..Run::new(2, options()) };
        for options in [
            options().with_strategy(ShardingStrategy::ShardGradOp),
            options().with_strategy(ShardingStrategy::NoShard),
            options().with_wrap(WrapPolicy::NoWrap),
            options().with_gather_buffers(1),
            options().with_reshard_after_forward(ReshardAfterForward::To(2)),
            options().with_offload(OffloadPolicy::Params { pin_memory: false }),
            options().with_offload(OffloadPolicy::OptimizerOnly),
            options().with_activation_checkpointing(ActivationCheckpointing::All),
            options()
                .with_strategy(ShardingStrategy::NoShard)
                .with_offload(OffloadPolicy::Params { pin_memory: false }),
        ] {
            assert_same(&Run { options, ..full.clone() }, &full);
        }
    }
    let persistent = options(StorageType::Bf16).with_persist_below(2000);
    let full = Run { clip: None, ..Run::new(3, options(StorageType::Bf16)) };
    assert_same(&Run { options: persistent, ..full.clone() }, &full);
}

#[test]
fn whole_matrix_optimizers_round_as_well() {
    assert_whole_matrices_are_stepped(&options(StorageType::NF4));
}

/// Trains [`Weight`], all ones, with gradients of 1. Returns the matrix and the vector.
fn steps(world: usize, steps: usize, learning_rate: f64) -> [Vec<f32>; 2] {
    of_rank_0(world, move |worker| {
        let device = worker.device();
        let ones = Weight::new(Tensor::ones([64, 128], device), 1.0);
        let mut net = fully_shard(ones, worker, options(StorageType::F32))?;
        let mut optimizer = SgdConfig::new().init();
        for _ in 0..steps {
            let output = net.forward(Tensor::ones([64, 128], device));
            // The gradient of the row is the sum over 64 rows.
            let grads = net.backward(output.sum())?;
            net = optimizer.step(learning_rate, net, grads);
        }
        let state = net.state().full(Recipient::All)?;
        Ok(["weight", "row"].map(|path| state[path].iter().collect()))
    })
}

fn mean(elements: &[f32]) -> f64 {
    elements.iter().map(|x| f64::from(*x)).sum::<f64>() / elements.len() as f64
}

/// Each step subtracts a quarter of a unit of the last place. Rounding to the nearest would not change a
/// single element.
#[test]
fn small_updates_are_kept_in_the_mean() {
    let rate = 1e-3;
    assert_eq!(half::bf16::from_f32(1.0 - rate as f32), half::bf16::ONE);
    for world in [1, 2] {
        let [weight, _] = steps(world, 200, rate);
        // Five standard deviations of the mean of 8,192 elements.
        assert!((mean(&weight) - 0.8).abs() < 1.5e-3, "{}", mean(&weight));
        let distinct: std::collections::BTreeSet<u32> =
            weight.iter().map(|x| x.to_bits()).collect();
        assert!(distinct.len() > 10, "elements are rounded independently");
        assert!(weight.iter().all(|x| half::bf16::from_f32(*x).to_f32() == *x), "bf16");
        let [_, row] = steps(world, 100, rate / 64.0);
        // Vectors are replicated: 128 elements.
        assert!((mean(&row) - 0.9).abs() < 9e-3, "{}", mean(&row));
        let [weight, row] = steps(world, 3, 0.0);
        assert!(weight.iter().chain(&row).all(|x| *x == 1.0), "a step of 0 changes nothing");
    }
}

const SIZES: Sizes = Sizes { blocks: 2, width: 128, hidden: 384, outputs: 128 };

/// Returns the bytes that all ranks store, and those that they send in a forward.
fn bytes(world: usize, options: FsdpOptions) -> (usize, usize) {
    let ranks = on_ranks(world, move |worker| {
        let model = SIZES.init(worker.device());
        let forecast =
            MemoryForecast::new(&model, Mesh::new(worker.rank(), worker.world()), &options)?;
        let model = fully_shard(model, worker, options.clone())?;
        model.forward(Tensor::ones([2, SIZES.width], worker.device()));
        let stored = model.stats().sharded_bytes();
        assert_eq!(forecast.shards + forecast.replicated, stored);
        let memory = model.stats().memory();
        assert_eq!(memory.shards.now + memory.replicated.now, stored);
        Ok((stored, model.stats().counts().sent_bytes))
    });
    ranks.into_iter().fold((0, 0), |sum, rank| (sum.0 + rank.0, sum.1 + rank.1))
}

#[test]
fn bytes_that_are_stored_and_sent_are_half() {
    let plain = FsdpOptions::new().with_seed(3);
    for world in [1, 2, 4] {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
            let of = |options: &FsdpOptions| bytes(world, options.clone().with_strategy(strategy));
            let (stored, sent) = of(&plain);
            assert_eq!(of(&options(StorageType::F32)), (stored / 2, sent / 2), "{world}");
        }
    }
}

#[test]
fn memory_is_as_forecast() {
    // Of parameters in f32 the forecast does not know whether they are frozen.
    for frozen in [StorageType::Bf16, StorageType::NF4] {
        let options = options(frozen);
        for strategy in
            [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard]
        {
            assert_as_forecast(2, options.clone().with_strategy(strategy));
        }
        assert_as_forecast(2, options.clone().with_offload(OffloadPolicy::OptimizerOnly));
        assert_as_forecast(2, options.with_offload(OffloadPolicy::Params { pin_memory: false }));
    }
    // Rank 1 owns nearly all trained elements of the first unit, whose gradients arrive last.
    let half = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    for frozen in [StorageType::Bf16, StorageType::NF4] {
        let ranks = assert_as_forecast(2, options(frozen).with_mixed_precision(half));
        let (found, expected): (Vec<usize>, Vec<usize>) = ranks.into_iter().unzip();
        assert_eq!(found, expected, "{frozen}");
    }
}

/// An optimizer steps a copy in f32 of one parameter at a time.
#[test]
fn the_copy_that_is_stepped_is_counted() {
    for offload in [OffloadPolicy::None, OffloadPolicy::Params { pin_memory: false }] {
        on_ranks(2, move |worker| {
            let options = options(StorageType::F32).with_offload(offload);
            let model = SIZES.init(worker.device());
            let mesh = Mesh::new(worker.rank(), worker.world());
            let forecast = MemoryForecast::new(&model, mesh, &options)?.with_optimizer(0);
            let mut model = fully_shard(model, worker, options)?;
            let output = model.forward(Tensor::ones([2, SIZES.width], worker.device()));
            let grads = model.backward(loss(output))?;
            model = SgdConfig::new().init().step(1e-3, model, grads);
            let (device, host) = (model.stats().memory(), model.stats().host_memory());
            let most = (device.optimizer.peak, host.optimizer.peak);
            assert_eq!(most, (forecast.optimizer, forecast.host.optimizer));
            assert_eq!(most.0 + most.1, SIZES.width * SIZES.hidden * 4);
            assert_eq!((device.optimizer.now, host.optimizer.now), (0, 0));
            Ok(())
        });
    }
}

/// A unit that computes in bf16 is gathered without a cast.
#[test]
fn a_unit_in_half_precision_is_gathered_as_it_is_stored() {
    let half = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    on_ranks(2, move |worker| {
        let options = options(StorageType::Bf16).with_mixed_precision(half);
        let model = fully_shard(SIZES.init(worker.device()), worker, options)?;
        let loss = loss(model.forward(Tensor::ones([2, SIZES.width], worker.device())));
        model.backward(loss)?;
        let memory = model.stats().memory();
        // No buffer of codes, and no copy of a shard.
        assert_eq!(memory.gathered.peak, model.stats().gather_buffer_bytes());
        let padded = |matrix: usize| matrix * 2;
        let block = padded(2 * SIZES.width * SIZES.hidden);
        assert_eq!(memory.gathered.peak, 2 * block + padded(SIZES.width * SIZES.outputs));
        Ok(())
    });
}

#[test]
fn a_resumed_run_continues_to_the_bit() {
    let part = |world| Part::new(world).dropout(0.1).options(options(StorageType::F32));
    for world in [1, 2, 3] {
        let (losses, state) = part(world).until(12).launch();
        let (found, found_state) = resumed(part(world).until(6), part(world).until(12));
        assert_same_bits(&found, &losses, format_args!("{world} ranks"));
        assert_same_state(&found_state, &state, format_args!("{world} ranks"));
    }
    // Another strategy continues with the same bits.
    let to = part(2).with_strategy(ShardingStrategy::NoShard);
    let (losses, state) = part(2).until(12).launch();
    let (found, found_state) = resumed(part(2).until(6), to.until(12));
    assert_same_bits(&found, &losses, "to NO_SHARD");
    assert_same_state(&found_state, &state, "to NO_SHARD");
    // Another number of ranks sums gradients in another order, which may round an element otherwise.
    let part = |world| part(world).dropout(0.0);
    let (losses, _) = part(2).until(12).launch();
    let (found, _) = resumed(part(2).until(6), part(3).until(12));
    assert_close(&found, &losses, Within::Absolute(2e-3), "from 2 ranks to 3");
}

#[test]
fn losses_fall_as_in_f32() {
    let run = |options| Run { steps: 25, same_rows: true, ..Run::new(2, options) }.launch().losses;
    let (plain, half) = (run(FsdpOptions::new()), run(options(StorageType::F32)));
    let last = |losses: &[f64]| losses[15..].iter().sum::<f64>() / 10.0;
    assert!(last(&half) < 0.85 * half[0], "{half:?}");
    assert!((last(&half) - last(&plain)).abs() < 0.05, "{half:?} {plain:?}");
}
