//! Runs that must agree, on any device: `training/parity.rs` compares them on Flex, `cube.rs` on
//! CubeCL.

use burn::module::Module;
use burn::optim::GradientsParams;
use fsdp_runtime::prelude::*;

use super::compare::{Within, assert_close, assert_state_differs};
use super::ranks::launch_options;
use super::{Net, Outcome, Run, batch, loss};

/// A bound that the norms of some steps exceed.
pub const CLIP: f64 = 0.3;

/// Asserts that clipping to `bound` changed some step, and that every loss is finite.
#[track_caller]
pub fn assert_clipped(outcome: &Outcome, bound: f64) {
    assert!(outcome.norms.iter().any(|&norm| norm > bound), "never clipped: {:?}", outcome.norms);
    assert!(outcome.losses.iter().all(|loss| loss.is_finite()), "{:?}", outcome.losses);
}

/// `FULL_SHARD` and `NO_SHARD` agree in every bit, with dropout and clipping. Training changes the
/// parameters.
pub fn full_shard_equals_no_shard(run: &Run, worlds: &[usize]) {
    for &world in worlds {
        let run = Run { world, dropout: 0.1, clip: Some(CLIP), ..run.clone() };
        let untrained = Run { steps: 0, ..run.clone() }.launch();
        let full = run.clone().with_strategy(ShardingStrategy::FullShard).launch();
        let none = run.with_strategy(ShardingStrategy::NoShard).launch();
        full.assert_bitwise(&none);
        assert_state_differs(&full.state, &untrained.state, "trained and untrained");
        assert_clipped(&full, CLIP);
        assert_eq!(full.num_params, none.num_params);
    }
}

/// Two launches of a run agree in every bit.
pub fn repeats(run: &Run, worlds: &[usize]) {
    for &world in worlds {
        let run = Run { world, dropout: 0.2, clip: Some(1.0), ..run.clone() };
        run.launch().assert_bitwise(&run.launch());
    }
}

/// The same global batch has the same losses on any number of ranks.
pub fn worlds_agree(run: &Run, worlds: &[usize]) {
    let rows = 16;
    let on = |world| Run { world, rows_per_rank: rows / world, learning_rate: 1e-3, ..run.clone() };
    let one = on(1).launch();
    for &world in worlds {
        on(world).launch().assert_close(&one, 1e-5);
    }
}

/// Sharded training has the losses of training with plain Burn.
pub fn equals_plain_burn(run: &Run) {
    let plain = run.clone();
    let options = launch_options(1).with_device(run.device.clone());
    let expected = launch(options, move |worker| {
        let device = worker.device();
        // The weights that the sharded run starts from.
        let options = plain.options.clone().with_strategy(ShardingStrategy::NoShard);
        let start = fully_shard(Net::new(plain.blocks, 0.0, device), &worker, options)?;
        let mut net = (*start).clone().materialize();
        let mut optimizer = (plain.optimizer)();
        let mut losses = Vec::new();
        for step in 0..plain.steps {
            let (tokens, labels) = batch(step, 0..plain.world * plain.rows_per_rank, device);
            let loss = loss(net.forward(tokens), labels);
            losses.push(f64::from(loss.clone().into_scalar::<f32>()));
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            net = optimizer.step(plain.learning_rate, net, grads);
        }
        Ok::<_, fsdp_runtime::Error>(losses)
    })
    .expect("plain training succeeds");
    assert_close(&run.launch().losses, &expected[0], Within::Relative(1e-5), "losses");
}
