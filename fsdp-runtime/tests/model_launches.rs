//! Launches of a training step of a GPT, a Llama and a BERT in bf16, as on a CUDA device, the bytes that they move,
//! and what is tuned for them.
//!
//! Kernels are compiled for CubeCL's CPU device but not run. Products of matrices are counted as calls of cuBLASLt,
//! and attention takes its CUDA kernels without matrix instructions. Widths and lengths are an eighth of those of
//! the models whose speed is measured, the layers as many: parameters and activations have a 64th of the elements,
//! and so move a 64th of the bytes. A binary of its own: an observer sees the launches of the whole process.
#![cfg(feature = "cpu")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use cubecl_runtime::config::{TypeNameFormatLevel, type_name_format};
use cubecl_runtime::dry_run::{DryRun, LaunchMode, launch_mode};
use cubecl_runtime::logging::{LaunchObservation, LaunchObserver};
use fsdp_runtime::Error;
use fsdp_runtime::nn::{
    AttentionOptions, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearActivation, LinearConfig, LinearCrossEntropyOptions, LmHead, LmHeadConfig, RmsNorm,
    RmsNormConfig, RotaryEncoding, RotaryEncodingConfig, SwiGlu, SwiGluConfig, attention,
};
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

/// Widths and lengths of the measured models, of those here.
const SCALE: usize = 8;

/// Sizes of a model and of its batch.
#[derive(Clone, Copy)]
struct Sizes {
    layers: usize,
    width: usize,
    heads: usize,
    key_heads: usize,
    inner: usize,
    words: usize,
    rows: usize,
    length: usize,
}

/// The GPT of 1.3B, with 2 rows of 2,048. Heads are half as many, as their width must be a multiple of 16.
const GPT: Sizes = Sizes {
    layers: 24,
    width: 2048 / SCALE,
    heads: 16,
    key_heads: 16,
    inner: 8192 / SCALE,
    words: 50_257 / SCALE,
    rows: 2,
    length: 2048 / SCALE,
};

/// The Llama of 1.1B, with 2 rows of 2,048.
const LLAMA: Sizes =
    Sizes { layers: 22, key_heads: 2, inner: 5632 / SCALE, words: 32_000 / SCALE, ..GPT };

/// BERT-base, with 32 rows of 128.
const BERT: Sizes = Sizes {
    layers: 12,
    width: 768 / SCALE,
    heads: 6,
    key_heads: 6,
    inner: 3072 / SCALE,
    words: 30_522 / SCALE,
    rows: 32,
    length: 128 / SCALE,
};

fn linear(from: usize, to: usize, device: &Device) -> Linear {
    LinearConfig::new(from, to).init(device)
}

fn heads<const N: usize>(parts: [Tensor<3>; N], width: usize) -> [Tensor<4>; N] {
    parts.map(|part| {
        let [rows, length, all] = part.dims();
        part.reshape([rows, length, all / width, width]).swap_dims(1, 2)
    })
}

fn merged(context: Tensor<4>) -> Tensor<3> {
    let [rows, heads, length, width] = context.dims();
    context.swap_dims(1, 2).reshape([rows, length, heads * width])
}

/// A block of a GPT, or of a BERT if it is not causal.
#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    norm_1: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm_2: LayerNorm,
    up: Linear,
    down: Linear,
    head_width: usize,
    is_causal: bool,
}

#[fsdp_unit]
impl Block {
    /// Returns the sums of the residual, and the last branch, which the next block adds to them.
    fn forward(&self, sums: Tensor<3>, branch: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
        let (normed, sums) = self.norm_1.forward_residual(sums, branch);
        let layers = [&self.query, &self.key, &self.value];
        let [query, key, value] = heads(Linear::forward_each(layers, normed), self.head_width);
        let options = AttentionOptions::new().with_causal(self.is_causal);
        let context = self.output.forward(merged(attention(query, key, value, options)));
        let (normed, sums) = self.norm_2.forward_residual(sums, context);
        let wide = self.up.forward_activated(normed, LinearActivation::GeluTanh);
        (sums, self.down.forward(wide))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Gpt {
    words: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: LmHead,
}

#[fsdp_unit]
impl Gpt {
    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<1> {
        let [rows, length] = ids.dims();
        let positions = Tensor::arange(0..length as i64, &ids.device()).unsqueeze::<2>();
        let positions = self.positions.forward(positions.expand([rows, length]));
        let mut x = (self.words.forward(ids.clone()), positions);
        for block in &self.blocks {
            x = block.forward(x.0, x.1);
        }
        let (hidden, _) = self.norm.forward_residual(x.0, x.1);
        let hidden = hidden.flatten(0, 1);
        self.head.cross_entropy(hidden, ids.flatten(0, 1), LinearCrossEntropyOptions::new())
    }
}

impl Gpt {
    fn new(sizes: Sizes, is_causal: bool, device: &Device) -> Self {
        let Sizes { layers, width, heads, inner, words, length, .. } = sizes;
        let norm = || LayerNormConfig::new(width).init(device);
        let block = |_| Block {
            norm_1: norm(),
            query: linear(width, width, device),
            key: linear(width, width, device),
            value: linear(width, width, device),
            output: linear(width, width, device),
            norm_2: norm(),
            up: linear(width, inner, device),
            down: linear(inner, width, device),
            head_width: width / heads,
            is_causal,
        };
        Self {
            words: EmbeddingConfig::new(words, width).init(device),
            positions: EmbeddingConfig::new(length, width).init(device),
            blocks: (0..layers).map(block).collect(),
            norm: norm(),
            head: LmHeadConfig::new(width, words).init(device),
        }
    }
}

/// A block of a Llama, with two query heads for each key head.
#[derive(Module, Debug)]
#[fsdp_unit]
struct LlamaBlock {
    norm_1: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm_2: RmsNorm,
    gate: SwiGlu,
    down: Linear,
    head_width: usize,
}

#[fsdp_unit]
impl LlamaBlock {
    /// Returns the sums of the residual, and the last branch, which the next block adds to them.
    fn forward(
        &self,
        sums: Tensor<3>,
        branch: Tensor<3>,
        rotary: &RotaryEncoding,
    ) -> (Tensor<3>, Tensor<3>) {
        let (normed, sums) = self.norm_1.forward_residual(sums, branch);
        let layers = [&self.query, &self.key, &self.value];
        let [query, key, value] = heads(Linear::forward_each(layers, normed), self.head_width);
        let (query, key) = rotary.forward_query_key(query, key, None);
        let options = AttentionOptions::new().with_causal(true);
        let context = self.output.forward(merged(attention(query, key, value, options)));
        let (normed, sums) = self.norm_2.forward_residual(sums, context);
        (sums, self.down.forward(self.gate.forward(normed)))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Llama {
    words: Embedding,
    blocks: Vec<LlamaBlock>,
    norm: RmsNorm,
    head: LmHead,
    rotary: RotaryEncoding,
}

#[fsdp_unit]
impl Llama {
    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<1> {
        let words = self.words.forward(ids.clone());
        let mut x = (words.zeros_like(), words);
        for block in &self.blocks {
            x = block.forward(x.0, x.1, &self.rotary);
        }
        let (hidden, _) = self.norm.forward_residual(x.0, x.1);
        let hidden = hidden.flatten(0, 1);
        self.head.cross_entropy(hidden, ids.flatten(0, 1), LinearCrossEntropyOptions::new())
    }
}

impl Llama {
    fn new(sizes: Sizes, device: &Device) -> Self {
        let Sizes { layers, width, heads, key_heads, inner, words, length, .. } = sizes;
        let norm = || RmsNormConfig::new(width).init(device);
        let plain = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let head_width = width / heads;
        let block = |_| LlamaBlock {
            norm_1: norm(),
            query: plain(width, width),
            key: plain(width, key_heads * head_width),
            value: plain(width, key_heads * head_width),
            output: plain(width, width),
            norm_2: norm(),
            gate: SwiGluConfig::new(width, inner).init(device),
            down: plain(inner, width),
            head_width,
        };
        Self {
            words: EmbeddingConfig::new(words, width).init(device),
            blocks: (0..layers).map(block).collect(),
            norm: norm(),
            head: LmHeadConfig::new(width, words).init(device),
            rotary: RotaryEncodingConfig::new(length, head_width).init(device),
        }
    }
}

thread_local! {
    /// Bytes of the arguments of the kernel that the thread launches next.
    static BOUND: Cell<u64> = const { Cell::new(0) };
}

/// Calls of cuBLASLt so far.
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// Launches of a kernel, and the bytes of their arguments.
#[derive(Clone, Copy, Default)]
struct Launches {
    count: usize,
    bytes: u64,
}

#[derive(Default)]
struct Observer {
    launches: Mutex<BTreeMap<&'static str, Launches>>,
    /// Kernels that ran although the run is dry, to be timed.
    timed: Mutex<BTreeMap<&'static str, usize>>,
}

impl LaunchObserver for Observer {
    fn launched(&self, kernel: &'static str) {
        let bytes = BOUND.replace(0);
        if launch_mode() == LaunchMode::Execute {
            let mut timed = self.timed.lock().expect("no thread panics under the lock");
            *timed.entry(kernel).or_default() += 1;
            return;
        }
        let mut launches = self.launches.lock().expect("no thread panics under the lock");
        let of_kernel = launches.entry(kernel).or_default();
        of_kernel.count += 1;
        of_kernel.bytes += bytes;
    }
}

/// What a step issues.
struct Step {
    /// Launches by kernel.
    launches: BTreeMap<String, Launches>,
    /// Calls of cuBLASLt.
    calls: usize,
    /// Kernels that were run to be timed, in this step and the ones before it.
    timed: BTreeMap<String, usize>,
}

/// Kernels of the optimizer and of flat buffers.
const OF_PARAMETERS: [&str; 3] = ["AdamKernel", "PackKernel", "MeanKernel"];
/// Kernels of attention, whose time is not that of their bytes.
const OF_ATTENTION: &str = "Flash";
/// The fill of released gather buffers with NaN, which release builds do not have.
const OF_DEBUG_BUILDS: &str = "FillKernel";
/// Burn's additions of two activations, of which no bytes are reported.
const ADDITIONS: [&str; 2] = ["ElemwiseFuse", "KernelBinop | AddOp"];

impl Step {
    /// Returns the number of launches and calls of a release build.
    fn count(&self) -> usize {
        let launches = self.launches.iter().filter(|(kernel, _)| !kernel.contains(OF_DEBUG_BUILDS));
        launches.map(|(_, launches)| launches.count).sum::<usize>() + self.calls
    }

    /// Returns the bytes in GB that the kernels of parameters move, and those that the other passes over memory
    /// move, in a model of full size.
    fn moved(&self, sizes: Sizes) -> [f64; 2] {
        let mut moved = [0.0; 2];
        for (kernel, launches) in &self.launches {
            if kernel.contains(OF_ATTENTION) || kernel.contains(OF_DEBUG_BUILDS) {
                continue;
            }
            let activation = (2 * sizes.rows * sizes.length * sizes.width) as f64;
            let bytes = launches.bytes as f64;
            let bytes = match kernel.as_str() {
                // Parameter and moments are read and written, and the gradient is read.
                "AdamKernel" => bytes * 7.0 / 4.0,
                // Gradients take the place of logits.
                "RowLossesKernel" => bytes * 2.0,
                other if ADDITIONS.contains(&other) => 3.0 * activation * launches.count as f64,
                _ => bytes,
            };
            let is_of_parameters = OF_PARAMETERS.contains(&kernel.as_str());
            moved[usize::from(!is_of_parameters)] += bytes * (SCALE * SCALE) as f64 / 1e9;
        }
        moved
    }
}

/// Returns what the third step of one rank issues.
fn step<M>(
    sizes: Sizes,
    new: impl Fn(&Device) -> M + Send + Sync + 'static,
    loss: fn(&M, Tensor<2, Int>) -> Tensor<1>,
) -> Step
where
    M: fsdp_runtime::model::HookedForward + FsdpModule + 'static,
{
    let program = move |worker: Worker| -> Result<_, Error> {
        let device = worker.device();
        let precision = MixedPrecisionPolicy::new()
            .with_param_dtype(FloatDType::BF16)
            .with_reduce_dtype(FloatDType::F32);
        // The check of the optimizer reads results, which kernels that do not run never write.
        let options = FsdpOptions::new()
            .with_seed(0)
            .with_optimizer_check(false)
            .with_mixed_precision(precision);
        let mut optimizer = AdamWConfig::new().init();
        let mut model = fully_shard(new(device), &worker, options)?;
        let observer = Arc::new(Observer::default());
        let mut calls = 0;
        for _ in 0..3 {
            observer.launches.lock().expect("no thread panics under the lock").clear();
            calls = CALLS.load(Ordering::Relaxed);
            let observation = LaunchObservation::new(observer.clone());
            let ids = Tensor::<2, Int>::zeros([sizes.rows, sizes.length], device);
            let gradients = model.backward(loss(&model, ids))?;
            model = optimizer.step(1e-3, model, gradients);
            device.sync().expect("the device has taken the step");
            drop(observation);
        }
        Ok((observer, CALLS.load(Ordering::Relaxed) - calls))
    };
    let launched = LaunchOptions::new(1).with_device(Device::cpu());
    let (observer, calls) = launch(launched, program).expect("the step runs").swap_remove(0);
    let named = |kernel: &str| type_name_format(kernel, TypeNameFormatLevel::Balanced);
    let launches = observer.launches.lock().expect("no thread panics under the lock");
    let timed = observer.timed.lock().expect("no thread panics under the lock");
    Step {
        launches: launches.iter().map(|(kernel, launches)| (named(kernel), *launches)).collect(),
        calls,
        timed: timed.iter().map(|(kernel, count)| (named(kernel), *count)).collect(),
    }
}

/// Prints what a step issues, and asserts that it is within its bounds: launches, and GB that
/// [`Step::moved`] returns.
fn check(name: &str, sizes: Sizes, step: &Step, most_launches: usize, most_moved: [f64; 2]) {
    let (count, calls) = (step.count(), step.calls);
    let [of_parameters, of_passes] = step.moved(sizes);
    println!(
        "{name}: {count} launches, {calls} of them calls of cuBLASLt; {of_parameters:.1} GB of parameters, \
         {of_passes:.1} GB of other passes"
    );
    let mut kernels: Vec<_> = step.launches.iter().collect();
    kernels.sort_by_key(|(_, launches)| std::cmp::Reverse(launches.bytes));
    for (kernel, Launches { count, bytes }) in kernels {
        println!("{count:>6} {:>8.3} GB {kernel}", (bytes * (SCALE * SCALE) as u64) as f64 / 1e9);
    }
    assert!(count <= most_launches, "{name}: {count} launches");
    let moved = [of_parameters, of_passes];
    assert!(moved[0] <= most_moved[0] && moved[1] <= most_moved[1], "{name}: {moved:?} GB");
    // The check of the kernels of attention runs them, and copies their results to contiguous memory.
    let is_known = |kernel: &&String| kernel.contains(OF_ATTENTION) || *kernel == "CopyKernel";
    let timed: Vec<_> = step.timed.keys().filter(|kernel| !is_known(kernel)).collect();
    assert!(timed.is_empty(), "{name} tunes {timed:?}");
    assert!(step.launches.keys().any(|kernel| kernel.contains(OF_ATTENTION)), "{name}");
}

/// Memory traffic of an H200 in a millisecond, in GB.
const GB_A_MS: f64 = 4.8;

#[test]
fn a_step_has_as_many_launches_as_the_budget_allows() {
    const IS_CHILD: &str = "FSDP_TEST_MODEL_LAUNCHES";
    if std::env::var_os(IS_CHILD).is_none() {
        let program = std::env::current_exe().expect("this program");
        let status = Command::new(program)
            .args(["--exact", "a_step_has_as_many_launches_as_the_budget_allows", "--nocapture"])
            .env(IS_CHILD, "1")
            .env("FSDP_ATTENTION_KERNEL", "scalar")
            .status();
        assert!(status.expect("a process").success());
        return;
    }
    fsdp_kernels::cube::count_products(|calls| {
        CALLS.fetch_add(calls, Ordering::Relaxed);
    });
    fsdp_kernels::accesses::observe_bytes(|bytes| BOUND.set(BOUND.get() + bytes));
    let _dry_run = DryRun::new();
    let gpt = step(GPT, |device| Gpt::new(GPT, true, device), Gpt::forward);
    let llama = step(LLAMA, |device| Llama::new(LLAMA, device), Llama::forward);
    let bert = step(BERT, |device| Gpt::new(BERT, false, device), Gpt::forward);
    check("GPT 1.3B", GPT, &gpt, 1_015, [58.0, 16.7]);
    check("Llama 1.1B", LLAMA, &llama, 1_085, [45.0, 20.2]);
    check("BERT-base", BERT, &bert, 525, [5.5, 3.6]);
    // The budget of the GPT's step on an H200: 15 ms for the kernels of parameters, and 17 for the other passes.
    let moved = gpt.moved(GPT);
    assert!(moved[0] <= 15.0 * GB_A_MS && moved[1] <= 17.0 * GB_A_MS, "{moved:?} GB");
}
