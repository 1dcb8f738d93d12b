//! A step of a fused optimizer allocates nothing as large as a parameter, or as a shard of one,
//! counted by the allocator.
//!
//! One test in a binary of its own: the counter is the process's.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor, activation::relu};
use fsdp_runtime::Error;
use fsdp_runtime::optim::{AdamConfig, AdamWConfig, SgdConfig};
use fsdp_runtime::prelude::*;

struct Counting;

static LARGE: AtomicUsize = AtomicUsize::new(0);

/// Half a matrix. A unit has two, so that each rank holds one of them.
const THRESHOLD: usize = WIDTH * HIDDEN * 4 / 2;
const WIDTH: usize = 256;
const HIDDEN: usize = 512;
const WORLD: usize = 2;
const STEPS: usize = 4;

// SAFETY: every call is handed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= THRESHOLD {
            LARGE.fetch_add(1, SeqCst);
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= THRESHOLD {
            LARGE.fetch_add(1, SeqCst);
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[derive(Module, Debug)]
#[fsdp_unit]
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

fn net(device: &Device) -> Net {
    let block = |_| Block {
        up: LinearConfig::new(WIDTH, HIDDEN).init(device),
        down: LinearConfig::new(HIDDEN, WIDTH).init(device),
    };
    Net { blocks: (0..3).map(block).collect(), head: LinearConfig::new(WIDTH, 4).init(device) }
}

fn input(device: &Device) -> Tensor<2> {
    Tensor::ones([3, WIDTH], device)
}

/// Large allocations of each optimizer step of an unsharded model.
fn plain(mut optimizer: ModuleOptimizer) -> Vec<usize> {
    let device = Device::flex().autodiff();
    let mut model = net(&device);
    let mut counts = Vec::new();
    for _ in 0..STEPS {
        let grads = model.forward(input(&device)).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        let before = LARGE.load(SeqCst);
        model = optimizer.step(1e-3, model, grads);
        counts.push(LARGE.load(SeqCst) - before);
    }
    counts
}

/// Large allocations of each optimizer step of a sharded model, of all ranks.
fn sharded(optimizer: fn() -> ModuleOptimizer) -> Vec<usize> {
    let ranks = launch(LaunchOptions::new(WORLD).with_device(Device::flex()), move |worker| {
        let device = worker.device();
        let mut model = fully_shard(net(device), &worker, FsdpOptions::new().with_seed(1))?;
        let mut optimizer = optimizer();
        let mut counts = Vec::new();
        for _ in 0..STEPS {
            let grads = model.backward(model.forward(input(device)))?;
            worker.barrier()?;
            let before = LARGE.load(SeqCst);
            worker.barrier()?;
            model = optimizer.step(1e-3, model, grads);
            worker.barrier()?;
            counts.push(LARGE.load(SeqCst) - before);
            worker.barrier()?;
        }
        Ok::<_, Error>(counts)
    });
    ranks.expect("training succeeds").swap_remove(0)
}

#[test]
fn a_step_allocates_nothing_as_large_as_a_fragment() {
    let theirs = || burn::optim::AdamWConfig::new().init();
    let optimizers: [fn() -> ModuleOptimizer; 3] = [
        || AdamWConfig::new().with_amsgrad(true).init(),
        || AdamConfig::new().with_weight_decay(0.1).init(),
        || SgdConfig::new().with_momentum(0.9).with_nesterov(true).init(),
    ];
    // Of three units, each matrix's moments, in the first step.
    for (optimizer, moments) in optimizers.into_iter().zip([3, 2, 1]) {
        assert_eq!(plain(optimizer()), [3 * 2 * moments, 0, 0, 0]);
        assert_eq!(sharded(optimizer), [3 * 2 * moments, 0, 0, 0]);
    }
    assert!(plain(theirs())[1..].iter().all(|&count| count > 0), "the counter sees Burn's");
}
