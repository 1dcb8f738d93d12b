//! Matrices that are split over tensor parallel ranks have the results of whole ones.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_runtime::Error;
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::nn::{
    AttentionOptions, Linear, LinearActivation, LinearConfig, RmsNorm, RmsNormConfig, attention,
    swiglu,
};
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

use crate::support::on_ranks;

const WORDS: usize = 40;
const HIDDEN: usize = 32;
const HEADS: usize = 8;
const KEY_HEADS: usize = 4;
const HEAD_WIDTH: usize = 8;
const WIDE: usize = 48;
const ROWS: usize = 8;
const LENGTH: usize = 6;

/// Attention with grouped queries. Each rank has a part of the heads.
#[derive(Module, FsdpModule, Debug)]
struct Attention {
    #[fsdp(column)]
    query: Linear,
    #[fsdp(column)]
    key: Linear,
    #[fsdp(column)]
    value: Linear,
    #[fsdp(row)]
    output: Linear,
}

impl Attention {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            query: linear(HIDDEN, HEADS * HEAD_WIDTH),
            key: linear(HIDDEN, KEY_HEADS * HEAD_WIDTH),
            value: linear(HIDDEN, KEY_HEADS * HEAD_WIDTH),
            output: linear(HEADS * HEAD_WIDTH, HIDDEN),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [rows, length, _] = x.dims();
        let heads = |x: Tensor<3>| {
            let heads = x.dims()[2] / HEAD_WIDTH;
            x.reshape([rows, length, heads, HEAD_WIDTH]).swap_dims(1, 2)
        };
        let [query, key, value] = Linear::forward_each([&self.query, &self.key, &self.value], x);
        let options = AttentionOptions::new().with_causal(true);
        let mixed = attention(heads(query), heads(key), heads(value), options).swap_dims(1, 2);
        let width = mixed.dims()[2] * HEAD_WIDTH;
        self.output.forward(mixed.reshape([rows, length, width]))
    }
}

/// A gated feed-forward block, and one with an activation in the sum.
#[derive(Module, FsdpModule, Debug)]
struct FeedForward {
    #[fsdp(column)]
    gate: Linear,
    #[fsdp(column)]
    up: Linear,
    #[fsdp(row)]
    down: Linear,
    #[fsdp(column, gather)]
    last: Linear,
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    norm: RmsNorm,
    feed_forward: FeedForward,
}

#[fsdp_unit]
impl Block {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let norm = || RmsNormConfig::new(HIDDEN).init(device);
        Self {
            attention_norm: norm(),
            attention: Attention::new(device),
            norm: norm(),
            feed_forward: FeedForward {
                gate: linear(HIDDEN, WIDE),
                up: linear(HIDDEN, WIDE),
                down: linear(WIDE, HIDDEN),
                last: LinearConfig::new(HIDDEN, HIDDEN).with_bias(false).init(device),
            },
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(self.attention_norm.forward(x));
        let FeedForward { gate, up, down, last } = &self.feed_forward;
        let [gated, value] = Linear::forward_each([gate, up], self.norm.forward(x.clone()));
        let hidden = down.forward_activated(swiglu(gated, value), LinearActivation::Gelu);
        x + last.forward(hidden)
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Net {
    words: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
}

#[fsdp_unit]
impl Net {
    fn new(device: &Device) -> Self {
        Self {
            words: EmbeddingConfig::new(WORDS, HIDDEN).init(device),
            blocks: (0..2).map(|_| Block::new(device)).collect(),
            norm: RmsNormConfig::new(HIDDEN).init(device),
            head: LinearConfig::new(HIDDEN, WORDS).init(device),
        }
    }

    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        let x = self.words.forward(ids);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.head.forward(self.norm.forward(x)).flatten(0, 1)
    }
}

/// How a model is trained.
#[derive(Clone, Debug)]
struct Setup {
    data: usize,
    tensor: usize,
    options: FsdpOptions,
    lora: Option<LoraConfig>,
    steps: usize,
}

impl Setup {
    fn new(data: usize, tensor: usize) -> Self {
        let options = FsdpOptions::new().with_seed(3);
        Self { data, tensor, options, lora: None, steps: 20 }
    }
}

/// What a run gives: losses of the whole batch, gradient norms, and the parameters of each rank.
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    full: Vec<(String, Vec<f32>)>,
}

fn ids(step: usize, rows: std::ops::Range<usize>, device: &Device) -> Tensor<2, Int> {
    let id =
        |row: usize, at: usize| ((step * 31 + row * 7 + at * at * 5 + row * at) % WORDS) as i32;
    let all: Vec<i32> =
        rows.clone().flat_map(|row| (0..LENGTH + 1).map(move |at| id(row, at))).collect();
    Tensor::from_data(TensorData::new(all, [rows.len(), LENGTH + 1]), device)
}

fn train(setup: &Setup) -> Trained {
    let Setup { data, tensor, options, lora, steps } = setup.clone();
    let ranks = on_ranks(data * tensor, move |worker| {
        let device = worker.device().clone();
        let net = Net::new(&device);
        let net = match &lora {
            Some(lora) => lora.apply(net)?,
            None => net,
        };
        let mut net = fully_shard(net, &worker, options.clone().with_tensor_parallel(tensor))?;
        let mut optimizer = AdamWConfig::new().init();
        let each = ROWS / data;
        let own = net.stats().mesh().rank.index() * each;
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..steps {
            let ids = ids(step % 2, own..own + each, &device);
            let logits = net.forward(ids.clone().narrow(1, 0, LENGTH));
            let targets = ids.narrow(1, 1, LENGTH).flatten::<1>(0, 1).unsqueeze_dim(1);
            let loss =
                burn::tensor::activation::log_softmax(logits, 1).gather(1, targets).neg().mean();
            losses.push(f64::from(loss.clone().into_scalar::<f32>()));
            let mut gradients = net.backward(loss)?;
            norms.push(net.clip_grad_norm(&mut gradients, 0.5)?);
            net = optimizer.step(3e-3, net, gradients);
        }
        let full = net.state().full(Recipient::All)?;
        let full = full.iter().map(|(path, data)| (path.to_string(), data.iter::<f32>().collect()));
        let full: Vec<(String, Vec<f32>)> = full.collect();
        Ok::<_, Error>((net.stats().mesh().tensor_rank().index(), losses, norms, full))
    });
    for (_, _, norms, full) in &ranks {
        assert_eq!(norms, &ranks[0].2, "every rank has the norm");
        assert!(full == &ranks[0].3, "every rank has the weights, to the bit");
    }
    let mean = |step: usize| {
        let of_data = ranks.iter().filter(|(tensor, ..)| *tensor == 0);
        of_data.map(|(_, losses, ..)| losses[step]).sum::<f64>() / data as f64
    };
    Trained {
        losses: (0..steps).map(mean).collect(),
        norms: ranks[0].2.clone(),
        full: ranks[0].3.clone(),
    }
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs() / expected.abs().max(1.0);
        assert!(error < 1e-5, "{what}, step {step}: {found}, not {expected}");
    }
}

fn compare(alone: &Trained, setup: &Setup) {
    let what = format!("{} x {} {:?}", setup.data, setup.tensor, setup.lora.is_some());
    let split = train(setup);
    assert_close(&split.losses, &alone.losses, &what);
    assert_close(&split.norms, &alone.norms, &what);
    assert_eq!(split.full.len(), alone.full.len());
    for ((path, found), (_, expected)) in split.full.iter().zip(&alone.full) {
        assert_eq!(found.len(), expected.len(), "{path}");
        let differ = |(a, b): (&f32, &f32)| (a - b).abs() > 1e-3;
        assert!(!found.iter().zip(expected).any(differ), "{what}: {path}");
    }
}

#[test]
fn losses_are_those_of_whole_matrices() {
    let alone = train(&Setup::new(1, 1));
    assert!(alone.losses[19] < alone.losses[0] - 0.1, "{:?}", alone.losses);
    for (data, tensor) in [(1, 2), (2, 2), (1, 4), (4, 2), (2, 1)] {
        compare(&alone, &Setup::new(data, tensor));
    }
}

#[test]
fn strategies_and_recomputation_change_nothing() {
    let alone = train(&Setup::new(1, 1));
    let setup = |options: FsdpOptions| Setup { options, ..Setup::new(2, 2) };
    let base = || FsdpOptions::new().with_seed(3);
    let layers = ActivationCheckpointing::Units(unit_types![Block]);
    for options in [
        base().with_strategy(ShardingStrategy::NoShard),
        base().with_strategy(ShardingStrategy::ShardGradOp),
        base().with_strategy(ShardingStrategy::HybridShard).with_shard_size(1),
        base().with_activation_checkpointing(layers),
    ] {
        compare(&alone, &setup(options));
    }
}

#[test]
fn adapters_have_the_results_of_whole_ones() {
    let lora = || Some(LoraConfig::new(4).with_alpha(8.0));
    let alone = train(&Setup { lora: lora(), ..Setup::new(1, 1) });
    for (data, tensor) in [(1, 2), (2, 2), (1, 4)] {
        compare(&alone, &Setup { lora: lora(), ..Setup::new(data, tensor) });
    }
}

#[test]
fn two_runs_have_the_same_bits() {
    let [first, second] = [0; 2].map(|_| train(&Setup { steps: 4, ..Setup::new(2, 2) }));
    assert_eq!(first.losses, second.losses);
    assert!(first.full == second.full);
}
