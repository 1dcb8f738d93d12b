//! Memory that activation checkpointing saves in a step, counted by the allocator.
//!
//! One test in a binary of its own: the counters cover the whole process.

#[path = "../fsdp-runtime/tests/support/allocator.rs"]
mod allocator;
#[path = "../fsdp-runtime/tests/support/mlp.rs"]
mod mlp;

use allocator::Counting;
use burn::tensor::{Device, Tensor};
use fsdp_runtime::Error;
use fsdp_runtime::memory::Memory;
use fsdp_runtime::model::Counts;
use fsdp_runtime::prelude::*;
use mlp::{Block, Sizes, loss};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const ROWS: usize = 1024;
const SIZES: Sizes = Sizes { blocks: 12, width: 64, hidden: 256, outputs: 4 };
/// Bytes of a block's input.
const INPUT: usize = ROWS * SIZES.width * size_of::<f32>();
/// Bytes that a block keeps for its backward in addition to its input: the hidden values, for the
/// second matrix.
const HIDDEN_VALUES: usize = ROWS * SIZES.hidden * size_of::<f32>();

/// Number of steps that are measured.
const STEPS: usize = 5;

struct Found {
    /// Bytes of the peak of a step, beyond what was live before it.
    peak: usize,
    /// Bytes that the step leaves live.
    left: usize,
    counts: Counts,
    memory: Memory,
}

fn step(which: ActivationCheckpointing) -> Found {
    let options = LaunchOptions::new(1).with_device(Device::flex());
    let mut ranks = launch(options, move |worker| {
        let device = worker.device();
        let options = FsdpOptions::new().with_seed(1).with_activation_checkpointing(which);
        let net = fully_shard(SIZES.init(device), &worker, options)?;
        let step = || {
            let x = Tensor::ones([ROWS, SIZES.width], device);
            net.backward(loss(net.forward(x))).map(drop)
        };
        step()?;
        let (mut peak, mut left) = (usize::MAX, usize::MAX);
        // The system may stop another thread before it has freed what it has read, so a step's peak can
        // only be too large: the least of several counts.
        for _ in 0..STEPS {
            let before = ALLOCATOR.settled();
            ALLOCATOR.reset_peak();
            step()?;
            peak = peak.min(ALLOCATOR.peak().saturating_sub(before));
            left = left.min(ALLOCATOR.settled().saturating_sub(before));
        }
        Ok::<_, Error>(Found {
            peak,
            left,
            counts: net.stats().counts(),
            memory: net.stats().memory(),
        })
    })
    .unwrap();
    ranks.swap_remove(0)
}

#[test]
fn checkpointing_saves_the_activations_of_all_blocks_but_one() {
    let plain = step(ActivationCheckpointing::None);
    let checkpointed = step(ActivationCheckpointing::Units(unit_types![Block]));
    assert_eq!(checkpointed.counts, plain.counts, "as many gathers");

    let saved = plain.peak - checkpointed.peak;
    let expected = (SIZES.blocks - 1) * HIDDEN_VALUES;
    assert!(saved >= expected, "{saved} of {} bytes are saved, not {expected}", plain.peak);
    // The inputs of all blocks, and what one block needs for its forward and backward.
    let bound = SIZES.blocks * INPUT + 5 * HIDDEN_VALUES;
    assert!(checkpointed.peak <= bound, "a peak of {} bytes, above {bound}", checkpointed.peak);
    assert!(checkpointed.left < INPUT, "{} bytes stay after a step", checkpointed.left);

    assert_eq!(checkpointed.memory.activations.peak, SIZES.blocks * INPUT);
    assert_eq!(checkpointed.memory.activations.now, 0);
    assert_eq!(plain.memory.activations.peak, 0);
}
