//! Time of one AdamW step on Flex: the fused one, Burn's own, and a lower bound, which reads and
//! writes the same bytes and adds once. `torch_adamw.py` prints the same table for PyTorch.
//!
//! `cargo bench --bench optim`

use std::time::Instant;

use burn::optim::Optimizer;
use burn::tensor::{Device, Tensor};
use rayon::prelude::*;

/// Number of tensors and elements of each: a BERT of MiniLM's size, and one large matrix.
const CASES: [(usize, usize); 2] = [(150, 384 * 384), (1, 100_000_000)];
const RUNS: usize = 11;
const WARM_UP: usize = 2;

/// Returns the median time of a step, per element, in nanoseconds.
fn measure(elements: usize, mut step: impl FnMut()) -> f64 {
    let mut nanoseconds: Vec<f64> = (0..WARM_UP + RUNS)
        .map(|_| {
            let begin = Instant::now();
            step();
            begin.elapsed().as_secs_f64() * 1e9 / elements as f64
        })
        .skip(WARM_UP)
        .collect();
    nanoseconds.sort_by(f64::total_cmp);
    nanoseconds[RUNS / 2]
}

fn noise(elements: usize) -> Tensor<1> {
    let value = |at: usize| ((at % 1021) as f32 - 510.0) / 1021.0;
    let data: Vec<f32> = (0..elements).into_par_iter().map(value).collect();
    Tensor::from_data(burn::tensor::TensorData::new(data, [elements]), &Device::flex())
}

/// Returns the time of a step with an optimizer. Gradients outlive it, because freeing them is no
/// part of the step.
fn adamw<O: Optimizer>(optimizer: &O, tensors: usize, elements: usize) -> f64 {
    let mut params: Vec<_> = (0..tensors)
        .map(|_| (Some(noise(elements)), noise(elements) * 0.01, None::<O::State<1>>))
        .collect();
    measure(tensors * elements, || {
        for (param, grad, state) in &mut params {
            let current = param.take().expect("the parameter");
            let (next, left) = optimizer.step(1e-3, current, grad.clone(), state.take());
            (*param, *state) = (Some(next), left);
        }
    })
}

/// Returns the time of a loop that reads four arrays and writes three, as AdamW does.
fn floor(elements: usize) -> f64 {
    const TASK: usize = 1 << 14;
    let [mut a, mut b, mut c] = std::array::from_fn(|_| vec![0f32; elements]);
    let grad = vec![1f32; elements];
    let nanoseconds = measure(elements, || {
        let tasks = a.par_chunks_mut(TASK).zip(grad.par_chunks(TASK));
        let tasks = tasks.zip(b.par_chunks_mut(TASK)).zip(c.par_chunks_mut(TASK));
        tasks.for_each(|(((a, grad), b), c)| {
            for (((a, grad), b), c) in a.iter_mut().zip(grad).zip(b).zip(c) {
                *a += grad;
                *b += grad;
                *c += grad;
            }
        });
    });
    std::hint::black_box((&a, &b, &c));
    nanoseconds
}

fn main() {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if all == 1 { vec![1] } else { vec![1, all] };

    println!("tensors      elements  threads  step   ns/element  x floor");
    for (tensors, elements) in CASES {
        for &threads in &threads {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            pool.expect("a thread pool").install(|| {
                let floor = floor(tensors * elements);
                let ours = fsdp_runtime::optim::AdamWConfig::new().build();
                let burns = burn::optim::AdamWConfig::new().build();
                let rows = [
                    ("floor", floor),
                    ("fused", adamw(&ours, tensors, elements)),
                    ("burn", adamw(&burns, tensors, elements)),
                ];
                for (step, time) in rows {
                    let ratio = time / floor;
                    println!(
                        "{tensors:>7}  {elements:>12}  {threads:>7}  {step:<5}  {time:>10.3}  {ratio:>7.2}"
                    );
                }
            });
        }
    }
}
