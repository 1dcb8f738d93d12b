//! The parity tests on Burn's `cpu` device: CubeCL's own runtime, kernels and streams.
#![cfg(feature = "cpu")]

mod support;

use burn::tensor::Device;
use fsdp_runtime::prelude::*;
use support::{Run, parity};

fn small() -> Run {
    Run { device: Device::cpu(), blocks: 2, steps: 3, rows_per_rank: 2, ..Run::new(1) }
}

#[test]
fn full_shard_equals_no_shard_bit_for_bit() {
    parity::full_shard_equals_no_shard(&small(), &[1, 2]);
}

#[test]
fn a_run_repeats_bit_for_bit() {
    parity::repeats(&small(), &[2]);
}

#[test]
fn the_same_global_batch_gives_the_same_losses_on_any_number_of_ranks() {
    parity::worlds_agree(&small(), &[2]);
}

#[test]
fn training_sharded_equals_training_with_plain_burn() {
    parity::equals_plain_burn(&Run { world: 2, ..small() });
}

#[test]
fn losses_are_those_of_flex() {
    let cube = Run { world: 2, ..small() };
    let flex = Run { device: Device::flex(), ..cube.clone() };
    cube.launch().assert_close(&flex.launch(), 1e-4);
}

#[test]
fn a_prefetched_slot_is_not_read_too_early() {
    // Many units in one pass, two buffers: every gather overwrites what an earlier unit read.
    let run = Run { world: 2, blocks: 8, steps: 2, ..small() };
    let one = Run { options: run.options.clone().slots(1), ..run.clone() };
    run.launch().assert_bitwise(&one.launch());
}
