//! Activation checkpointing changes no bit of losses, gradients and parameters.

mod errors;
mod nested;
mod references;
mod tied;

use std::collections::BTreeSet;

use burn::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

use crate::support::compare::assert_same_state;
use crate::support::parity::{CLIP, assert_clipped};
use crate::support::trace::{only, record};
use crate::support::{Block, Embed, Net, Run, batch, loss, of_rank_0};

const ALL: ActivationCheckpointing = ActivationCheckpointing::All;

fn run(world: usize, strategy: ShardingStrategy) -> Run {
    Run { dropout: 0.1, clip: Some(CLIP), ..Run::new(world) }.with_strategy(strategy)
}

#[test]
fn checkpointing_changes_no_bit_under_any_strategy() {
    let cases = [
        (ShardingStrategy::FullShard, [1, 2]),
        (ShardingStrategy::ShardGradOp, [1, 2]),
        (ShardingStrategy::NoShard, [1, 2]),
        (ShardingStrategy::HybridShard, [2, 4]),
        (ShardingStrategy::HybridShardZero2, [2, 4]),
    ];
    for (strategy, worlds) in cases {
        for world in worlds {
            let run = Run::with_options(&run(world, strategy), |options| {
                options.with_shard_size(world.div_ceil(2))
            });
            let plain = run.launch();
            let all = Run::with_options(&run, |options| options.with_activation_checkpointing(ALL))
                .launch();
            all.assert_bitwise(&plain);
            assert_eq!(all.counts, plain.counts, "{strategy} on {world} ranks");
            assert_clipped(&plain, CLIP);
        }
    }
}

#[test]
fn checkpointing_under_schedule_options_changes_no_bit_and_no_count() {
    let run = run(2, ShardingStrategy::FullShard);
    let variants: [fn(FsdpOptions) -> FsdpOptions; 6] = [
        |options| options.with_gather_buffers(1),
        |options| options.with_gather_buffers(3),
        |options| options.with_backward_prefetch(BackwardPrefetch::Post),
        |options| {
            options.with_backward_prefetch(BackwardPrefetch::None).with_forward_prefetch(false)
        },
        |options| options.with_reshard_after_forward(ReshardAfterForward::Never),
        |options| options.with_offload_activations(true),
    ];
    let expected = run.launch();
    for variant in variants {
        let plain = Run::with_options(&run, variant).launch();
        let all =
            Run::with_options(&run, |options| variant(options).with_activation_checkpointing(ALL))
                .launch();
        all.assert_bitwise(&expected);
        assert_eq!(all.counts, plain.counts);
    }
}

#[test]
fn a_recompute_uses_the_part_that_reshard_after_forward_keeps() {
    let run = Run::with_options(&run(4, ShardingStrategy::FullShard), |options| {
        options.with_reshard_after_forward(ReshardAfterForward::To(2))
    });
    let all =
        Run::with_options(&run, |options| options.with_activation_checkpointing(ALL)).launch();
    let plain = run.launch();
    all.assert_bitwise(&plain);
    assert_eq!(all.counts, plain.counts);
}

/// Returns the lines of the second step's schedule on rank 0 of two.
fn steps_of(which: ActivationCheckpointing) -> Vec<String> {
    of_rank_0(2, move |worker| {
        let options = FsdpOptions::new().with_seed(1).with_activation_checkpointing(which);
        let net = fully_shard(Net::new(2, 0.1, worker.device()), worker, options)?;
        let (tokens, labels) = batch(0, 0..2, worker.device());
        net.backward(loss(net.forward(tokens.clone()), labels.clone()))?;
        let (result, lines) = record(|| net.backward(loss(net.forward(tokens), labels)));
        result?;
        Ok(only(&lines, &["unshard", "pre_backward", "recompute", "reduce"]))
    })
}

#[test]
fn chosen_units_are_recomputed_with_the_gather_of_their_backward() {
    // Reductions of units at the same depth come in any order.
    let gathered = |lines: &[String]| only(lines, &["unshard", "pre_backward"]);
    let reduced = |lines: &[String]| only(lines, &["reduce"]).into_iter().collect::<BTreeSet<_>>();
    let recomputed = |lines: &[String]| only(lines, &["recompute"]);
    let plain = steps_of(ActivationCheckpointing::Annotated);
    assert_eq!(plain, steps_of(ActivationCheckpointing::None));
    assert!(recomputed(&plain).is_empty(), "no unit of this model is annotated: {plain:?}");
    assert!(!gathered(&plain).is_empty() && !reduced(&plain).is_empty(), "{plain:?}");
    for (which, expected) in [
        (ALL, vec!["recompute blocks.1", "recompute blocks.0", "recompute embed"]),
        (
            ActivationCheckpointing::Units(unit_types![Block]),
            vec!["recompute blocks.1", "recompute blocks.0"],
        ),
        (ActivationCheckpointing::Units(unit_types![Embed]), vec!["recompute embed"]),
    ] {
        let lines = steps_of(which);
        assert_eq!(recomputed(&lines), expected);
        assert_eq!(gathered(&lines), gathered(&plain), "{which:?}");
        assert_eq!(reduced(&lines), reduced(&plain), "{which:?}");
    }
}

/// The graphs of several micro-batches live at once, so that a unit is recomputed after later
/// forwards of the same unit, and in a later step of the random streams.
#[test]
fn dropout_is_the_same_after_later_forwards_and_in_later_passes() {
    let run = |which, accumulation| {
        of_rank_0(2, move |worker| {
            let options = FsdpOptions::new().with_seed(3).with_gradient_accumulation(accumulation);
            let options = options.with_activation_checkpointing(which);
            let mut net = fully_shard(Net::new(2, 0.3, worker.device()), worker, options)?;
            let mut optimizer = AdamWConfig::new().init();
            let mut bits = Vec::new();
            for step in 0..2 {
                let forward = |at: usize| {
                    let rows = 4 * worker.rank().index();
                    let (tokens, labels) = batch(3 * step + at, rows..rows + 4, worker.device());
                    loss(net.forward(tokens), labels)
                };
                let (first, second, third) = (forward(0), forward(1), forward(2));
                net.accumulate(second)?;
                let mut gradients = net.backward(first + third)?;
                bits.push(net.clip_grad_norm(&mut gradients, 1e9)?.to_bits());
                net = optimizer.step(1e-2, net, gradients);
            }
            Ok((bits, net.state().full(Recipient::All)?))
        })
    };
    for accumulation in [GradientAccumulation::ReduceEach, GradientAccumulation::HoldUnsharded] {
        let plain = run(ActivationCheckpointing::None, accumulation);
        let all = run(ALL, accumulation);
        assert_eq!(all.0, plain.0, "gradient norms under {accumulation:?}");
        assert_same_state(&all.1, &plain.1, format_args!("{accumulation:?}"));
    }
}

#[test]
fn evaluation_and_a_forward_without_backward_do_not_change_training() {
    let run = |which| {
        of_rank_0(2, move |worker| {
            let options = FsdpOptions::new().with_seed(3).with_activation_checkpointing(which);
            let net = fully_shard(Net::new(2, 0.0, worker.device()), worker, options)?;
            let (tokens, labels) = batch(0, 0..4, worker.device());
            let plain = worker.device().clone().inner();
            let (evaluated, lines) = record(|| net.valid().forward(batch(0, 0..4, &plain).0));
            assert!(only(&lines, &["recompute"]).is_empty());
            drop(net.forward(tokens.clone()));
            let loss = loss(net.forward(tokens), labels);
            let value = loss.clone().into_scalar::<f32>().to_bits();
            let mut gradients = net.backward(loss)?;
            let norm = net.clip_grad_norm(&mut gradients, 1e9)?.to_bits();
            Ok((evaluated.into_data().iter::<f32>().collect::<Vec<_>>(), value, norm))
        })
    };
    assert_eq!(run(ALL), run(ActivationCheckpointing::None));
}
