//! Every strategy, wrap policy and prefetch policy has the same losses, norms and parameters.

use fsdp_runtime::prelude::*;

use crate::support::{self, Run};

const UNITS: usize = 6;

fn run(world: usize) -> Run {
    Run { dropout: 0.1, clip: Some(0.5), ..Run::new(world) }
}

#[test]
fn strategies_of_one_group_agree_bit_for_bit() {
    for world in [1, 3, 4] {
        let full = run(world).launch();
        for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
            run(world).with_strategy(strategy).launch().assert_bitwise(&full);
        }
    }
}

/// Two shard groups of two ranks add up gradients in pairs first, which rounds differently.
#[test]
fn hybrid_strategies_agree_with_each_other_bit_for_bit_and_with_the_others_up_to_rounding() {
    let full = run(4).launch();
    let hybrid = |strategy, size| {
        Run::with_options(&run(4).with_strategy(strategy), |options| options.with_shard_size(size))
            .launch()
    };
    for size in [1, 2] {
        let outcome = hybrid(ShardingStrategy::HybridShard, size);
        outcome.assert_close(&full, 1e-6);
        outcome.assert_bitwise(&hybrid(ShardingStrategy::HybridShardZero2, size));
        assert_eq!(outcome.counts.all_reduces, outcome.counts.reduce_scatters);
    }
    let one_group = hybrid(ShardingStrategy::HybridShard, 4);
    one_group.assert_bitwise(&full);
    assert_eq!(one_group.counts.all_reduces, 0);
}

#[test]
fn a_hybrid_group_holds_twice_the_shards_of_a_world_twice_as_large() {
    let full = run(4).launch();
    let options = |options: FsdpOptions| options.with_shard_size(2);
    let hybrid =
        Run::with_options(&run(4).with_strategy(ShardingStrategy::HybridShard), options).launch();
    let whole = run(4).with_strategy(ShardingStrategy::NoShard).launch().sharded_bytes;
    assert!(full.sharded_bytes < hybrid.sharded_bytes && hybrid.sharded_bytes < whole);
}

#[test]
fn shard_grad_op_gathers_once_a_step_into_a_buffer_for_each_unit() {
    let outcome = run(2).with_strategy(ShardingStrategy::ShardGradOp).launch();
    let full = run(2).launch();
    assert_eq!(outcome.counts.all_gathers, run(2).steps * UNITS);
    assert_eq!(outcome.sharded_bytes, full.sharded_bytes);
    assert!(outcome.gather_buffer_bytes > full.gather_buffer_bytes);
    assert_eq!(outcome.peak_unsharded_bytes, outcome.gather_buffer_bytes, "all units at once");
}

#[test]
fn resharding_to_a_part_changes_no_bit() {
    let full = run(4).launch();
    let to = |ranks| {
        let reshard = ReshardAfterForward::To(ranks);
        Run::with_options(&run(4), |options| options.with_reshard_after_forward(reshard)).launch()
    };
    let part = to(2);
    part.assert_bitwise(&full);
    assert_eq!(part.counts.all_gathers, full.counts.all_gathers);
    assert!(part.gather_buffer_bytes > full.gather_buffer_bytes, "parts are kept after forward");
    let never = to(1);
    never.assert_bitwise(&full);
    assert_eq!(never.counts.all_gathers, run(4).steps * UNITS);
}

#[test]
fn every_prefetch_policy_gives_the_same_bits() {
    let expected = run(2).launch();
    for prefetch in [BackwardPrefetch::Pre, BackwardPrefetch::Post, BackwardPrefetch::None] {
        for gather_buffers in [1, 2, 3] {
            for forward in [true, false] {
                let options = |options: FsdpOptions| {
                    options
                        .with_backward_prefetch(prefetch)
                        .with_gather_buffers(gather_buffers)
                        .with_forward_prefetch(forward)
                };
                let outcome = Run::with_options(&run(2), options).launch();
                outcome.assert_bitwise(&expected);
                assert_eq!(outcome.counts.mis_prefetches, 0, "{prefetch:?} {gather_buffers}");
            }
        }
    }
}

#[test]
fn units_are_wrapped_by_size() {
    // Without clipping, because the order in which the norm is summed depends on the units.
    let run = Run { clip: None, ..run(2) };
    let all = run.launch();
    let sized = |min_num_params| {
        let wrap = WrapPolicy::SizeBased { min_num_params };
        Run::with_options(&run, |options| options.with_wrap(wrap)).launch()
    };
    let gathers = |units: usize| run.steps * (units * 2 - 2);
    let (small, large, none) = (sized(1), sized(3000), sized(1_000_000));
    assert_eq!(small.counts.all_gathers, gathers(UNITS));
    assert_eq!(large.counts.all_gathers, gathers(UNITS - 1), "the embeddings join the root");
    assert_eq!(none.counts.all_gathers, run.steps, "the root alone");
    let no_wrap = Run::with_options(&run, |options| options.with_wrap(WrapPolicy::NoWrap)).launch();
    assert_eq!(no_wrap.counts, none.counts);
    for outcome in [small, large, none, no_wrap] {
        outcome.assert_bitwise(&all);
    }
}

#[test]
fn a_hybrid_world_that_does_not_divide_is_refused() {
    let options =
        FsdpOptions::new().with_strategy(ShardingStrategy::HybridShard).with_shard_size(2);
    let launched = LaunchOptions::new(3).with_device(burn::tensor::Device::flex());
    let error = launch(launched, move |worker| {
        let net = support::Net::new(1, 0.0, worker.device());
        fully_shard(net, &worker, options.clone()).map(|_| ())
    })
    .unwrap_err();
    assert!(error.to_string().contains("3 ranks cannot be split into groups of 2"), "{error}");
}
