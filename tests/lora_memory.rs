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
/// Steps that are measured.
const STEPS: usize = 5;
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
/// before the step: each is the smallest of several steps, since a gather that comes early may need a buffer
/// more than the step before.
fn measure(storage: StorageType) -> [usize; 2] {
    let options = LaunchOptions::new(1).with_device(Device::flex());
    let measured = launch(options, move |worker: Worker| -> Result<_, fsdp_runtime::Error> {
        let net = LoraConfig::new(4).apply(net(worker.device()))?;
        let storage = StoragePolicy::new().with_frozen(storage);
        let net = fully_shard(net, &worker, FsdpOptions::new().with_storage(storage))?;
        let forward = || net.forward(Tensor::ones([ROWS, WIDTH], worker.device())).sum();
        // Starts the threads and the gather buffers.
        net.backward(forward())?;
        let mut smallest = [usize::MAX; 2];
        for _ in 0..STEPS {
            let before = ALLOCATOR.reset_peak();
            let loss = forward();
            // The communication thread has ended its gathers, and freed their temporary copies.
            worker.barrier()?;
            let kept = ALLOCATOR.live().saturating_sub(before);
            net.backward(loss)?;
            worker.barrier()?;
            let peak = ALLOCATOR.peak().saturating_sub(before);
            smallest = [smallest[0].min(kept), smallest[1].min(peak)];
        }
        Ok(smallest)
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
