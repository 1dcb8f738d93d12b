//! After its first steps, training allocates no parameter-sized buffer, counted by the allocator.
//!
//! One test in a binary of its own: the counters cover the whole process.

#[path = "../fsdp-runtime/tests/support/allocator.rs"]
mod allocator;
#[path = "../fsdp-runtime/tests/support/mlp.rs"]
mod mlp;

use allocator::Counting;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::prelude::*;
use mlp::{Sizes, loss};

const SIZES: Sizes = Sizes { blocks: 6, width: 512, hidden: 1024, outputs: 4 };
/// Each rank holds half a matrix of a unit, which has two.
const WORLD: usize = 4;
const MATRIX_BYTES: usize = SIZES.width * SIZES.hidden * size_of::<f32>();
/// Bytes between a rank's shard of a matrix and the matrix.
const THRESHOLD: usize = MATRIX_BYTES * 3 / 4;

#[global_allocator]
static ALLOCATOR: Counting = Counting::with_threshold(THRESHOLD);

/// Large allocations of one step, by phase.
#[derive(Clone, Copy, Debug)]
struct Step {
    forward: usize,
    backward: usize,
    optimizer: usize,
}

fn input(device: &Device) -> Tensor<2> {
    Tensor::ones([3, SIZES.width], device)
}

/// Returns the last of three steps with plain Burn.
fn plain_step() -> Step {
    let device = Device::flex().autodiff();
    let mut model = SIZES.init(&device);
    let mut optimizer = AdamWConfig::new().init();
    let mut step = || {
        ALLOCATOR.take_large();
        let loss = loss(model.forward(input(&device)));
        let forward = ALLOCATOR.take_large();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let backward = ALLOCATOR.take_large();
        model = optimizer.step(1e-3, model.clone(), grads);
        Step { forward, backward, optimizer: ALLOCATOR.take_large() }
    };
    step();
    step();
    step()
}

/// Five steps on all ranks together, and bytes of the gather buffers: of all, and of the most that
/// were in use at once.
fn sharded_steps() -> (Vec<Step>, usize, usize) {
    let mut ranks = launch(LaunchOptions::new(WORLD).with_device(Device::flex()), move |worker| {
        let device = worker.device();
        let mut model = fully_shard(SIZES.init(device), &worker, FsdpOptions::new().with_seed(1))?;
        let mut optimizer = AdamWConfig::new().init();
        // Rank 0 counts, while no rank allocates.
        let count = || -> Result<usize, Error> {
            worker.barrier()?;
            let first = worker.is_rank_zero();
            let count = if first { ALLOCATOR.take_large() } else { 0 };
            worker.barrier()?;
            Ok(count)
        };
        let mut steps = Vec::new();
        for _ in 0..5 {
            count()?;
            let loss = loss(model.forward(input(device)));
            let forward = count()?;
            let grads = model.backward(loss)?;
            let backward = count()?;
            model = optimizer.step(1e-3, model, grads);
            steps.push(Step { forward, backward, optimizer: count()? });
        }
        Ok::<_, Error>((
            steps,
            model.stats().gather_buffer_bytes(),
            model.stats().peak_unsharded_bytes(),
        ))
    })
    .expect("training succeeds");
    ranks.swap_remove(0)
}

#[test]
fn steady_state_training_allocates_no_parameter_sized_buffer() {
    let plain = plain_step();
    assert!(plain.backward >= 2 * SIZES.blocks, "gradients are counted: {plain:?}");

    let (steps, gather_buffer_bytes, peak) = sharded_steps();
    assert_eq!(steps.len(), 5);
    for step in &steps[2..] {
        assert_eq!(step.forward, 0, "forward gathers into its buffers: {steps:?}, plain {plain:?}");
        assert!(
            step.backward <= WORLD * plain.backward,
            "backward allocates Burn's own gradients alone: {steps:?}, plain {plain:?}"
        );
        assert_eq!(step.optimizer, 0, "the optimizer works on shards: {steps:?}");
    }

    // Two gather buffers of a block's size, and the root's. Each matrix is padded by less than one
    // alignment.
    let block = 2 * MATRIX_BYTES;
    let root = SIZES.width * SIZES.outputs * size_of::<f32>();
    assert!(
        (2 * block + root..2 * block + root + 4096).contains(&gather_buffer_bytes),
        "{gather_buffer_bytes}"
    );
    assert!(peak <= gather_buffer_bytes && peak > block, "{peak} {gather_buffer_bytes}");
}
