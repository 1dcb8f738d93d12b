//! When units are resharded, and how the gradients of micro-batches are accumulated.

use burn::optim::{GradientsParams, SgdConfig};
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use super::super::mlp::{
    Block, HIDDEN, WIDTH, gradient, input, loss, of_rank_0, on_ranks, sharded,
};
use super::super::support::compare::{Within, assert_close, assert_same_bits, assert_same_state};
use super::{BLOCK_BYTES, BLOCKS, Prepare, train, train_after};

/// Number of all-gathers of a step: each unit once in forward, and all but the root and the last
/// block once more in backward.
const GATHERS: usize = 2 * (BLOCKS + 1) - 2;

#[test]
fn single_units_stay_gathered_from_forward_to_backward() {
    let always = train(FsdpOptions::new());
    assert_eq!(always.all_gathers, 3 * GATHERS);
    let paths = ["blocks.1", "blocks.2"];
    let at = FsdpOptions::new().with_reshard_after_forward_at(paths, ReshardAfterForward::Never);
    let at = train(at);
    at.assert_same_bits(&always, "by path");
    assert_eq!(at.all_gathers, 3 * (GATHERS - 2));
    assert_eq!(at.buffers, always.buffers + 2 * BLOCK_BYTES, "two buffers of their own");

    let of_type = FsdpOptions::new()
        .with_reshard_after_forward_for(unit_types![Block], ReshardAfterForward::Never)
        .with_reshard_after_forward_at(["blocks.0"], ReshardAfterForward::Always);
    let of_type = train(of_type);
    of_type.assert_same_bits(&always, "by type");
    assert_eq!(of_type.all_gathers, 3 * (BLOCKS + 2), "the path overrides the type");

    let set = train_after(FsdpOptions::new(), |model| {
        model.unit("blocks.1")?.set_reshard_after_forward(ReshardAfterForward::Never)?;
        model.unit("blocks.2")?.set_reshard_after_forward(ReshardAfterForward::Never)
    });
    set.assert_same_bits(&always, "at run time");
    assert_eq!((set.all_gathers, set.buffers), (at.all_gathers, at.buffers));

    let all = train_after(FsdpOptions::new(), |model| {
        model.set_reshard_after_forward(ReshardAfterForward::Never)
    });
    let never = FsdpOptions::new().with_reshard_after_forward(ReshardAfterForward::Never);
    let never = train(never);
    assert_eq!((all.all_gathers, all.buffers), (never.all_gathers, never.buffers));
    assert_eq!(never.all_gathers, 3 * (BLOCKS + 1));
    let back = train_after(FsdpOptions::new(), |model| {
        model.set_reshard_after_forward(ReshardAfterForward::Never)?;
        model.set_reshard_after_forward(ReshardAfterForward::Always)
    });
    assert_eq!((back.all_gathers, back.buffers), (always.all_gathers, always.buffers));
}

#[test]
fn single_units_keep_a_part_among_neighbours() {
    let run = |options: FsdpOptions, prepare: Prepare| {
        of_rank_0(4, move |worker| {
            let model = sharded(BLOCKS, worker, options.clone())?;
            prepare(&model)?;
            let x = input(worker.rank().index(), 0, 4, worker.device());
            let gradients = model.backward(loss(model.forward(x)))?;
            let gradient = gradient(&gradients, &model.blocks[1].up.weight);
            Ok((gradient, model.stats().gather_buffer_bytes()))
        })
    };
    let (expected, always) = run(FsdpOptions::new(), |_| Ok(()));
    let to =
        FsdpOptions::new().with_reshard_after_forward_at(["blocks.1"], ReshardAfterForward::To(2));
    let (found, part) = run(to, |_| Ok(()));
    assert_eq!(found, expected);
    assert_eq!(part - always, BLOCK_BYTES / 2);
    let set = run(FsdpOptions::new(), |model| {
        model.unit("blocks.1")?.set_reshard_after_forward(ReshardAfterForward::To(2))
    });
    assert_eq!(set, (expected, part));
}

/// of the second step.
fn accumulated(options: FsdpOptions, prepare: Prepare) -> (FullState, Vec<usize>) {
    of_rank_0(2, move |worker| {
        let mut model = sharded(BLOCKS, worker, options.clone())?;
        prepare(&model)?;
        let mut optimizer = SgdConfig::new().init();
        let mut gathers = Vec::new();
        for step in 0..2 {
            gathers.clear();
            let mut gradients = GradientsParams::new();
            for batch in 0..3 {
                let before = model.stats().counts().all_gathers;
                let x = input(worker.rank().index(), 3 * step + batch, 4, worker.device());
                let loss = loss(model.forward(x));
                match batch {
                    2 => gradients = model.backward(loss)?,
                    _ => model.accumulate(loss)?,
                }
                gathers.push(model.stats().counts().all_gathers - before);
            }
            model = optimizer.step(0.1, model, gradients);
        }
        Ok((model.state().full(Recipient::All)?, gathers))
    })
}

#[test]
fn units_that_stay_gathered_after_backward_are_not_gathered_for_the_next_micro_batch() {
    let (state, gathers) = accumulated(FsdpOptions::new(), |_| Ok(()));
    assert_eq!(gathers, [GATHERS; 3]);
    let stays = FsdpOptions::new().with_reshard_after_backward(false);
    let (found, gathers) = accumulated(stays.clone(), |_| Ok(()));
    assert_same_state(&found, &state, "an option");
    // Forward reshards all but the root and the last block, and backward gathers them again.
    assert_eq!(gathers, [GATHERS, GATHERS - BLOCKS - 1, GATHERS - BLOCKS - 1]);
    let never = stays.with_reshard_after_forward(ReshardAfterForward::Never);
    let (found, gathers) = accumulated(never, |_| Ok(()));
    assert_same_state(&found, &state, "gathered once in a step");
    assert_eq!(gathers, [BLOCKS + 1, 0, 0]);
    let (found, gathers) = accumulated(FsdpOptions::new(), |model| {
        model.unit("blocks.0")?.set_reshard_after_backward(false)
    });
    assert_same_state(&found, &state, "one unit");
    assert_eq!(gathers, [GATHERS, GATHERS - 1, GATHERS - 1]);
    let (found, _) = accumulated(FsdpOptions::new(), |m| m.set_reshard_after_backward(false));
    assert_same_state(&found, &state, "at run time");
}

/// An optimizer that steps between two micro-batches, of a clone, changes what was gathered.
#[test]
fn units_that_stayed_gathered_are_gathered_again_after_a_step() {
    let run = |options: FsdpOptions| {
        of_rank_0(2, move |worker| {
            let model = sharded(BLOCKS, worker, options.clone())?;
            let x = |step| input(worker.rank().index(), step, 4, worker.device());
            let gradients = model.backward(loss(model.forward(x(0))))?;
            model.accumulate(loss(model.forward(x(1))))?;
            let stepped = SgdConfig::new().init().step(0.5, model.clone(), gradients);
            let first = loss(stepped.forward(x(2)));
            let value = first.clone().into_scalar::<f32>();
            stepped.accumulate(first)?;
            // The older clone again, without a step in between.
            let again = loss(model.forward(x(2)));
            let old = again.clone().into_scalar::<f32>();
            model.backward(again)?;
            assert_ne!(value, old);
            Ok([value, old])
        })
    };
    let stays = FsdpOptions::new()
        .with_reshard_after_backward(false)
        .with_reshard_after_forward(ReshardAfterForward::Never);
    assert_eq!(run(stays), run(FsdpOptions::new()));
}

#[test]
fn an_evaluation_between_micro_batches_changes_no_bit() {
    let run = |options: FsdpOptions| {
        of_rank_0(2, move |worker| {
            let model = sharded(BLOCKS, worker, options.clone())?;
            let x = |step| input(worker.rank().index(), step, 4, worker.device());
            model.accumulate(loss(model.forward(x(0))))?;
            let evaluated = loss(model.valid().forward(x(1).inner())).into_scalar::<f32>();
            let gradients = model.backward(loss(model.forward(x(1))))?;
            Ok((evaluated, gradient(&gradients, &model.blocks[2].up.weight)))
        })
    };
    assert_eq!(run(FsdpOptions::new().with_reshard_after_backward(false)), run(FsdpOptions::new()));
}

/// Accumulates three micro-batches in shard groups of two. Returns the gradient of a matrix, a bias,
/// and the numbers of reductions within and among the groups.
fn hybrid(accumulation: GradientAccumulation, offload: OffloadPolicy) -> (Vec<f32>, [usize; 2]) {
    let ranks = on_ranks(4, move |worker| {
        let options = FsdpOptions::new()
            .with_strategy(ShardingStrategy::HybridShard)
            .with_shard_size(2)
            .with_gradient_accumulation(accumulation)
            .with_offload(offload);
        let model = sharded(BLOCKS, worker, options)?;
        let x = |step| input(worker.rank().index(), step, 4, worker.device());
        model.accumulate(loss(model.forward(x(0))))?;
        model.accumulate(loss(model.forward(x(1))))?;
        let gradients = model.backward(loss(model.forward(x(2))))?;
        let matrix = gradient(&gradients, &model.blocks[1].up.weight).unwrap_or_default();
        let bias = gradient(&gradients, model.head.bias.as_ref().expect("with a bias"));
        let counts = model.stats().counts();
        let reductions = [counts.reduce_scatters, counts.all_reduces];
        Ok(([matrix, bias.expect("used")].concat(), reductions))
    });
    for (rank, other) in [(0, 2), (1, 3)] {
        assert_same_bits(&ranks[rank].0, &ranks[other].0, "the replicas agree");
    }
    ranks.into_iter().next().unwrap()
}

#[test]
fn micro_batches_are_reduced_in_the_shard_group_and_once_among_the_replicas() {
    for offload in [OffloadPolicy::None, OffloadPolicy::Params { pin_memory: false }] {
        let (expected, counts) = hybrid(GradientAccumulation::ReduceEach, offload);
        let units = BLOCKS + 1;
        assert_eq!(counts, [3 * units, 3 * units]);
        let (found, counts) = hybrid(GradientAccumulation::ReduceInGroup, offload);
        assert_eq!(counts, [3 * units, units]);
        assert_close(&found, &expected, Within::Scaled(1e-6), "gradients");
        let (held, counts) = hybrid(GradientAccumulation::HoldUnsharded, offload);
        assert_eq!(counts, [units, units]);
        assert_close(&found, &held, Within::Scaled(1e-6), "gradients");
    }
}

/// The kind of accumulation changes from one micro-batch to the next.
#[test]
fn accumulation_may_change_between_micro_batches() {
    use GradientAccumulation::{HoldUnsharded, ReduceEach, ReduceInGroup};
    let run = |kinds: [GradientAccumulation; 2]| {
        of_rank_0(4, move |worker| {
            let options =
                FsdpOptions::new().with_strategy(ShardingStrategy::HybridShard).with_shard_size(2);
            let model = sharded(2, worker, options)?;
            let x = |step| input(worker.rank().index(), step, 4, worker.device());
            for (step, kind) in kinds.into_iter().enumerate() {
                model.set_gradient_accumulation(kind)?;
                model.accumulate(loss(model.forward(x(step))))?;
            }
            let gradients = model.backward(loss(model.forward(x(2))))?;
            let bias = gradient(&gradients, model.head.bias.as_ref().expect("with a bias"));
            let counts = model.stats().counts();
            Ok((bias.expect("used"), [counts.reduce_scatters, counts.all_reduces]))
        })
    };
    // Three units.
    let (expected, counts) = run([ReduceEach; 2]);
    assert_eq!(counts, [9, 9]);
    for (kinds, reductions) in [
        ([HoldUnsharded, ReduceInGroup], [6, 3]),
        ([ReduceInGroup, HoldUnsharded], [6, 3]),
        ([ReduceInGroup, ReduceEach], [9, 6]),
        ([ReduceEach, HoldUnsharded], [6, 6]),
    ] {
        let (found, counts) = run(kinds);
        assert_eq!(counts, reductions, "{kinds:?}");
        assert_close(&found, &expected, Within::Scaled(1e-6), format!("{kinds:?}"));
    }
}

/// The last micro-batch does not use a block that the first one used.
#[test]
fn sums_in_the_group_of_a_unit_that_the_last_micro_batch_skips_are_reduced() {
    let run = |accumulation| {
        of_rank_0(4, move |worker| {
            let options = FsdpOptions::new()
                .with_strategy(ShardingStrategy::HybridShard)
                .with_shard_size(2)
                .with_gradient_accumulation(accumulation);
            let model = sharded(2, worker, options)?;
            let x = |step| input(worker.rank().index(), step, 4, worker.device());
            model.accumulate(loss(model.forward(x(0))))?;
            let gradients = model.backward(loss(model.blocks[0].forward(x(1))))?;
            let matrix = |block: usize| {
                gradient(&gradients, &model.blocks[block].up.weight).unwrap_or_default()
            };
            Ok([matrix(0), matrix(1)].concat())
        })
    };
    let expected = run(GradientAccumulation::ReduceEach);
    assert!(expected.len() > WIDTH * HIDDEN / 2);
    let found = run(GradientAccumulation::ReduceInGroup);
    assert_close(&found, &expected, Within::Scaled(1e-6), "gradients");
}

#[test]
fn under_one_group_sums_in_the_group_are_the_reductions_of_each_micro_batch() {
    let each = accumulated(FsdpOptions::new(), |_| Ok(()));
    let options =
        FsdpOptions::new().with_gradient_accumulation(GradientAccumulation::ReduceInGroup);
    let grouped = accumulated(options, |_| Ok(()));
    assert_same_state(&grouped.0, &each.0, "one group");
}
