//! Memory of attention, counted by the allocator.
//!
//! One test in a binary of its own: the counters cover the whole process.

#[path = "../fsdp-runtime/tests/support/allocator.rs"]
mod allocator;

use allocator::Counting;
use burn::tensor::{DType, Device, Int, Tensor};
use fsdp_runtime::nn::{AttentionOptions, DropoutConfig, attention};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

/// The time of a test grows with the number of heads; the memory of one head shows how all grow.
const HEADS: usize = 2;
const WIDTH: usize = 64;

/// Bytes that the tiles of all threads take at most. A peak has those of the threads that run at one moment.
const TILES: usize = 8 << 20;

/// Returns the bytes of a query of this length.
const fn bytes(length: usize) -> usize {
    HEADS * length * WIDTH * size_of::<f32>()
}

/// What is measured beside the length.
#[derive(Clone)]
struct Variant {
    options: AttentionOptions,
    key_heads: usize,
    dtype: DType,
    /// Number of documents of a row.
    documents: usize,
}

impl Variant {
    /// Returns the peak of one forward and backward, beyond the query, the key and the value.
    fn peak(&self, length: usize) -> usize {
        let device = Device::flex().autodiff();
        let tensor = |heads| {
            Tensor::<4>::ones([1, heads, length, WIDTH], (&device, self.dtype)).require_grad()
        };
        let [query, key, value] = [tensor(HEADS), tensor(self.key_heads), tensor(self.key_heads)];
        let mut options = self.options.clone();
        if self.documents > 1 {
            let positions = Tensor::<1, Int>::arange(0..length as i64, &device);
            let numbers = positions.div_scalar((length / self.documents) as i64).unsqueeze();
            options = options.with_segments(numbers);
        }
        let before = ALLOCATOR.reset_peak();
        let output = attention(query.clone(), key.clone(), value.clone(), options);
        let gradients = output.sum().backward();
        assert!(query.grad(&gradients).is_some());
        ALLOCATOR.peak() - before
    }
}

#[test]
fn memory_grows_linearly_with_the_length() {
    let dropout = DropoutConfig::new(0.1).init();
    let causal = AttentionOptions::new().with_causal(true);
    let plain = Variant {
        options: AttentionOptions::new(),
        key_heads: HEADS,
        dtype: DType::F32,
        documents: 1,
    };
    let variants = [
        plain.clone(),
        Variant { options: causal.clone().with_dropout(&dropout), ..plain.clone() },
        Variant { options: causal.clone().with_window(300), key_heads: 1, ..plain.clone() },
        Variant { options: causal.clone(), key_heads: 1, documents: 8, ..plain.clone() },
        Variant { options: causal, dtype: DType::BF16, documents: 8, ..plain },
    ];
    for variant in variants {
        // Starts the threads, which allocate once.
        variant.peak(512);
        let peaks = [512, 1024, 2048, 4096, 8192].map(|length| {
            let peak = variant.peak(length);
            // The output, its gradient twice, and the gradients of query, key and value; and tiles of
            // each thread. In bf16 these have half of the bytes, and the sums of a head of the key have
            // four bytes an element.
            let bound = 7 * bytes(length) + TILES;
            assert!(peak <= bound, "{peak} bytes at length {length}, above {bound}");
            peak
        });
        for (shorter, longer) in peaks.iter().zip(&peaks[1..]) {
            // The tiles may belong to the peak of the longer rows alone. Scores would add `HEADS * length * length`
            // elements: 128 MiB at length 4096.
            let most = 2.1 * *shorter as f64 + TILES as f64;
            assert!(*longer as f64 <= most, "{peaks:?}");
        }
    }
}
