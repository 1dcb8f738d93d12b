//! `FULL_SHARD` against `NO_SHARD`, against plain Burn and against itself; numbers of collectives.

use fsdp_runtime::prelude::*;

use crate::support::{self, Run, parity};

fn with(run: Run, dropout: f64, clip: Option<f64>) -> Run {
    Run { dropout, clip, ..run }
}

#[test]
fn full_shard_equals_no_shard_bit_for_bit() {
    parity::full_shard_equals_no_shard(&Run::new(1), &[1, 2, 3, 4]);
}

#[test]
fn a_run_repeats_bit_for_bit() {
    parity::repeats(&Run::new(1), &[2, 4]);
}

#[test]
fn the_same_global_batch_gives_the_same_losses_on_any_number_of_ranks() {
    parity::worlds_agree(&Run { steps: 20, ..Run::new(1) }, &[2, 4]);
}

#[test]
fn training_sharded_equals_training_with_plain_burn() {
    parity::equals_plain_burn(&Run::new(2));
}

#[test]
fn the_fused_optimizer_keeps_parity() {
    let optimizer = || fsdp_runtime::optim::AdamWConfig::new().with_weight_decay(0.1).init();
    let run = Run { optimizer, ..Run::new(2) };
    parity::full_shard_equals_no_shard(&run, &[1, 2, 3]);
    parity::equals_plain_burn(&run);
}

#[test]
fn schedule_options_change_no_bit() {
    let run = with(Run::new(2), 0.1, Some(1.0));
    let expected = run.launch();
    let variants = [
        run.options.clone().with_gather_buffers(1),
        run.options.clone().with_gather_buffers(3),
        run.options.clone().with_forward_prefetch(false),
        run.options.clone().with_backward_prefetch(BackwardPrefetch::None),
        run.options.clone().with_persist_below(200),
    ];
    for (index, options) in variants.into_iter().enumerate() {
        let variant = Run { options, ..run.clone() }.launch();
        if index == 4 {
            // Small matrices become replicated, which changes the order in which the norm is
            // summed.
            variant.assert_close(&expected, 1e-6);
        } else {
            variant.assert_bitwise(&expected);
        }
    }
}

#[test]
fn only_the_named_units_are_wrapped() {
    let run = with(Run::new(2), 0.1, None);
    let wrap = WrapPolicy::TransformerBased(unit_types![support::Block]);
    let named = Run { options: run.options.clone().with_wrap(wrap), ..run.clone() }.launch();
    // The embeddings join the root. Two of the five units stay gathered from forward to backward.
    assert_eq!(named.counts.all_gathers, run.steps * (5 * 2 - 2));
    let none = Run {
        options: run.options.clone().with_wrap(WrapPolicy::TransformerBased(&[])),
        ..run.clone()
    };
    let none = none.launch();
    assert_eq!(none.counts.all_gathers, run.steps, "the root alone");
    let all = run.launch();
    named.assert_bitwise(&all);
    none.assert_bitwise(&all);
}

#[test]
fn a_step_gathers_each_unit_twice_and_reduces_it_once() {
    let run = Run { steps: 3, ..Run::new(2) };
    let outcome = run.launch();
    // Two of the six units, the root and the last block, stay gathered for their backward.
    let full = outcome.state.len();
    assert_eq!(outcome.counts.all_gathers, 3 * (6 * 2 - 2));
    assert_eq!(outcome.counts.reduce_scatters, 3 * 6);
    assert_eq!(outcome.counts.mis_prefetches, 0);
    assert!(outcome.counts.single_gathers <= full, "only the full state gathers one by one");
    let none = run.with_strategy(ShardingStrategy::NoShard).launch();
    assert_eq!((none.counts.all_gathers, none.counts.reduce_scatters), (0, 3 * 6));
}

#[test]
fn gather_buffers_do_not_grow_with_depth() {
    let outcome = Run::new(2).launch();
    assert!(outcome.peak_unsharded_bytes > 0);
    assert!(outcome.peak_unsharded_bytes <= outcome.gather_buffer_bytes);
    let deeper = Run { blocks: 9, ..Run::new(2) }.launch();
    assert_eq!(
        deeper.gather_buffer_bytes, outcome.gather_buffer_bytes,
        "two buffers and the root's, for any depth"
    );
    assert!(deeper.sharded_bytes > outcome.sharded_bytes);
}
