//! Parameters that are stored in bf16 and in codes: the results depend on the storage type alone, and
//! not on worlds, strategies and other options.

mod matrix;
pub mod model;
mod trained;
mod values;

use burn::optim::{LambConfig, ModuleOptimizer};
use burn::tensor::FloatDType;
use fsdp_runtime::Mesh;
use fsdp_runtime::errors::{ScheduleError, ShardError};
use fsdp_runtime::memory::MemoryForecast;
use fsdp_runtime::prelude::*;
use model::{BLOCKS, Block, Embed, Net, Run, mixed, partly};

use crate::support::compare::{assert_same_bits, assert_same_state};
use crate::support::{mlp, of_rank_0, on_ranks};

/// The storage types that are tested.
pub const TYPES: [StorageType; 5] = [
    StorageType::Bf16,
    StorageType::INT8,
    StorageType::NF4,
    StorageType::Nf4 { block: 64, double_quant: false },
    StorageType::Int8 { block: 256 },
];

fn options(storage: StorageType) -> FsdpOptions {
    FsdpOptions::new().with_storage(StoragePolicy::new().with_frozen(storage))
}

/// Every rank has the same rows, so that the mean of the gradients does not round on 1, 2 and 4 ranks.
/// Gradients are not clipped: a norm is summed shard by shard, so its last bits depend on the world.
#[test]
fn losses_and_values_do_not_depend_on_the_world() {
    for storage in TYPES {
        let run = |world, steps| {
            let run = Run::new(world, options(storage));
            Run { steps, same_rows: true, clip: None, ..run }.launch()
        };
        let (one, first) = (run(1, 3), run(1, 1));
        for world in [2, 4] {
            let found = run(world, 3);
            assert_same_bits(&found.losses, &one.losses, format_args!("{storage} on {world}"));
            assert_same_state(&found.state, &one.state, format_args!("{storage} on {world}"));
        }
        let three = run(3, 1);
        assert_same_bits(&three.losses, &first.losses, format_args!("{storage} on 3"));
        let frozen = |path: &str| path.ends_with("up.weight");
        let values = three.state.iter().filter(|(path, _)| frozen(path));
        assert_eq!(values.clone().count(), BLOCKS);
        for (path, values) in values {
            assert_eq!(values.as_bytes(), first.state[path].as_bytes(), "{storage}: {path}");
        }
        let plain = Run::new(1, FsdpOptions::new());
        let plain = Run { same_rows: true, clip: None, ..plain }.launch();
        assert_ne!(plain.losses, one.losses, "{storage} rounds");
    }
}

fn assert_same(found: &Run, expected: &Run) {
    let (a, b) = (found.launch(), expected.launch());
    assert_same_bits(&a.losses, &b.losses, format_args!("{found:?}"));
    if expected.clip.is_some() {
        assert_same_bits(&a.norms, &b.norms, format_args!("norms, {found:?}"));
    }
    assert_same_state(&a.state, &b.state, format_args!("{found:?}"));
}

#[test]
fn strategies_agree_bit_for_bit() {
    for storage in TYPES {
        for world in [1, 2, 3] {
            let full = Run::new(world, options(storage));
            for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
                let options = full.options.clone().with_strategy(strategy);
                assert_same(&Run { options, ..full.clone() }, &full);
            }
        }
    }
    // Hybrid strategies sum in another order.
    let [shard, zero2] = [ShardingStrategy::HybridShard, ShardingStrategy::HybridShardZero2]
        .map(|strategy| options(StorageType::NF4).with_strategy(strategy).with_shard_size(2));
    assert_same(&Run::new(4, shard), &Run::new(4, zero2));
}

#[test]
fn options_of_schedule_offload_and_wrapping_change_no_bit() {
    for storage in [StorageType::Bf16, StorageType::NF4] {
        let options = || options(storage).with_seed(3);
        let full = Run::new(4, options());
        for options in [
            options().with_reshard_after_forward(ReshardAfterForward::To(2)),
            options().with_gather_buffers(1),
            options().with_gather_buffers(3),
            options().with_forward_prefetch(false).with_backward_prefetch(BackwardPrefetch::None),
            options().with_offload(OffloadPolicy::Params { pin_memory: false }),
            options().with_offload(OffloadPolicy::OptimizerOnly),
            options().with_activation_checkpointing(ActivationCheckpointing::All),
            options()
                .with_strategy(ShardingStrategy::NoShard)
                .with_offload(OffloadPolicy::Params { pin_memory: false }),
            options()
                .with_reshard_after_forward(ReshardAfterForward::To(2))
                .with_activation_checkpointing(ActivationCheckpointing::All),
        ] {
            assert_same(&Run { options, ..full.clone() }, &full);
        }
    }
}

/// The gradient norm is summed in the order of the layout, so that gradients are not clipped here.
#[test]
fn wrapping_changes_no_bit() {
    for storage in TYPES {
        let options = || options(storage).with_seed(3);
        let full = Run { clip: None, ..Run::new(2, options()) };
        for options in [options().with_wrap(WrapPolicy::NoWrap), options().with_persist_below(100)]
        {
            let (found, full) = (Run { options, ..full.clone() }.launch(), full.launch());
            assert_same_bits(&found.losses, &full.losses, format_args!("{storage}"));
            assert_same_state(&found.state, &full.state, format_args!("{storage}"));
        }
    }
}

/// In half precision a bf16 base is gathered as it is, and codes are decoded to bf16.
#[test]
fn strategies_agree_in_half_precision() {
    let half = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    for storage in TYPES {
        let full = Run::new(2, options(storage).with_mixed_precision(half));
        let options = full.options.clone().with_strategy(ShardingStrategy::NoShard);
        assert_same(&Run { options, ..full.clone() }, &full);
    }
}

/// Asserts that an optimizer of whole matrices has the same results sharded and not sharded.
fn assert_whole_matrices_are_stepped(options: &FsdpOptions) {
    let lamb: fn() -> ModuleOptimizer = || LambConfig::new().init();
    for world in [1, 2, 3] {
        let full = Run { whole: Some(lamb), ..Run::new(world, options.clone()) };
        let options = full.options.clone().with_strategy(ShardingStrategy::NoShard);
        assert_same(&full, &Run { options, ..full.clone() });
    }
}

#[test]
fn whole_matrix_optimizers_step_the_trained_parameters() {
    assert_whole_matrices_are_stepped(&options(StorageType::NF4));
}

#[test]
fn policies_of_certain_units_and_paths_replace_the_general_one() {
    of_rank_0(2, |worker| {
        let policy = |storage| StoragePolicy::new().with_frozen(storage);
        let options = options(StorageType::NF4)
            .with_storage_for(unit_types![Embed], policy(StorageType::Bf16))
            .with_storage_at(["embed.position"], StoragePolicy::new())
            .with_storage_at(["blocks.2"], policy(StorageType::INT8));
        let net = fully_shard(mixed(worker.device()), worker, options)?;
        let text = net.to_string();
        for line in [
            "weight: [67, 24], sharded, bf16",
            "position: [32, 24], sharded\n",
            "gamma: [24], replicated, bf16",
            "weight: [24, 77], sharded, int8(64)",
            "weight: [24, 77], sharded, nf4(64, double_quant)",
            "weight: [77, 24], sharded\n",
            "bias: [77], replicated\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        Ok(())
    });
}

/// Compares memory with the forecast, to the byte. The forecast of gradients is an upper bound. Returns
/// the most bytes of gradients that each rank had, and their forecast.
pub fn assert_as_forecast(world: usize, options: FsdpOptions) -> Vec<(usize, usize)> {
    // The state of the check's probes is larger than that of this model.
    let options = options.with_optimizer_check(false);
    let what = format!("{world} ranks, {options:?}");
    on_ranks(world, move |worker| {
        let model = partly(worker.device());
        let mesh = Mesh::new(worker.rank(), worker.world());
        let forecast = MemoryForecast::new(&model, mesh, &options)?.with_optimizer(2);
        let run = Run { steps: 2, ..Run::new(worker.world().size(), options.clone()) };
        let (model, _) = run.train(model, worker)?;
        let (memory, host) = (model.stats().memory(), model.stats().host_memory());
        let what = format!("{what}\n{memory}\n{host}\n{forecast}");
        let found = [memory.shards, memory.replicated, memory.gathered];
        let expected = [forecast.shards, forecast.replicated, forecast.gathered];
        assert_eq!(found.map(|usage| usage.peak), expected, "{what}");
        let found = [host.shards, host.replicated, host.gradients];
        let expected = [forecast.host.shards, forecast.host.replicated, forecast.host.gradients];
        assert_eq!(found.map(|usage| usage.peak), expected, "{what}");
        let (found, most) = (memory.gradients.peak, forecast.gradients);
        assert!(found <= most, "{found} bytes of gradients of {most}: {what}");
        assert_eq!(memory.gathered.now, model.stats().gather_buffer_bytes(), "{what}");
        let stored = if forecast.host.total() > 0 { host } else { memory };
        assert_eq!(model.stats().sharded_bytes(), stored.shards.now + stored.replicated.now);
        let of_all = 2 * size_of::<f32>() * model.stats().num_params();
        assert!(forecast.optimizer + forecast.host.optimizer < of_all, "{what}");
        Ok((found, most))
    })
}

#[test]
fn memory_is_as_forecast() {
    for storage in TYPES {
        let options = options(storage);
        for strategy in
            [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard]
        {
            assert_as_forecast(2, options.clone().with_strategy(strategy));
        }
        let half = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
        assert_as_forecast(2, options.clone().with_mixed_precision(half));
        assert_as_forecast(2, options.clone().with_offload(OffloadPolicy::OptimizerOnly));
        let params = OffloadPolicy::Params { pin_memory: false };
        assert_as_forecast(2, options.clone().with_offload(params));
        let part = ReshardAfterForward::To(2);
        assert_as_forecast(4, options.clone().with_reshard_after_forward(part));
    }
}

#[test]
fn a_parameter_that_is_unfrozen_later_is_refused() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        let error = launch(crate::support::ranks::launch_options(2), move |worker| {
            let options = options(StorageType::NF4).with_strategy(strategy);
            let net = fully_shard(mixed(worker.device()), &worker, options)?;
            let net = burn::module::Module::unfreeze(net);
            let (tokens, _) = crate::support::batch(0, 0..2, worker.device());
            net.forward(tokens);
            Ok::<_, fsdp_runtime::Error>(())
        })
        .unwrap_err();
        let cause = error.source.downcast_ref::<fsdp_runtime::Error>();
        let Some(fsdp_runtime::Error::Schedule(error @ ScheduleError::FrozenStorage { path, .. })) =
            cause
        else {
            panic!("{error}")
        };
        assert_eq!(path, "embed.word.weight");
        assert!(error.to_string().contains("nf4(64, double_quant)"), "{error}");
    }
}

#[test]
fn options_are_checked() {
    of_rank_0(1, |worker| {
        let refused = |options: FsdpOptions| {
            let error =
                fully_shard(Net::new(1, 0.0, worker.device()), worker, options).unwrap_err();
            let fsdp_runtime::Error::Shard(error @ ShardError::InvalidOption { .. }) = error else {
                panic!("{error}")
            };
            error.to_string()
        };
        for storage in [
            StorageType::Int8 { block: 0 },
            StorageType::Int8 { block: 96 },
            StorageType::Nf4 { block: 8192, double_quant: true },
        ] {
            let general = refused(options(storage));
            let policy = StoragePolicy::new().with_frozen(storage);
            let own = refused(FsdpOptions::new().with_storage_for(unit_types![Block], policy));
            assert!(general.contains("4096 elements") && general == own, "{general} {own}");
        }
        let policy = StoragePolicy::new().with_frozen(StorageType::NF4);
        let unknown = FsdpOptions::new().with_storage_for(unit_types![mlp::Mlp], policy);
        assert!(refused(unknown).contains("storage_for"), "a unit that the model does not have");
        let unknown = FsdpOptions::new().with_storage_at(["blocks.0", "blocks.0.u"], policy);
        assert!(
            refused(unknown).contains("`storage_at` is blocks.0.u;"),
            "a path that leads to no parameter"
        );
        let policy = StoragePolicy::new().with_trained(StorageType::INT8);
        let error = refused(FsdpOptions::new().with_storage(policy));
        assert!(error.contains("trained parameters in f32 or bf16"), "{error}");
        Ok(())
    });
}
