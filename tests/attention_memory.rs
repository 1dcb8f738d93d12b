//! Memory of attention, counted by the allocator.
//!
//! One test in a binary of its own: the counters cover the whole process.

#[path = "../fsdp-runtime/tests/support/allocator.rs"]
mod allocator;

use allocator::Counting;
use burn::tensor::{Device, Tensor};
use fsdp_runtime::nn::{AttentionOptions, DropoutConfig, attention};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

/// The time of a test grows with the number of heads; the memory of one head shows how all grow.
const HEADS: usize = 2;
const WIDTH: usize = 64;

/// Returns the bytes of a query of this length.
const fn bytes(length: usize) -> usize {
    HEADS * length * WIDTH * size_of::<f32>()
}

/// Returns the peak of one forward and backward, beyond the query, the key and the value.
fn peak(length: usize, options: AttentionOptions) -> usize {
    let device = Device::flex().autodiff();
    let heads = || Tensor::<4>::ones([1, HEADS, length, WIDTH], &device).require_grad();
    let [query, key, value] = [heads(), heads(), heads()];
    let before = ALLOCATOR.reset_peak();
    let output = attention(query.clone(), key.clone(), value.clone(), options);
    let gradients = output.sum().backward();
    assert!(query.grad(&gradients).is_some());
    ALLOCATOR.peak() - before
}

#[test]
fn memory_grows_linearly_with_the_length() {
    let dropout = DropoutConfig::new(0.1).init();
    let variants =
        [AttentionOptions::new(), AttentionOptions::new().with_causal(true).with_dropout(&dropout)];
    for options in variants {
        // Starts the threads, which allocate once.
        peak(512, options.clone());
        let peaks = [512, 1024, 2048, 4096, 8192].map(|length| {
            let peak = peak(length, options.clone());
            // The output, its gradient twice, and the gradients of query, key and value; and tiles of
            // each thread.
            let bound = 7 * bytes(length) + (8 << 20);
            assert!(peak <= bound, "{peak} bytes at length {length}, above {bound}");
            peak
        });
        for (shorter, longer) in peaks.iter().zip(&peaks[1..]) {
            let growth = *longer as f64 / *shorter as f64;
            assert!(growth < 2.1, "{peaks:?}");
        }
    }
}
