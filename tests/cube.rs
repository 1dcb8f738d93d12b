//! Parity on Burn's `cpu` device: CubeCL's own runtime, kernels and streams. That runtime takes
//! seconds for a small step, so one set of runs serves every comparison.
#![cfg(feature = "cpu")]

mod support;

use burn::tensor::{Device, FloatDType};
use fsdp_runtime::prelude::*;
use support::{Outcome, Run, parity};

/// Three inner units in two buffers, so that a gather overwrites what an earlier unit read.
fn small(device: Device) -> Run {
    let clip = Some(0.5);
    Run { device, blocks: 2, steps: 2, rows_per_rank: 1, dropout: 0.1, clip, ..Run::new(2) }
}

/// The same bits. With autotune, which matrix product runs depends on how long each has taken, so that
/// runs add up in another order.
fn assert_same(one: &Outcome, other: &Outcome) {
    match cfg!(feature = "autotune") {
        true => one.assert_close(other, 1e-6),
        false => one.assert_bitwise(other),
    }
}

#[test]
fn full_shard_equals_no_shard_on_a_cubecl_device() {
    let full = small(Device::cpu()).launch();
    let none = small(Device::cpu()).strategy(ShardingStrategy::NoShard).launch();
    assert_same(&full, &none);
    assert!(full.norms.iter().any(|&norm| norm > 0.5), "clipping took part: {:?}", full.norms);
    assert!(full.losses.iter().all(|loss| loss.is_finite()));
    assert_same(&small(Device::cpu()).launch(), &full);
}

#[test]
fn the_same_global_batch_gives_the_same_losses_on_any_number_of_cubecl_ranks() {
    let run = Run { blocks: 1, steps: 2, dropout: 0.0, clip: None, ..small(Device::cpu()) };
    parity::worlds_agree(&run, &[2]);
}

/// Fragments, gradients and optimizer state rest on the host, where Flex steps them.
#[test]
fn offload_from_a_cubecl_device_changes_no_loss() {
    let plain = small(Device::cpu());
    let policy = OffloadPolicy::Params { pin_memory: true };
    let options = plain.options.clone().offload(policy);
    let offloaded = Run { options, ..plain.clone() }.launch();
    offloaded.assert_close(&plain.launch(), 1e-6);
}

#[test]
fn sharded_training_equals_plain_burn_on_a_cubecl_device() {
    parity::equals_plain_burn(&Run { dropout: 0.0, clip: None, ..small(Device::cpu()) });
}

/// The inputs of checkpointed units go to the host and come back.
#[test]
fn checkpointed_units_train_alike_on_a_cubecl_device() {
    let plain = small(Device::cpu());
    let options = plain.options.clone().activation_checkpointing(ActivationCheckpointing::All);
    let kept = Run { options: options.clone(), ..plain.clone() }.launch();
    let offloaded = Run { options: options.offload_activations(true), ..plain.clone() }.launch();
    let plain = plain.launch();
    assert_same(&kept, &plain);
    assert_same(&offloaded, &plain);
    assert_eq!(offloaded.counts, plain.counts);
}

/// Gathered and computed with in bf16.
#[test]
fn half_precision_trains_on_a_cubecl_device() {
    let full = Run { dropout: 0.0, clip: None, ..small(Device::cpu()) };
    let policy = MixedPrecisionPolicy::new().param_dtype(FloatDType::BF16);
    let options = full.options.clone().mixed_precision(policy.output_dtype(FloatDType::F32));
    let half = Run { options, ..full.clone() }.launch();
    let full = full.launch();
    half.assert_close(&full, 2e-2);
    assert_ne!(half.losses, full.losses, "products were in bf16");
    assert_eq!(2 * half.slot_bytes, full.slot_bytes, "half the bytes");
}
