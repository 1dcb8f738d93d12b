//! Steady-state training allocates no parameter-sized buffer of its own, counted by the allocator.
//!
//! One test in a binary of its own: the counter is the process's.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor, activation::relu};
use fsdp_runtime::Error;
use fsdp_runtime::prelude::*;

struct Counting;

static LARGE: AtomicUsize = AtomicUsize::new(0);

/// More than a rank's shard of a matrix, and less than the matrix.
const THRESHOLD: usize = MATRIX_BYTES * 3 / 4;
const MATRIX_BYTES: usize = WIDTH * HIDDEN * 4;
const WIDTH: usize = 512;
const HIDDEN: usize = 1024;
const LAYERS: usize = 6;
/// Each rank holds half a matrix: a unit has two.
const WORLD: usize = 4;

// SAFETY: every call is handed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= THRESHOLD {
            LARGE.fetch_add(1, SeqCst);
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
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
    Net { blocks: (0..LAYERS).map(block).collect(), head: LinearConfig::new(WIDTH, 4).init(device) }
}

/// Large allocations of the forward, the backward and the optimizer of each step.
fn count(mut phase: impl FnMut(&mut dyn FnMut()), steps: usize) -> Vec<[usize; 3]> {
    let mut counts = Vec::new();
    for _ in 0..steps {
        let mut step = Vec::new();
        LARGE.store(0, SeqCst);
        phase(&mut || step.push(LARGE.swap(0, SeqCst)));
        counts.push([step[0], step[1], step[2]]);
    }
    counts
}

#[test]
fn steady_state_training_allocates_no_parameter_sized_buffer() {
    let device = Device::flex().autodiff();
    let input = |device: &Device| Tensor::<2>::ones([3, WIDTH], device);

    let mut model = net(&device);
    let mut optimizer = AdamWConfig::new().init();
    let plain = count(
        |mark| {
            let loss = model.forward(input(&device));
            mark();
            let grads = burn::optim::GradientsParams::from_grads(loss.backward(), &model);
            mark();
            model = optimizer.step(1e-3, model.clone(), grads);
            mark();
        },
        3,
    )
    .pop()
    .expect("three steps");

    let ranks = launch(LaunchOptions::new(WORLD).with_device(Device::flex()), move |worker| {
        let device = worker.device();
        let mut model = fully_shard(net(device), &worker, FsdpOptions::new().with_seed(1))?;
        let mut optimizer = AdamWConfig::new().init();
        let mut counts = Vec::new();
        let meet = |at: &mut Vec<usize>| -> Result<(), Error> {
            worker.barrier()?;
            if worker.rank().index() == 0 {
                at.push(LARGE.swap(0, SeqCst));
            }
            worker.barrier()
        };
        for _ in 0..5 {
            let mut step = Vec::new();
            meet(&mut Vec::new())?;
            let loss = model.forward(input(device));
            meet(&mut step)?;
            let grads = model.backward(loss)?;
            meet(&mut step)?;
            model = optimizer.step(1e-3, model, grads);
            meet(&mut step)?;
            counts.push(step);
        }
        Ok::<_, Error>((
            counts,
            model.stats().gather_buffer_bytes(),
            model.stats().peak_unsharded_bytes(),
        ))
    })
    .expect("training succeeds");

    let (counts, gather_buffer_bytes, peak) = &ranks[0];
    for step in &counts[2..] {
        let [forward, backward, optimizer] = step[..] else { panic!("{counts:?}") };
        assert_eq!(forward, 0, "forward gathers into its slots: {counts:?}, plain {plain:?}");
        assert!(
            backward <= WORLD * plain[1],
            "only Burn's own gradients: {counts:?}, plain {plain:?}"
        );
        assert_eq!(optimizer, 0, "the optimizer sees shards: {counts:?}");
    }
    assert!(plain[1] >= 2 * LAYERS, "the counter sees the gradients: {plain:?}");

    // Two slots, each as large as a block, and the root's. Padding is below one alignment a matrix.
    let block = 2 * MATRIX_BYTES;
    let root = WIDTH * 4 * 4;
    assert!(
        (2 * block + root..2 * block + root + 4096).contains(gather_buffer_bytes),
        "{gather_buffer_bytes}"
    );
    assert!(peak <= gather_buffer_bytes && *peak > block, "{peak} {gather_buffer_bytes}");
}
