//! The checks of parity, for any device: `parity.rs` runs them on Flex, `cube.rs` on CubeCL.

use burn::module::Module;
use burn::optim::GradientsParams;
use fsdp_runtime::prelude::*;

use super::{Net, Run, batch, loss};

/// A bound that the norms of some steps are above.
pub const CLIP: f64 = 0.3;

/// `FULL_SHARD` and `NO_SHARD` agree in every bit, dropout and clipping included.
pub fn full_shard_equals_no_shard(run: &Run, worlds: &[usize]) {
    for &world in worlds {
        let run = Run { world, dropout: 0.1, clip: Some(CLIP), ..run.clone() };
        let full = run.clone().with_strategy(ShardingStrategy::FullShard).launch();
        let none = run.with_strategy(ShardingStrategy::NoShard).launch();
        full.assert_bitwise(&none);
        assert!(full.norms.iter().any(|&norm| norm > CLIP), "clipping took part: {:?}", full.norms);
        assert_eq!(full.num_params, none.num_params);
        assert!(full.losses.iter().all(|loss| loss.is_finite()));
    }
}

/// A run gives the same bits again.
pub fn repeats(run: &Run, worlds: &[usize]) {
    for &world in worlds {
        let run = Run { world, dropout: 0.2, clip: Some(1.0), ..run.clone() };
        run.launch().assert_bitwise(&run.launch());
    }
}

/// The same global batch on any number of ranks.
pub fn worlds_agree(run: &Run, worlds: &[usize]) {
    let rows = 16;
    let on = |world| Run { world, rows_per_rank: rows / world, learning_rate: 1e-3, ..run.clone() };
    let one = on(1).launch();
    for &world in worlds {
        on(world).launch().assert_close(&one, 1e-5);
    }
}

/// Sharded training is training with plain Burn.
pub fn equals_plain_burn(run: &Run) {
    let plain = run.clone();
    let options = LaunchOptions::new(1).with_device(run.device.clone());
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
    for (a, b) in run.launch().losses.iter().zip(&expected[0]) {
        assert!((a - b).abs() <= 1e-5 * b.abs(), "{a} {b}");
    }
}
