//! Time of a training step of a Llama under FSDP, and with tensor or context parallel ranks, at one global batch.
//!
//! `cargo bench --bench parallel -- --world 2 --rows 8`
//!
//! All meshes take turns in each round, so that other load on the machine affects all of them. Times are medians
//! over all rounds, of the slowest rank. Also prints the exchanges of activations and their gradients in a step. Among
//! tensor parallel ranks these are two for each block and pass, one of the embedding, one of each chunk of the loss, and
//! one of the head's input. Under sequence parallel each of the first is a gather and a reduce-scatter, which move as
//! much, and each norm has one more. Among context parallel ranks each block gathers keys and values in both passes, and
//! adds up their gradients. In a ring, n ranks have n - 1 exchanges in forward and 2 n - 1 in backward.

use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::Parser;
use fsdp_runtime::Error;
use fsdp_runtime::nn::{
    AttentionOptions, Embedding, EmbeddingConfig, Linear, LinearConfig, LinearCrossEntropyOptions,
    LmHead, LmHeadConfig, RmsNorm, RmsNormConfig, attention, swiglu,
};
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;

#[path = "common/allocator.rs"]
mod allocator;

const HEAD: usize = 64;

/// Time of a training step of a Llama under FSDP and with tensor or context parallel ranks.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// Number of ranks.
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// Rows of the global batch.
    #[arg(long, default_value_t = 8)]
    rows: usize,
    /// Tokens of a row.
    #[arg(long, default_value_t = 256)]
    length: usize,
    /// Width of the model, a multiple of 128.
    #[arg(long, default_value_t = 512)]
    hidden: usize,
    /// Number of layers.
    #[arg(long, default_value_t = 6)]
    layers: usize,
    /// Number of words.
    #[arg(long, default_value_t = 16_384)]
    words: usize,
    /// Steps of a round. The first two of each round are not counted.
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Number of rounds, each of which runs every mesh once.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Module, Debug)]
#[fsdp_unit]
struct Block {
    attention_norm: RmsNorm,
    #[fsdp(column)]
    query: Linear,
    #[fsdp(column)]
    key: Linear,
    #[fsdp(column)]
    value: Linear,
    #[fsdp(row)]
    output: Linear,
    norm: RmsNorm,
    #[fsdp(column)]
    gate: Linear,
    #[fsdp(column)]
    up: Linear,
    #[fsdp(row)]
    down: Linear,
}

#[fsdp_unit]
impl Block {
    fn new(cli: &Cli, device: &Device) -> Self {
        let hidden = cli.hidden;
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let norm = || RmsNormConfig::new(hidden).init(device);
        Self {
            attention_norm: norm(),
            query: linear(hidden, hidden),
            key: linear(hidden, hidden / 2),
            value: linear(hidden, hidden / 2),
            output: linear(hidden, hidden),
            norm: norm(),
            gate: linear(hidden, 3 * hidden),
            up: linear(hidden, 3 * hidden),
            down: linear(3 * hidden, hidden),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let layers = [&self.query, &self.key, &self.value];
        let normed = self.attention_norm.forward(x.clone());
        let [query, key, value] = Linear::forward_each(layers, normed).map(|x| {
            let [rows, length, _] = x.dims().map(|size| size as i32);
            x.reshape([rows, length, -1, HEAD as i32]).swap_dims(1, 2)
        });
        let mixed = attention(query, key, value, AttentionOptions::new().with_causal(true));
        let [rows, _, length, _] = mixed.dims().map(|size| size as i32);
        let mixed = mixed.swap_dims(1, 2).reshape([rows, length, -1]);
        let (normed, x) = self.norm.forward_residual(self.output.forward(mixed), x);
        let [gate, up] = Linear::forward_each([&self.gate, &self.up], normed);
        x + self.down.forward(swiglu(gate, up))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
struct Llama {
    #[fsdp(vocab)]
    tokens: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    #[fsdp(vocab)]
    head: LmHead,
}

#[fsdp_unit]
impl Llama {
    fn forward_loss(&self, ids: Tensor<2, Int>, targets: Tensor<1, Int>) -> Tensor<1> {
        let x = self.blocks.iter().fold(self.tokens.forward(ids), |x, block| block.forward(x));
        let options = LinearCrossEntropyOptions::new();
        let hidden = self.head.gather_sequence(self.norm.forward(x));
        self.head.cross_entropy(hidden.flatten(0, 1), targets, options)
    }
}

/// Seconds of the counted steps of a round, the loss of the last one, and the exchanges in it.
type Round = (Vec<f64>, f64, usize);

/// How the ranks share the work.
#[derive(Clone, Copy)]
struct Sharing {
    /// Tensor parallel ranks.
    tensor: usize,
    /// Whether they split positions outside of split layers.
    sequence: bool,
    /// Context parallel ranks.
    context: usize,
    /// How these exchange keys and values.
    exchange: ContextExchange,
}

impl Sharing {
    /// Returns the ways in which `world` ranks share one axis, beginning with FSDP alone.
    fn of(world: usize) -> Vec<Self> {
        let exchange = ContextExchange::Gather;
        let plain = Self { tensor: 1, sequence: false, context: 1, exchange };
        let sizes = (2..=world).filter(|size| world.is_multiple_of(*size));
        let split = sizes.flat_map(|size| {
            let tensor = Self { tensor: size, ..plain };
            let context = Self { context: size, ..plain };
            let ring = Self { exchange: ContextExchange::Ring, ..context };
            [tensor, Self { sequence: true, ..tensor }, context, ring]
        });
        std::iter::once(plain).chain(split).collect()
    }
}

/// Runs one round of a mesh.
fn round(cli: &Cli, sharing: Sharing) -> Round {
    let job = cli.clone();
    let options = LaunchOptions::new(cli.world).with_device(Device::flex());
    let ranks = launch(options, move |worker| {
        let device = worker.device();
        let model = Llama {
            tokens: EmbeddingConfig::new(job.words, job.hidden).init(device),
            blocks: (0..job.layers).map(|_| Block::new(&job, device)).collect(),
            norm: RmsNormConfig::new(job.hidden).init(device),
            head: LmHeadConfig::new(job.hidden, job.words).init(device),
        };
        let options = FsdpOptions::new()
            .with_seed(0)
            .with_tensor_parallel(sharing.tensor)
            .with_sequence_parallel(sharing.sequence)
            .with_context_parallel(sharing.context)
            .with_context_exchange(sharing.exchange);
        let mut model = fully_shard(model, &worker, options)?;
        let mut optimizer = AdamWConfig::new().init();
        let mesh = model.stats().mesh();
        let rows = job.rows / mesh.batch_ranks().size();
        let first = mesh.batch_rank().index() * rows * job.length;
        let ids: Vec<i32> =
            (0..rows * job.length).map(|at| ((first + at) * 7919 % job.words) as i32).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [rows, job.length]), device);
        let part = mesh.context_part(job.length).expect("rows of whole blocks");
        let ids = part.of(ids, 1);
        let (mut seconds, mut loss, mut exchanges) = (Vec::new(), 0.0, 0);
        for _ in 0..job.steps.max(3) {
            let exchanged = || {
                let counts = model.stats().counts();
                counts.tensor_exchanges + counts.context_exchanges
            };
            let before = exchanged();
            let begin = Instant::now();
            let value = model.forward_loss(ids.clone(), ids.clone().flatten(0, 1));
            loss = f64::from(value.clone().into_scalar::<f32>());
            let gradients = model.backward(value)?;
            exchanges = exchanged() - before;
            model = optimizer.step(1e-4, model, gradients);
            seconds.push(begin.elapsed().as_secs_f64());
        }
        Ok::<_, Error>((seconds.split_off(2), loss, exchanges))
    });
    let ranks = ranks.unwrap_or_else(|error| panic!("{error}"));
    let slowest = |step: usize| ranks.iter().map(|(seconds, ..)| seconds[step]).fold(0.0, f64::max);
    // Each rank counts its own rows.
    let loss = ranks.iter().map(|(_, loss, _)| loss).sum::<f64>() / ranks.len() as f64;
    ((0..ranks[0].0.len()).map(slowest).collect(), loss, ranks[0].2)
}

fn main() {
    let cli = Cli::parse();
    allocator::choose(false);
    let meshes = Sharing::of(cli.world);
    let mut times = vec![Vec::new(); meshes.len()];
    let mut last = vec![(0.0, 0); meshes.len()];
    for _ in 0..cli.rounds {
        for (at, &sharing) in meshes.iter().enumerate() {
            let (seconds, loss, exchanges) = round(&cli, sharing);
            times[at].extend(seconds);
            last[at] = (loss, exchanges);
        }
    }
    let median = |times: &Vec<f64>| {
        let mut times = times.clone();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let base = median(&times[0]);
    println!("data x context x tensor   step, s   of FSDP's   exchanges   loss");
    for ((sharing, times), (loss, exchanges)) in meshes.iter().zip(&times).zip(last) {
        let Sharing { tensor, sequence, context, exchange } = sharing;
        let (data, step) = (cli.world / tensor / context, median(times));
        let note = match exchange {
            ContextExchange::Ring => ", ring",
            _ if *sequence => ", sequence",
            _ => "",
        };
        let mesh = format!("{data} x {context} x {tensor}{note}");
        let ratio = step / base;
        println!("{mesh:<23}{step:>10.4}{ratio:>12.2}{exchanges:>12}   {loss:.5}");
    }
}
