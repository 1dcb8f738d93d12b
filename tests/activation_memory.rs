//! What checkpointing saves, counted by the allocator.
//!
//! One test in a binary of its own: the counter is the process's.

#[path = "support/peak.rs"]
mod peak;

use std::sync::atomic::Ordering::SeqCst;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Counts, Error, Memory};
use peak::{LIVE, PEAK};

const ROWS: usize = 1024;
const WIDTH: usize = 64;
const HIDDEN: usize = 256;
const BLOCKS: usize = 12;
/// A block's input.
const INPUT: usize = ROWS * WIDTH * size_of::<f32>();
/// What a block keeps for its backward beside its input: the hidden values, for the matrix after
/// them.
const HIDDEN_VALUES: usize = ROWS * HIDDEN * size_of::<f32>();

#[derive(Module, Debug)]
#[fsdp_unit(checkpoint)]
struct Block {
    up: Linear,
    down: Linear,
}

#[fsdp_unit]
impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.down.forward(relu(self.up.forward(x)))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Net {
    blocks: Vec<Block>,
    head: Linear,
}

#[fsdp_unit]
impl Net {
    fn forward(&self, x: Tensor<2>) -> Tensor<1> {
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.head.forward(x).powf_scalar(2.0).mean()
    }
}

struct Found {
    /// The most bytes at once in a step, beyond what was there before it.
    peak: usize,
    /// Bytes more after the step than before it.
    left: usize,
    counts: Counts,
    memory: Memory,
}

fn step(which: ActivationCheckpointing) -> Found {
    let options = LaunchOptions::new(1).with_device(Device::flex());
    let mut ranks = launch(options, move |worker| {
        let device = worker.device();
        let block = |_| Block {
            up: LinearConfig::new(WIDTH, HIDDEN).init(device),
            down: LinearConfig::new(HIDDEN, WIDTH).init(device),
        };
        let head = LinearConfig::new(WIDTH, 4).init(device);
        let net = Net { blocks: (0..BLOCKS).map(block).collect(), head };
        let options = FsdpOptions::new().with_seed(1).with_activation_checkpointing(which);
        let net = fully_shard(net, &worker, options)?;
        let step = || {
            let x = Tensor::ones([ROWS, WIDTH], device);
            net.backward(net.forward(x)).map(drop)
        };
        step()?;
        let before = LIVE.load(SeqCst);
        PEAK.store(before, SeqCst);
        step()?;
        let peak = PEAK.load(SeqCst) - before;
        let left = LIVE.load(SeqCst).saturating_sub(before);
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
fn the_activations_of_all_blocks_but_one_are_saved() {
    let plain = step(ActivationCheckpointing::None);
    let kept = step(ActivationCheckpointing::Annotated);
    assert_eq!(kept.counts, plain.counts, "as many gathers");

    let saved = plain.peak - kept.peak;
    let expected = (BLOCKS - 1) * HIDDEN_VALUES;
    assert!(saved >= expected, "{saved} of {} bytes are saved, not {expected}", plain.peak);
    // The inputs, and what one block needs to run forward and backward.
    let bound = BLOCKS * INPUT + 5 * HIDDEN_VALUES;
    assert!(kept.peak <= bound, "{} bytes at once, more than {bound}", kept.peak);
    assert!(kept.left < INPUT, "{} bytes stay after a step", kept.left);

    assert_eq!(kept.memory.activations.peak, BLOCKS * INPUT);
    assert_eq!(kept.memory.activations.now, 0);
    assert_eq!(plain.memory.activations.peak, 0);
}
