//! One model, sharded in every way: the same losses, norms and parameters.

mod support;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use fsdp_runtime::prelude::*;
use support::{Net, Run, batch, loss};

fn with(run: Run, dropout: f64, clip: Option<f64>) -> Run {
    Run { dropout, clip, ..run }
}

#[test]
fn full_shard_equals_no_shard_bit_for_bit() {
    for world in [1, 2, 3, 4] {
        let run = with(Run::new(world), 0.1, Some(0.5));
        let full = run.clone().strategy(ShardingStrategy::FullShard).launch();
        let none = run.strategy(ShardingStrategy::NoShard).launch();
        full.assert_bitwise(&none);
        assert!(full.norms.iter().any(|&norm| norm > 0.5), "clipping took part: {:?}", full.norms);
        assert_eq!(full.num_params, none.num_params);
        assert!(full.losses.iter().all(|loss| loss.is_finite()));
    }
}

#[test]
fn a_run_repeats_bit_for_bit() {
    for world in [2, 4] {
        let run = with(Run::new(world), 0.2, Some(1.0));
        run.launch().assert_bitwise(&run.launch());
    }
}

#[test]
fn two_ranks_equal_one_with_twice_the_batch() {
    let one = Run { rows_per_rank: 16, steps: 20, learning_rate: 1e-3, ..Run::new(1) };
    let two = Run { rows_per_rank: 8, steps: 20, learning_rate: 1e-3, ..Run::new(2) };
    let four = Run { rows_per_rank: 4, steps: 20, learning_rate: 1e-3, ..Run::new(4) };
    let one = one.launch();
    two.launch().assert_close(&one, 1e-5);
    four.launch().assert_close(&one, 1e-5);
}

#[test]
fn training_sharded_equals_training_with_plain_burn() {
    let sharded = Run { rows_per_rank: 4, ..Run::new(2) };
    let steps = sharded.steps;
    let expected = launch(LaunchOptions::new(1).device(Device::flex()), move |worker| {
        let device = worker.device();
        // The weights that the sharded run starts from.
        let start = fully_shard(Net::new(4, 0.0, device), &worker, FsdpOptions::new().seed(7).strategy(ShardingStrategy::NoShard))?;
        let mut net = burn::module::Module::materialize((*start).clone());
        let mut optimizer = AdamWConfig::new().init();
        let mut losses = Vec::new();
        for step in 0..steps {
            let (tokens, labels) = batch(step, 0..8, device);
            let loss = loss(net.forward(tokens), labels);
            losses.push(f64::from(loss.clone().into_scalar::<f32>()));
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            net = optimizer.step(1e-2, net, grads);
        }
        Ok::<_, fsdp_runtime::Error>(losses)
    })
    .expect("plain training succeeds");
    for (a, b) in sharded.launch().losses.iter().zip(&expected[0]) {
        assert!((a - b).abs() <= 1e-5 * b.abs(), "{a} {b}");
    }
}

#[test]
fn schedule_options_change_no_bit() {
    let run = with(Run::new(2), 0.1, Some(1.0));
    let expected = run.launch();
    let variants = [
        run.options.clone().slots(1),
        run.options.clone().slots(3),
        run.options.clone().forward_prefetch(false),
        run.options.clone().backward_prefetch(BackwardPrefetch::None),
        run.options.clone().persist_below(200),
    ];
    for (index, options) in variants.into_iter().enumerate() {
        let variant = Run { options, ..run.clone() }.launch();
        if index == 4 {
            // Small matrices change sides in the norm's sum.
            variant.assert_close(&expected, 1e-6);
        } else {
            variant.assert_bitwise(&expected);
        }
    }
}

#[test]
fn a_step_gathers_each_unit_twice_and_reduces_it_once() {
    let run = Run { steps: 3, ..Run::new(2) };
    let outcome = run.launch();
    // Six units; the root and the last block stay unsharded for their backward.
    let full = outcome.state.len();
    assert_eq!(outcome.counts.all_gathers, 3 * (6 * 2 - 2));
    assert_eq!(outcome.counts.reduce_scatters, 3 * 6);
    assert_eq!(outcome.counts.mis_prefetches, 0);
    assert!(outcome.counts.single_gathers <= full, "only the full state gathers one by one");
    let none = run.strategy(ShardingStrategy::NoShard).launch();
    assert_eq!((none.counts.all_gathers, none.counts.reduce_scatters), (0, 3 * 6));
}

#[test]
fn no_more_is_unsharded_than_the_slots_hold() {
    let outcome = Run::new(2).launch();
    assert!(outcome.peak_unsharded_bytes > 0);
    assert!(outcome.peak_unsharded_bytes <= outcome.slot_bytes);
    let deeper = Run { blocks: 9, ..Run::new(2) }.launch();
    assert_eq!(deeper.slot_bytes, outcome.slot_bytes, "two buffers and the root's, for any depth");
    assert!(deeper.sharded_bytes > outcome.sharded_bytes);
}
