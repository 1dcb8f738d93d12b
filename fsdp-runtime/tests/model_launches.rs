//! Kernel launches of a training step of a GPT, a Llama and a BERT, as many layers deep as the models
//! whose speed is measured.
//!
//! Kernels are compiled for CubeCL's CPU device but not run, so that widths need not be real. On CUDA
//! devices biases, GELU and their gradients are part of a product, which takes fewer launches than here.
//! A binary of its own: an observer sees the launches of the whole process.
#![cfg(feature = "cpu")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use cubecl_runtime::config::{TypeNameFormatLevel, type_name_format};
use cubecl_runtime::dry_run::DryRun;
use cubecl_runtime::logging::{LaunchObservation, LaunchObserver};
use fsdp_runtime::Error;
use fsdp_runtime::nn::{
    AttentionOptions, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearActivation, LinearConfig, LinearCrossEntropyOptions, LmHead, LmHeadConfig, RmsNorm,
    RmsNormConfig, RotaryEncoding, RotaryEncodingConfig, SwiGlu, SwiGluConfig, attention,
};
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

const WIDTH: usize = 64;
const HEADS: usize = 4;
const WORDS: usize = 96;
const LENGTH: usize = 16;

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
    is_causal: bool,
}

#[fsdp_unit]
impl Block {
    /// Returns the sums of the residual, and the last branch, which the next block adds to them.
    fn forward(&self, sums: Tensor<3>, branch: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
        let (normed, sums) = self.norm_1.forward_residual(sums, branch);
        let layers = [&self.query, &self.key, &self.value];
        let [query, key, value] = heads(Linear::forward_each(layers, normed), WIDTH / HEADS);
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
        let positions = Tensor::arange(0..LENGTH as i64, &ids.device()).unsqueeze();
        let [rows, length] = ids.dims();
        let positions = self.positions.forward(positions).repeat_dim(0, rows);
        let mut x = (self.words.forward(ids.clone()), positions);
        for block in &self.blocks {
            x = block.forward(x.0, x.1);
        }
        let (hidden, _) = self.norm.forward_residual(x.0, x.1);
        let hidden = hidden.reshape([rows * length, WIDTH]);
        self.head.cross_entropy(hidden, ids.flatten(0, 1), LinearCrossEntropyOptions::new())
    }
}

impl Gpt {
    fn new(layers: usize, is_causal: bool, device: &Device) -> Self {
        let norm = || LayerNormConfig::new(WIDTH).init(device);
        let block = |_| Block {
            norm_1: norm(),
            query: linear(WIDTH, WIDTH, device),
            key: linear(WIDTH, WIDTH, device),
            value: linear(WIDTH, WIDTH, device),
            output: linear(WIDTH, WIDTH, device),
            norm_2: norm(),
            up: linear(WIDTH, 4 * WIDTH, device),
            down: linear(4 * WIDTH, WIDTH, device),
            is_causal,
        };
        Self {
            words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            positions: EmbeddingConfig::new(LENGTH, WIDTH).init(device),
            blocks: (0..layers).map(block).collect(),
            norm: norm(),
            head: LmHeadConfig::new(WIDTH, WORDS).init(device),
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
        let [query, key, value] = heads(Linear::forward_each(layers, normed), WIDTH / HEADS);
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
        let [rows, length] = ids.dims();
        let words = self.words.forward(ids.clone());
        let mut x = (words.zeros_like(), words);
        for block in &self.blocks {
            x = block.forward(x.0, x.1, &self.rotary);
        }
        let (hidden, _) = self.norm.forward_residual(x.0, x.1);
        let hidden = hidden.reshape([rows * length, WIDTH]);
        self.head.cross_entropy(hidden, ids.flatten(0, 1), LinearCrossEntropyOptions::new())
    }
}

impl Llama {
    fn new(layers: usize, device: &Device) -> Self {
        let norm = || RmsNormConfig::new(WIDTH).init(device);
        let plain = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let block = |_| LlamaBlock {
            norm_1: norm(),
            query: plain(WIDTH, WIDTH),
            key: plain(WIDTH, WIDTH / 2),
            value: plain(WIDTH, WIDTH / 2),
            output: plain(WIDTH, WIDTH),
            norm_2: norm(),
            gate: SwiGluConfig::new(WIDTH, 3 * WIDTH).init(device),
            down: plain(3 * WIDTH, WIDTH),
        };
        Self {
            words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            blocks: (0..layers).map(block).collect(),
            norm: norm(),
            head: LmHeadConfig::new(WIDTH, WORDS).init(device),
            rotary: RotaryEncodingConfig::new(LENGTH, WIDTH / HEADS).init(device),
        }
    }
}

#[derive(Default)]
struct Observer(Mutex<BTreeMap<&'static str, usize>>);

impl LaunchObserver for Observer {
    fn launched(&self, kernel: &'static str) {
        let mut launches = self.0.lock().expect("no thread panics under the lock");
        *launches.entry(kernel).or_default() += 1;
    }
}

/// Returns the launches of the third step of one rank, and prints those of each kernel.
fn launches<M>(
    name: &str,
    new: fn(&Device) -> M,
    loss: fn(&M, Tensor<2, Int>) -> Tensor<1>,
) -> usize
where
    M: fsdp_runtime::model::HookedForward + FsdpModule + 'static,
{
    let program = move |worker: Worker| -> Result<_, Error> {
        let device = worker.device();
        // The check of the optimizer reads results, which kernels that do not run never write.
        let options = FsdpOptions::new().with_seed(0).with_optimizer_check(false);
        let mut optimizer = AdamWConfig::new().init();
        let mut model = fully_shard(new(device), &worker, options)?;
        let mut observer = Arc::default();
        for _ in 0..3 {
            observer = Arc::new(Observer::default());
            let observation = LaunchObservation::new(observer.clone());
            let ids = Tensor::<2, Int>::zeros([1, LENGTH], device);
            let gradients = model.backward(loss(&model, ids))?;
            model = optimizer.step(1e-3, model, gradients);
            device.sync().expect("the device has taken the step");
            drop(observation);
        }
        let launches = observer.0.lock().expect("no thread panics under the lock").clone();
        Ok(launches)
    };
    let launched = LaunchOptions::new(1).with_device(Device::cpu());
    let launches = launch(launched, program).expect("the step runs").swap_remove(0);
    let sum = launches.values().sum();
    println!("{name}: {sum} launches");
    let mut kernels: Vec<_> = launches.into_iter().collect();
    kernels.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    for (kernel, count) in kernels {
        println!("{count:>6} {}", type_name_format(kernel, TypeNameFormatLevel::Balanced));
    }
    sum
}

#[test]
fn a_step_has_as_many_launches_as_the_budget_allows() {
    let _dry_run = DryRun::new();
    let gpt = launches("GPT, 24 layers", |device| Gpt::new(24, true, device), Gpt::forward);
    let llama = launches("Llama, 22 layers", |device| Llama::new(22, device), Llama::forward);
    let bert = launches("BERT, 12 layers", |device| Gpt::new(12, false, device), Gpt::forward);
    assert!(gpt <= 1950, "GPT: {gpt}");
    assert!(llama <= 1365, "Llama: {llama}");
    assert!(bert <= 995, "BERT: {bert}");
}
