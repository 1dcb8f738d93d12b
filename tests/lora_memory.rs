//! Memory of a training step with LoRA adapters, counted by the allocator.
//!
//! One test in a binary of its own: the counters cover the whole process.

#[path = "../fsdp-runtime/tests/support/allocator.rs"]
mod allocator;

use allocator::Counting;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::nn::{Linear, LinearConfig};
use fsdp_runtime::prelude::*;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const WIDTH: usize = 1024;
const ROWS: usize = 16;
/// Bytes of a matrix in f32.
const MATRIX: usize = WIDTH * WIDTH * size_of::<f32>();

#[derive(Module, Debug)]
#[fsdp_unit]
struct Layer {
    linear: Linear,
}

#[fsdp_unit]
impl Layer {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.linear.forward(x)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Net {
    layers: Vec<Layer>,
}

#[fsdp_unit]
impl Net {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layers.iter().fold(x, |x, layer| layer.forward(x))
    }
}

fn net(device: &Device) -> Net {
    let layer = |_| Layer { linear: LinearConfig::new(WIDTH, WIDTH).init(device) };
    Net { layers: (0..4).map(layer).collect() }
}

/// Returns the bytes that a forward leaves for its backward, and the peak of a step, beyond what is there
/// before the step.
fn measure(storage: StorageType) -> [usize; 2] {
    let options = LaunchOptions::new(1).with_device(Device::flex());
    let measured = launch(options, move |worker: Worker| -> Result<_, fsdp_runtime::Error> {
        let net = LoraConfig::new(4).apply(net(worker.device()))?;
        let storage = StoragePolicy::new().with_frozen(storage);
        let net = fully_shard(net, &worker, FsdpOptions::new().with_storage(storage))?;
        let forward = || net.forward(Tensor::ones([ROWS, WIDTH], worker.device())).sum();
        // Starts the threads and the gather buffers, which are allocated once.
        net.backward(forward())?;
        let before = ALLOCATOR.reset_peak();
        let loss = forward();
        // The communication thread has ended its gathers, and freed their temporary copies.
        worker.barrier()?;
        let kept = ALLOCATOR.live().saturating_sub(before);
        net.backward(loss)?;
        Ok([kept, ALLOCATOR.peak() - before])
    });
    measured.expect("the rank succeeds").remove(0)
}

/// Inputs and results of the four layers take 0.5 MiB. The four matrices take 16 MiB.
#[test]
fn nothing_of_the_size_of_a_frozen_matrix_is_kept_or_has_a_gradient() {
    for storage in [StorageType::F32, StorageType::Bf16, StorageType::INT8, StorageType::NF4] {
        let [kept, peak] = measure(storage);
        assert!(kept < MATRIX, "{kept} bytes are kept for backward, from {storage:?}");
        // A gather from bf16 or from codes makes temporary copies, and two units may be gathered at a time.
        let temporary = if storage == StorageType::F32 { MATRIX } else { 3 * MATRIX };
        assert!(peak < temporary, "{peak} bytes beyond those before the step, from {storage:?}");
    }
}
