//! A step of a fused optimizer makes no allocation as large as a parameter or a rank's shard of
//! one, counted by the allocator.
//!
//! One test in a binary of its own: the counters cover the whole process.

#[path = "../fsdp-runtime/tests/support/allocator.rs"]
mod allocator;
#[path = "../fsdp-runtime/tests/support/mlp.rs"]
mod mlp;

use allocator::Counting;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::optim::{AdamConfig, AdamWConfig, SgdConfig};
use fsdp_runtime::prelude::*;
use mlp::{Sizes, loss};

const SIZES: Sizes = Sizes { blocks: 3, width: 256, hidden: 512, outputs: 4 };
const WORLD: usize = 2;
const STEPS: usize = 4;
/// Bytes of half a matrix. A unit has two matrices, so that each of two ranks holds one of them.
const THRESHOLD: usize = SIZES.width * SIZES.hidden * size_of::<f32>() / 2;

#[global_allocator]
static ALLOCATOR: Counting = Counting::with_threshold(THRESHOLD);

fn input(device: &Device) -> Tensor<2> {
    Tensor::ones([3, SIZES.width], device)
}

/// Returns the large allocations of each optimizer step of an unsharded model.
fn plain(mut optimizer: ModuleOptimizer) -> Vec<usize> {
    let device = Device::flex().autodiff();
    let mut model = SIZES.init(&device);
    let mut counts = Vec::new();
    for _ in 0..STEPS {
        let grads = loss(model.forward(input(&device))).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        ALLOCATOR.take_large();
        model = optimizer.step(1e-3, model, grads);
        counts.push(ALLOCATOR.take_large());
    }
    counts
}

/// Returns the large allocations of each optimizer step of a sharded model, on all ranks together.
fn sharded(optimizer: fn() -> ModuleOptimizer) -> Vec<usize> {
    let ranks = launch(LaunchOptions::new(WORLD).with_device(Device::flex()), move |worker| {
        let device = worker.device();
        let mut model = fully_shard(SIZES.init(device), &worker, FsdpOptions::new().with_seed(1))?;
        let mut optimizer = optimizer();
        // Rank 0 counts, while no rank allocates.
        let count = || -> Result<usize, Error> {
            worker.barrier()?;
            let first = worker.is_rank_zero();
            let count = if first { ALLOCATOR.take_large() } else { 0 };
            worker.barrier()?;
            Ok(count)
        };
        let mut counts = Vec::new();
        for _ in 0..STEPS {
            let grads = model.backward(loss(model.forward(input(device))))?;
            count()?;
            model = optimizer.step(1e-3, model, grads);
            counts.push(count()?);
        }
        Ok::<_, Error>(counts)
    });
    ranks.expect("training succeeds").swap_remove(0)
}

#[test]
fn a_step_makes_no_allocation_as_large_as_a_shard() {
    let optimizers: [(fn() -> ModuleOptimizer, usize); 3] = [
        (|| AdamWConfig::new().with_amsgrad(true).init(), 3),
        (|| AdamConfig::new().with_weight_decay(0.1).init(), 2),
        (|| SgdConfig::new().with_momentum(0.9).with_nesterov(true).init(), 1),
    ];
    for (optimizer, moments) in optimizers {
        // The first step allocates each moment of the two matrices of every block.
        let expected = [SIZES.blocks * 2 * moments, 0, 0, 0];
        assert_eq!(plain(optimizer()), expected);
        assert_eq!(sharded(optimizer), expected);
    }
    let burns = plain(burn::optim::AdamWConfig::new().init());
    assert!(burns[1..].iter().all(|&count| count > 0), "Burn's allocations are counted: {burns:?}");
}
