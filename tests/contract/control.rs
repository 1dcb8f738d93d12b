//! Control by unit and at run time: what is prefetched, when units are resharded, how gradients are
//! divided and accumulated, and the hook on reduced gradients.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{FloatDType, Tensor};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{FsdpConfig, FullState, LaunchError, ScheduleError, ShardError};

use super::mlp::{Block, HIDDEN, Mlp, WIDTH, gradient, input, loss, of_rank_0, on_ranks, sharded};
use super::support::compare::{Within, assert_close, assert_same_bits, assert_same_state};
use super::support::ranks::launch_options;
use super::support::trace::{only, record};

const BLOCKS: usize = 5;
/// Bytes of the gather buffer of a block on two ranks, whose matrices need no padding.
const BLOCK_BYTES: usize = 2 * WIDTH * HIDDEN * size_of::<f32>();

/// What a training run on two ranks has: the state at the end, the bytes of gather buffers, and the
/// numbers of all-gathers and of wrong prefetches.
#[derive(Debug)]
struct Trained {
    norms: Vec<f64>,
    state: FullState,
    buffers: usize,
    all_gathers: usize,
    wrong: usize,
}

impl Trained {
    #[track_caller]
    fn assert_same_bits(&self, other: &Self, what: &str) {
        assert_same_bits(&self.norms, &other.norms, what);
        assert_same_state(&self.state, &other.state, what);
        assert_eq!(self.wrong, 0, "{what}");
    }
}

type Prepare = fn(&Fsdp<Mlp>) -> Result<(), Error>;

/// Trains three steps on two ranks, after `prepare`.
fn train_after(options: FsdpOptions, prepare: Prepare) -> Trained {
    of_rank_0(2, move |worker| {
        let mut model = sharded(BLOCKS, worker, options.clone())?;
        prepare(&model)?;
        let mut optimizer = SgdConfig::new().init();
        let mut norms = Vec::new();
        for step in 0..3 {
            let x = input(worker.rank().index(), step, 4, worker.device());
            let mut gradients = model.backward(loss(model.forward(x)))?;
            norms.push(model.clip_grad_norm(&mut gradients, 1e9)?);
            model = optimizer.step(0.1, model, gradients);
        }
        let counts = model.stats().counts();
        Ok(Trained {
            norms,
            buffers: model.stats().gather_buffer_bytes(),
            all_gathers: counts.all_gathers,
            wrong: counts.mis_prefetches,
            state: model.state().full(Recipient::All)?,
        })
    })
}

fn train(options: FsdpOptions) -> Trained {
    train_after(options, |_| Ok(()))
}

/// Returns the gathers of the second forward and the second backward on two ranks.
fn gathers(options: FsdpOptions, prepare: Prepare) -> (Vec<String>, Vec<String>) {
    of_rank_0(2, move |worker| {
        let model = sharded(BLOCKS, worker, options.clone())?;
        prepare(&model)?;
        let x = || input(worker.rank().index(), 0, 4, worker.device());
        model.backward(loss(model.forward(x())))?;
        let (output, forward) = record(|| loss(model.forward(x())));
        let (gradients, backward) = record(|| model.backward(output));
        gradients?;
        let steps = ["unshard", "wait_for_unshard"];
        Ok((only(&forward, &steps), only(&backward, &steps)))
    })
}

#[test]
fn two_units_ahead_cost_exactly_two_more_buffers_and_change_no_bit() {
    let none = train(FsdpOptions::new().with_gather_buffers(1));
    let one = train(FsdpOptions::new());
    let two = train(FsdpOptions::new().with_units_ahead(2));
    let three = train(FsdpOptions::new().with_units_ahead(3));
    assert_eq!(one.buffers, none.buffers + BLOCK_BYTES);
    assert_eq!(two.buffers, none.buffers + 2 * BLOCK_BYTES);
    assert_eq!(three.buffers, none.buffers + 3 * BLOCK_BYTES);
    for (name, ahead) in [("one", &one), ("two", &two), ("three", &three)] {
        ahead.assert_same_bits(&none, name);
        assert_eq!(ahead.all_gathers, none.all_gathers, "{name}");
    }
    let off = train(FsdpOptions::new().with_units_ahead(0));
    off.assert_same_bits(&none, "off");
}

#[test]
fn two_units_ahead_are_gathered_in_the_order_of_their_use() {
    let (forward, backward) = gathers(FsdpOptions::new().with_units_ahead(2), |_| Ok(()));
    let expected = [
        "unshard (root)",
        "wait_for_unshard (root)",
        "unshard blocks.0",
        "wait_for_unshard blocks.0",
        "unshard blocks.1",
        "unshard blocks.2",
        "wait_for_unshard blocks.1",
        "unshard blocks.3",
        "wait_for_unshard blocks.2",
        "unshard blocks.4",
        "wait_for_unshard blocks.3",
        "wait_for_unshard blocks.4",
    ];
    assert_eq!(forward, expected);
    let expected = [
        "unshard blocks.3",
        "unshard blocks.2",
        "wait_for_unshard blocks.3",
        "unshard blocks.1",
        "wait_for_unshard blocks.2",
        "unshard blocks.0",
        "wait_for_unshard blocks.1",
        "wait_for_unshard blocks.0",
    ];
    assert_eq!(backward, expected);
}

/// The first block prefetches two, the second one none, the third one two.
const LISTS: [(&str, &[&str]); 3] = [
    ("blocks.0", &["blocks.1", "blocks.2"]),
    ("blocks.1", &[]),
    ("blocks.2", &["blocks.3", "blocks.4"]),
];

fn with_lists(options: FsdpOptions) -> FsdpOptions {
    let options = LISTS.iter().fold(options, |options, (path, units)| {
        options.with_forward_prefetch_at(*path, units.iter().copied())
    });
    options.with_backward_prefetch_at("blocks.4", ["blocks.3", "blocks.2"])
}

fn set_lists(model: &Fsdp<Mlp>) -> Result<(), Error> {
    for (path, units) in LISTS {
        model.unit(path)?.set_forward_prefetch(units)?;
    }
    model.unit("blocks.4")?.set_backward_prefetch(&["blocks.3", "blocks.2"])
}

#[test]
fn lists_say_which_units_are_prefetched_and_get_the_buffers_that_they_need() {
    let none = train(FsdpOptions::new().with_gather_buffers(1));
    // Lists apply although the prefetch in both directions is off.
    let off = FsdpOptions::new()
        .with_gather_buffers(1)
        .with_forward_prefetch(false)
        .with_backward_prefetch(BackwardPrefetch::None);
    let listed = train(with_lists(off.clone()));
    assert_eq!(listed.buffers, none.buffers + 2 * BLOCK_BYTES);
    listed.assert_same_bits(&none, "lists");
    let set = train_after(off.clone(), set_lists);
    assert_eq!(set.buffers, listed.buffers, "the buffers are allocated anew");
    set.assert_same_bits(&none, "lists that are set later");

    let found = gathers(with_lists(off.clone()), |_| Ok(()));
    assert_eq!(gathers(off, set_lists), found);
    let expected = [
        "unshard (root)",
        "wait_for_unshard (root)",
        "unshard blocks.0",
        "wait_for_unshard blocks.0",
        "unshard blocks.1",
        "unshard blocks.2",
        "wait_for_unshard blocks.1",
        "wait_for_unshard blocks.2",
        "unshard blocks.3",
        "unshard blocks.4",
        "wait_for_unshard blocks.3",
        "wait_for_unshard blocks.4",
    ];
    assert_eq!(found.0, expected);
    let expected = [
        "unshard blocks.3",
        "unshard blocks.2",
        "wait_for_unshard blocks.3",
        "wait_for_unshard blocks.2",
        "unshard blocks.1",
        "wait_for_unshard blocks.1",
        "unshard blocks.0",
        "wait_for_unshard blocks.0",
    ];
    assert_eq!(found.1, expected);
}

#[test]
fn a_list_for_another_level_gets_its_buffers() {
    let none = train(FsdpOptions::new().with_gather_buffers(1));
    let units = ["blocks.0", "blocks.1", "blocks.2"];
    let options = FsdpOptions::new().with_gather_buffers(1).with_forward_prefetch_at("", units);
    let listed = train(options);
    assert_eq!(listed.buffers, none.buffers + 2 * BLOCK_BYTES, "three in all");
    listed.assert_same_bits(&none, "the root prefetches blocks");
}

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

#[test]
fn the_forecast_counts_the_buffers_of_single_units() {
    let options = [
        FsdpOptions::new().with_units_ahead(2),
        with_lists(FsdpOptions::new().with_gather_buffers(1)),
        FsdpOptions::new().with_reshard_after_forward_at(["blocks.1"], ReshardAfterForward::Never),
        FsdpOptions::new().with_reshard_after_backward(false),
    ];
    for options in options {
        of_rank_0(2, move |worker| {
            let mesh = fsdp_runtime::Mesh::new(worker.rank(), worker.world());
            let plain = Mlp::new(BLOCKS, worker.device());
            let forecast = fsdp_runtime::MemoryForecast::new(&plain, mesh, &options)?;
            let model = sharded(BLOCKS, worker, options.clone())?;
            assert_eq!(forecast.gathered, model.stats().gather_buffer_bytes(), "{options:?}");
            assert_eq!(model.stats().memory().gathered.now, forecast.gathered);
            Ok(())
        });
    }
}

/// Trains two steps of three micro-batches. Returns the state, and the all-gathers of each micro-batch
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

/// The ranks' gradients of a bias are 0, 1, 2 and 3.
fn divided(options: FsdpOptions, prepare: Prepare) -> Result<Vec<f32>, LaunchError> {
    launch(launch_options(4), move |worker| {
        let model = sharded(1, &worker, options.clone())?;
        prepare(&model)?;
        let bias = model.head.bias.as_ref().expect("with a bias");
        let scale = worker.rank().index() as f32;
        let output = model.forward(input(0, 0, 1, worker.device())).sum() * scale;
        let gradients = model.backward(output)?;
        Ok::<_, Error>(gradient(&gradients, bias).expect("used")[0])
    })
}

#[test]
fn gradients_are_divided_by_the_factor() {
    let strategies = [
        FsdpOptions::new(),
        FsdpOptions::new().with_strategy(ShardingStrategy::NoShard),
        FsdpOptions::new().with_strategy(ShardingStrategy::HybridShard).with_shard_size(2),
    ];
    for options in strategies {
        for (factor, expected) in [(1.0, 6.0), (2.0, 3.0), (4.0, 1.5), (2.5, 2.4), (0.5, 12.0)] {
            let found = divided(options.clone().with_gradient_divide_factor(factor), |_| Ok(()));
            assert_eq!(found.unwrap(), [expected; 4], "{factor}");
        }
        let set = divided(options.clone(), |model| model.set_gradient_divide_factor(1.0));
        assert_eq!(set.unwrap(), [6.0; 4]);
        let back = divided(options.with_gradient_divide_factor(1.0), |model| {
            model.set_gradient_divide_factor(4.0)
        });
        assert_eq!(back.unwrap(), [1.5; 4]);
    }
}

#[test]
fn a_factor_that_is_not_positive_is_refused() {
    for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let options = FsdpOptions::new().with_gradient_divide_factor(factor);
        let error = divided(options, |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("gradient_divide_factor") && error.contains("positive"), "{error}");
    }
    let set = divided(FsdpOptions::new(), |model| model.set_gradient_divide_factor(0.0));
    assert!(set.unwrap_err().to_string().contains("use a positive number"));
}

#[test]
fn ranks_that_set_different_things_are_told_so() {
    let error = launch(launch_options(2), |worker| {
        let model = sharded(1, &worker, FsdpOptions::new())?;
        model.set_gradient_divide_factor(1.0 + worker.rank().index() as f64)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("gradient_divide_factor to 1"), "{error}");
    assert!(error.contains("gradient_divide_factor to 2"), "{error}");
}

#[test]
fn settings_do_not_change_between_a_forward_and_its_backward() {
    on_ranks(2, |worker| {
        let model = sharded(2, worker, FsdpOptions::new())?;
        let loss = loss(model.forward(input(0, 0, 4, worker.device())));
        let refused = |changed: Result<(), Error>| {
            let is_refused =
                matches!(changed, Err(Error::Schedule(ScheduleError::ControlledDuringPass { .. })));
            assert!(is_refused, "{changed:?}");
        };
        refused(model.set_reshard_after_forward(ReshardAfterForward::Never));
        refused(model.set_reshard_after_backward(false));
        refused(model.set_gradient_divide_factor(1.0));
        refused(model.unit("blocks.0")?.set_forward_prefetch(&["blocks.1"]));
        model.backward(loss)?;
        model.set_reshard_after_forward(ReshardAfterForward::Never)
    });
}

#[test]
fn units_that_the_model_does_not_have_are_named() {
    let refused = |options: FsdpOptions| {
        let made =
            launch(launch_options(2), move |worker| sharded(2, &worker, options.clone()).map(drop));
        made.unwrap_err().to_string()
    };
    let never = ReshardAfterForward::Never;
    let new = FsdpOptions::new;
    let bf16 = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    for (option, options) in [
        ("reshard_after_forward_at", new().with_reshard_after_forward_at(["blocks.7"], never)),
        ("mixed_precision_at", new().with_mixed_precision_at(["blocks.7"], bf16)),
        ("forward_prefetch_at", new().with_forward_prefetch_at("blocks.7", ["blocks.1"])),
        ("backward_prefetch_at", new().with_backward_prefetch_at("blocks.1", ["blocks.7"])),
    ] {
        let error = refused(options);
        assert!(error.contains(option) && error.contains("\"blocks.7\""), "{error}");
        assert!(error.contains("\"blocks.0\""), "the units are named: {error}");
    }
    let other = new().with_reshard_after_forward_for(unit_types![crate::support::Embed], never);
    assert!(refused(other).contains("reshard_after_forward_for"));
    let to = new().with_reshard_after_forward_at(["blocks.0"], ReshardAfterForward::To(3));
    assert!(refused(to).contains("use a divisor of 2"));
    on_ranks(2, |worker| {
        let model = sharded(2, worker, FsdpOptions::new())?;
        let unknown = model.unit("blocks.0")?.set_forward_prefetch(&["blocks.7"]);
        assert!(matches!(unknown, Err(Error::Schedule(ScheduleError::UnknownUnit { .. }))));
        let to = model.set_reshard_after_forward(ReshardAfterForward::To(3));
        assert!(matches!(to, Err(Error::Shard(ShardError::InvalidOption { .. }))), "{to:?}");
        Ok(())
    });
}

#[test]
fn precision_by_path_casts_the_units_at_the_path() {
    let run = |options: FsdpOptions| {
        of_rank_0(2, move |worker| {
            let model = sharded(BLOCKS, worker, options.clone())?;
            let x = input(worker.rank().index(), 0, 4, worker.device());
            let gradients = model.backward(loss(model.forward(x)))?;
            let gradient = gradient(&gradients, &model.blocks[1].up.weight);
            Ok((gradient, model.stats().counts().sent_bytes))
        })
    };
    let bf16 = MixedPrecisionPolicy::new()
        .with_param_dtype(FloatDType::BF16)
        .with_output_dtype(FloatDType::F32);
    let (full, bytes) = run(FsdpOptions::new());
    let (one, of_one) = run(FsdpOptions::new().with_mixed_precision_at(["blocks.1"], bf16));
    // Two all-gathers of half a block, in half as many bytes.
    assert_eq!(bytes - of_one, BLOCK_BYTES / 2);
    assert_ne!(one, full, "the block computes in bf16");
    let of_type = FsdpOptions::new().with_mixed_precision_for(unit_types![Block], bf16);
    let below =
        FsdpOptions::new().with_mixed_precision_at(["blocks.0", "blocks.1", "blocks.2"], bf16);
    let below = below.with_mixed_precision_at(["blocks.3", "blocks.4"], bf16);
    let (by_type, of_type_bytes) = run(of_type.clone());
    let (by_path, of_path_bytes) = run(below);
    assert_eq!((by_path, of_path_bytes), (by_type, of_type_bytes));
    let but_one = of_type.with_mixed_precision_at(["blocks.1"], MixedPrecisionPolicy::new());
    assert_eq!(run(but_one).1 - of_type_bytes, BLOCK_BYTES / 2, "the path overrides the type");
}

#[test]
fn a_configuration_has_the_options_of_units() {
    let never = ReshardAfterForward::Never;
    let bf16 = MixedPrecisionPolicy::new().with_param_dtype(FloatDType::BF16);
    let config = FsdpConfig::new()
        .with_reshard_after_forward_for(vec![("Block".into(), never)])
        .with_reshard_after_forward_at(vec![("blocks.1".into(), ReshardAfterForward::Always)])
        .with_reshard_after_backward(false)
        .with_units_ahead(Some(2))
        .with_forward_prefetch_at(vec![("blocks.0".into(), vec!["blocks.1".into()])])
        .with_backward_prefetch_at(vec![("blocks.1".into(), vec![])])
        .with_mixed_precision_at(vec![("blocks.0".into(), bf16)])
        .with_gradient_divide_factor(Some(1.0));
    let file = config.to_string();
    let loaded = <FsdpConfig as burn::config::Config>::load_binary(file.as_bytes()).unwrap();
    assert_eq!(loaded, config);
    let expected = FsdpOptions::new()
        .with_reshard_after_forward_for(unit_types![Block], never)
        .with_reshard_after_forward_at(["blocks.1"], ReshardAfterForward::Always)
        .with_reshard_after_backward(false)
        .with_units_ahead(2)
        .with_forward_prefetch_at("blocks.0", ["blocks.1"])
        .with_backward_prefetch_at("blocks.1", [""; 0])
        .with_mixed_precision_at(["blocks.0"], bf16)
        .with_gradient_divide_factor(1.0);
    // Unit types are known by name there, so the options differ, but what they do does not.
    let (found, expected) = (train(loaded.init::<Mlp>().unwrap()), train(expected));
    found.assert_same_bits(&expected, "a configuration");
    assert_eq!((found.all_gathers, found.buffers), (expected.all_gathers, expected.buffers));
    let misspelt = FsdpConfig::new().with_reshard_after_forward_for(vec![("Blok".into(), never)]);
    let error = misspelt.init::<Mlp>().unwrap_err().to_string();
    assert!(error.contains("reshard_after_forward_for") && error.contains("`Blok`"), "{error}");
}

/// What a hook has been given: by path the full shape, and the elements of each call.
type Seen = Arc<Mutex<BTreeMap<String, (Vec<usize>, Vec<f32>)>>>;

#[test]
fn a_hook_gets_each_reduced_gradient_once_a_step_and_replaces_it() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        on_ranks(2, move |worker| {
            let options = FsdpOptions::new().with_strategy(strategy);
            let mut model = sharded(2, worker, options)?;
            let x = |step| input(worker.rank().index(), step, 4, worker.device());
            let step = |model: &Fsdp<Mlp>| {
                model.accumulate(loss(model.forward(x(0))))?;
                model.backward(loss(model.forward(x(1))))
            };
            let plain = step(&model)?;
            let seen = Seen::default();
            let hooked = seen.clone();
            model.set_gradient_hook(move |of, gradient| {
                let elements: Vec<f32> = gradient.to_data().iter().collect();
                assert_eq!(elements.len(), of.range.len());
                let entry = (of.shape.to_vec(), elements);
                let earlier = hooked.lock().unwrap().insert(of.path.to_string(), entry);
                assert!(earlier.is_none(), "{} twice", of.path);
                if of.path == "blocks.1.up.bias" { gradient * 2.0 } else { gradient }
            });
            let gradients = step(&model)?;
            let seen = std::mem::take(&mut *seen.lock().unwrap());
            // Under `FULL_SHARD` a rank has one of the two matrices of a block.
            let expected = if strategy == ShardingStrategy::FullShard { 8 } else { 10 };
            assert_eq!(seen.len(), expected, "{:?}", seen.keys());
            let block = model.blocks[1].clone();
            let bias = block.up.bias.as_ref().expect("with a bias");
            let before = gradient(&plain, bias).expect("used");
            assert_eq!(seen["blocks.1.up.bias"], (vec![HIDDEN], before.clone()));
            let twice: Vec<f32> = before.iter().map(|element| element * 2.0).collect();
            assert_eq!(gradient(&gradients, bias), Some(twice));
            for matrix in [&block.up.weight, &block.down.weight] {
                assert_eq!(gradient(&gradients, matrix), gradient(&plain, matrix));
                let shape = |of: &GradientsParams| of.get::<2>(matrix.id).map(|it| it.dims());
                assert_eq!(shape(&gradients), shape(&plain));
            }

            model.clear_gradient_hook();
            let gradients = step(&model)?;
            assert_eq!(gradient(&gradients, bias), Some(before));
            Ok(())
        });
    }
}

#[test]
fn a_hook_that_changes_the_number_of_elements_is_refused() {
    on_ranks(2, |worker| {
        let mut model = sharded(1, worker, FsdpOptions::new())?;
        model.set_gradient_hook(|_, gradient: Tensor<1>| gradient.slice(0..1));
        let loss = loss(model.forward(input(0, 0, 4, worker.device())));
        let error = model.backward(loss).unwrap_err();
        let is_refused =
            matches!(error, Error::Schedule(ScheduleError::HookedGradient { found: 1, .. }));
        assert!(is_refused, "{error}");
        Ok(())
    });
}
