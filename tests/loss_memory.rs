//! Memory of the loss of a language model, counted by the allocator.
//!
//! One test in a binary of its own: the counters cover the whole process.

#[path = "../fsdp-runtime/tests/support/allocator.rs"]
mod allocator;

use allocator::Counting;
use burn::tensor::{Device, Int, Tensor};
use fsdp_runtime::nn::{LinearCrossEntropyOptions, linear_cross_entropy};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const WIDTH: usize = 32;
const CLASSES: usize = 20_000;
const CHUNK: usize = 64;
const FLOAT: usize = size_of::<f32>();

/// Returns the peak of one forward and backward, beyond the hidden values, the weight and the targets.
fn peak(rows: usize) -> usize {
    let device = Device::flex().autodiff();
    let hidden = Tensor::<2>::ones([rows, WIDTH], &device).require_grad();
    let weight = Tensor::<2>::ones([CLASSES, WIDTH], &device).require_grad();
    let targets = Tensor::<1, Int>::arange(0..rows as i64, &device);
    let before = ALLOCATOR.reset_peak();
    let options = LinearCrossEntropyOptions::new().with_chunk_rows(CHUNK);
    let loss = linear_cross_entropy(hidden.clone(), weight.clone(), targets, options);
    let gradients = loss.backward();
    assert!(hidden.grad(&gradients).is_some() && weight.grad(&gradients).is_some());
    ALLOCATOR.peak() - before
}

#[test]
fn the_logits_of_one_chunk_exist_at_a_time() {
    // Starts the threads, which allocate once.
    peak(CHUNK);
    // The products of `gemm` copy a factor in blocks.
    let copies = CLASSES * WIDTH * FLOAT + (8 << 20);
    let chunk = CHUNK * CLASSES * FLOAT;
    for rows in [2 * CHUNK, 8 * CHUNK, 32 * CHUNK] {
        let (of_weight, of_rows) = (CLASSES * WIDTH * FLOAT, rows * (WIDTH * FLOAT + 64));
        let (peak, bound) = (peak(rows), chunk + of_weight + of_rows + copies);
        assert!(peak <= bound, "{peak} bytes for {rows} rows, above {bound}");
        let logits = rows * CLASSES * FLOAT;
        assert!(rows < 8 * CHUNK || peak < logits / 2, "{peak} of {logits} bytes");
    }
}
