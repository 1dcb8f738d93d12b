//! Offload: parameters, gradients and optimizer state in host memory. On Flex the device's memory
//! is the host's too, but data is copied as to any other device.

use burn::module::{Module, Param};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, FloatDType};
use fsdp_runtime::memory::Memory;
use fsdp_runtime::prelude::*;

use crate::support::compare::assert_same_state;
use crate::support::trace::{only, record};
use crate::support::{
    Block, HIDDEN, LENGTH, Net, Run, VOCABULARY, WIDTH, batch, loss, of_rank_0, on_ranks,
};

const POLICIES: [OffloadPolicy; 3] = [
    OffloadPolicy::Params { pin_memory: false },
    OffloadPolicy::Params { pin_memory: true },
    OffloadPolicy::OptimizerOnly,
];

fn run(world: usize, policy: OffloadPolicy) -> Run {
    let run = Run { dropout: 0.1, clip: Some(0.5), ..Run::new(world) };
    Run { options: run.options.clone().with_offload(policy), ..run }
}

#[test]
fn offload_changes_no_bit() {
    for world in [1, 2, 3] {
        for strategy in
            [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard]
        {
            let without = run(world, OffloadPolicy::None).with_strategy(strategy).launch();
            for policy in POLICIES {
                let with = run(world, policy).with_strategy(strategy).launch();
                with.assert_bitwise(&without);
                assert_eq!(with.counts, without.counts);
            }
        }
    }
}

#[test]
fn offload_under_hybrid_sharding_or_resharding_to_a_part_changes_no_bit() {
    let hybrid = |policy| {
        let run = run(4, policy).with_strategy(ShardingStrategy::HybridShard);
        Run { options: run.options.clone().with_shard_size(2), ..run }.launch()
    };
    let part = |policy| {
        let (run, to) = (run(4, policy), ReshardAfterForward::To(2));
        Run { options: run.options.clone().with_reshard_after_forward(to), ..run }.launch()
    };
    for policy in POLICIES {
        hybrid(policy).assert_bitwise(&hybrid(OffloadPolicy::None));
        part(policy).assert_bitwise(&part(OffloadPolicy::None));
    }
}

#[test]
fn offload_in_half_precision_changes_no_bit() {
    let half = MixedPrecisionPolicy::new()
        .with_param_dtype(FloatDType::BF16)
        .with_reduce_dtype(FloatDType::F32)
        .with_output_dtype(FloatDType::F32);
    let with = |policy| {
        let run = run(2, policy);
        Run { options: run.options.clone().with_mixed_precision(half), ..run }.launch()
    };
    for policy in POLICIES {
        with(policy).assert_bitwise(&with(OffloadPolicy::None));
    }
}

#[test]
fn recompute_under_offload_and_in_half_precision_changes_no_bit() {
    let half = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    for precision in [MixedPrecisionPolicy::new(), half.with_output_dtype(FloatDType::F32)] {
        let with = |policy, which, activations| {
            let run = run(2, policy);
            let options = run.options.clone().with_mixed_precision(precision);
            let options =
                options.with_activation_checkpointing(which).with_offload_activations(activations);
            Run { options, ..run }.launch()
        };
        let expected = with(OffloadPolicy::None, ActivationCheckpointing::None, false);
        for policy in POLICIES.into_iter().chain([OffloadPolicy::None]) {
            let blocks = ActivationCheckpointing::Units(unit_types![Block]);
            for which in [blocks, ActivationCheckpointing::All] {
                with(policy, which, false).assert_bitwise(&expected);
            }
            with(policy, blocks, true).assert_bitwise(&expected);
        }
    }
}

/// Replicated biases and norms are copied to the device with their unit's all-gather, and not one
/// by one.
#[test]
fn replicated_parameters_are_copied_with_the_all_gather() {
    on_ranks(2, |worker| {
        let half = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
        let half = half.with_output_dtype(FloatDType::F32);
        let all = ActivationCheckpointing::All;
        for options in POLICIES.iter().flat_map(|&policy| {
            let plain = FsdpOptions::new().with_seed(1).with_offload(policy);
            let half = plain.clone().with_mixed_precision(half);
            let whole = plain.clone().with_strategy(ShardingStrategy::NoShard);
            [plain.clone(), half, plain.with_activation_checkpointing(all), whole]
        }) {
            let net = fully_shard(Net::new(2, 0.0, worker.device()), worker, options)?;
            let (tokens, labels) = batch(0, 0..2, worker.device());
            let (gradients, lines) = record(|| net.backward(loss(net.forward(tokens), labels)));
            gradients?;
            assert_eq!(only(&lines, &["copy_to_device"]), [""; 0]);
            assert!(!only(&lines, &["unshard"]).is_empty());
            assert_eq!(net.stats().memory().replicated.now, 0, "the copies are freed");
            // Outside a forward, reading one parameter copies that one.
            let (_, lines) = record(|| net.head.bias.as_ref().map(Param::val));
            assert_eq!(only(&lines, &["copy_to_device"]), ["copy_to_device (root)"]);
        }
        Ok(())
    });
}

/// Returns the memory of rank 0 of two after two steps: on the device, and on the host.
fn memory(policy: OffloadPolicy) -> (Memory, Memory) {
    of_rank_0(2, move |worker| {
        let options = FsdpOptions::new().with_seed(1).with_offload(policy);
        let mut net = fully_shard(Net::new(4, 0.0, worker.device()), worker, options)?;
        let mut optimizer = AdamWConfig::new().init();
        for step in 0..2 {
            let (tokens, labels) = batch(step, 0..4, worker.device());
            let grads = net.backward(loss(net.forward(tokens), labels))?;
            net = optimizer.step(1e-2, net, grads);
        }
        net.stats().record_optimizer(&optimizer).expect("a record");
        Ok((net.stats().memory(), net.stats().host_memory()))
    })
}

#[test]
fn offloaded_state_takes_no_memory_on_the_device() {
    let (all, none) = memory(OffloadPolicy::None);
    assert_eq!(none, Memory::default());
    let (device, host) = memory(OffloadPolicy::Params { pin_memory: false });
    for (name, usage) in [("shards", device.shards), ("optimizer", device.optimizer)] {
        assert_eq!(usage.peak, 0, "{name}");
    }
    // Copies of the replicated parameters of the root and of two blocks of four.
    assert_eq!(device.replicated.now, 0);
    assert!((1..all.replicated.peak).contains(&device.replicated.peak), "{device}");
    assert_eq!(host.shards, all.shards);
    assert_eq!(host.replicated, all.replicated);
    // The records differ by the name of the device.
    assert!(host.optimizer.peak.abs_diff(all.optimizer.peak) < 1000);
    assert_eq!((device.gathered.now, host.gathered.peak), (all.gathered.now, 0));
    // The staging memory of a shard: half a block, or half the embeddings.
    let sent = device.gathered.peak - device.gathered.now;
    let block = 2 * WIDTH * HIDDEN / 2 * 4;
    let embeddings = (VOCABULARY + LENGTH) * WIDTH / 2 * 4;
    assert_eq!(sent, block.max(embeddings));
    assert!(device.gradients.peak < all.gradients.peak && host.gradients.peak > 0);
    let (kept, _) = memory(OffloadPolicy::OptimizerOnly);
    assert_eq!(kept.shards, all.shards, "device copies of the shards are kept for backward");
}

#[test]
fn parameters_and_states_are_on_the_host() {
    on_ranks(2, |worker| {
        let policy = OffloadPolicy::Params { pin_memory: false };
        let options = FsdpOptions::new().with_seed(1).with_offload(policy);
        let net = fully_shard(Net::new(1, 0.0, worker.device()), worker, options)?;
        assert_eq!(net.devices(), vec![Device::flex().autodiff()]);
        let state = net.state().full(Recipient::All)?;
        let without = fully_shard(
            Net::new(1, 0.0, worker.device()),
            worker,
            FsdpOptions::new().with_seed(1),
        )?;
        let expected = without.state().full(Recipient::All)?;
        assert_same_state(&state, &expected, "the full state");
        // Outside any forward, and without autodiff.
        let weight = net.blocks[0].up.weight.val().into_data();
        assert_eq!(weight, without.blocks[0].up.weight.val().into_data());
        let (tokens, _) = batch(0, 0..4, &worker.device().clone().inner());
        let logits = net.valid().forward(tokens.clone()).into_data();
        assert_eq!(logits, without.valid().forward(tokens).into_data());
        Ok(())
    });
}
