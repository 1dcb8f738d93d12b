//! A small transformer with every kind of parameter, and the runs that tests compare.
#![allow(dead_code, reason = "each test uses its part")]

pub mod checkpoint;
pub mod parity;
pub mod trace;
pub mod whole_param;

use std::ops::Range;
use std::time::Duration;

use burn::module::{Initializer, Module, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, RmsNorm,
    RmsNormConfig,
};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_runtime::nn::{Dropout, DropoutConfig};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Counts, Error, FullState};

pub const VOCABULARY: usize = 67;
/// A multiple of 32: Burn's `linear` then saves a reshaped view of its weight for backward.
pub const LENGTH: usize = 32;
pub const WIDTH: usize = 24;
pub const CLASSES: usize = 3;

/// Runs `rank` on `world` thread ranks and returns what each returned.
pub fn on<T: Send + 'static>(
    world: usize,
    rank: impl Fn(&Worker) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let options =
        LaunchOptions::new(world).with_device(Device::flex()).with_timeout(Duration::from_secs(60));
    launch(options, move |worker| rank(&worker)).expect("the ranks succeed")
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Embed {
    pub word: Embedding,
    pub position: Param<Tensor<2>>,
    pub norm: LayerNorm,
    pub dropout: Dropout,
}

#[fsdp_unit]
impl Embed {
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let word = self.word.forward(tokens);
        let position = self.position.val().unsqueeze::<3>();
        self.dropout.forward(self.norm.forward(word + position))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    pub norm: RmsNorm,
    pub up: Linear,
    pub down: Linear,
    pub dropout: Dropout,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let hidden = gelu(self.up.forward(self.norm.forward(x.clone())));
        x + self.dropout.forward(self.down.forward(hidden))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Net {
    pub embed: Embed,
    pub blocks: Vec<Block>,
    pub head: Linear,
}

#[fsdp_unit]
impl Net {
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let mut x = self.embed.forward(tokens);
        for block in &self.blocks {
            x = block.forward(x);
        }
        self.head.forward(x.mean_dim(1).squeeze_dim(1))
    }
}

impl Net {
    pub fn new(blocks: usize, dropout: f64, device: &Device) -> Self {
        let dropout = DropoutConfig::new(dropout);
        let block = |_| Block {
            norm: RmsNormConfig::new(WIDTH).init(device),
            up: LinearConfig::new(WIDTH, 3 * WIDTH + 5).init(device),
            down: LinearConfig::new(3 * WIDTH + 5, WIDTH).init(device),
            dropout: dropout.init(),
        };
        let embed = Embed {
            word: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            position: Initializer::Normal { mean: 0.0, std: 0.02 }.init([LENGTH, WIDTH], device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            dropout: dropout.init(),
        };
        let head = LinearConfig::new(WIDTH, CLASSES).init(device);
        Self { embed, blocks: (0..blocks).map(block).collect(), head }
    }
}

/// Rows of tokens and their labels; a row is the same in whatever batch it comes.
pub fn batch(step: usize, rows: Range<usize>, device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
    let token =
        |row: usize, at: usize| ((row * 7919 + step * 104_729 + at * 31) % VOCABULARY) as i32;
    let tokens: Vec<i32> =
        rows.clone().flat_map(|row| (0..LENGTH).map(move |at| token(row, at))).collect();
    let labels: Vec<i32> = rows.clone().map(|row| token(row, 3) % CLASSES as i32).collect();
    let shape = [rows.len(), LENGTH];
    (
        Tensor::from_data(TensorData::new(tokens, shape), device),
        Tensor::from_data(TensorData::new(labels, [rows.len()]), device),
    )
}

pub fn loss(logits: Tensor<2>, labels: Tensor<1, Int>) -> Tensor<1> {
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
}

/// One training run.
#[derive(Clone, Debug)]
pub struct Run {
    pub world: usize,
    pub rows_per_rank: usize,
    pub steps: usize,
    pub blocks: usize,
    pub dropout: f64,
    pub clip: Option<f64>,
    pub learning_rate: f64,
    pub optimizer: fn() -> ModuleOptimizer,
    pub options: FsdpOptions,
    pub device: Device,
    pub threads: Option<usize>,
}

impl Run {
    pub fn new(world: usize) -> Self {
        Self {
            world,
            rows_per_rank: 4,
            steps: 5,
            blocks: 4,
            dropout: 0.0,
            clip: None,
            learning_rate: 1e-2,
            optimizer: || AdamWConfig::new().init(),
            options: FsdpOptions::new().with_seed(7),
            device: Device::flex(),
            threads: None,
        }
    }

    pub fn with_strategy(mut self, strategy: ShardingStrategy) -> Self {
        self.options = self.options.with_strategy(strategy);
        self
    }

    pub fn launch(&self) -> Outcome {
        let run = self.clone();
        let mut options = LaunchOptions::new(self.world)
            .with_device(self.device.clone())
            .with_timeout(Duration::from_secs(60));
        if let Some(threads) = self.threads {
            options = options.with_threads_per_rank(threads);
        }
        let mut ranks = launch(options, move |worker| run.rank(&worker)).expect("the run succeeds");
        let outcome = ranks.swap_remove(0);
        for other in &ranks {
            assert_eq!(other.losses, outcome.losses, "every rank has the mean over ranks");
        }
        outcome
    }

    fn rank(&self, worker: &Worker) -> Result<Outcome, fsdp_runtime::Error> {
        let device = worker.device();
        let net = Net::new(self.blocks, self.dropout, device);
        let mut net = fully_shard(net, worker, self.options.clone())?;
        let mut optimizer = (self.optimizer)();
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        let first = worker.rank().index() * self.rows_per_rank;
        for step in 0..self.steps {
            let (tokens, labels) = batch(step, first..first + self.rows_per_rank, device);
            let loss = loss(net.forward(tokens), labels);
            let mut value = [f64::from(loss.clone().into_scalar::<f32>())];
            let mut grads: GradientsParams = net.backward(loss)?;
            if let Some(max_norm) = self.clip {
                norms.push(net.clip_grad_norm(&mut grads, max_norm)?);
            }
            net = optimizer.step(self.learning_rate, net, grads);
            worker.all_reduce_sum(&mut value)?;
            losses.push(value[0] / self.world as f64);
        }
        Ok(Outcome {
            losses,
            norms,
            counts: net.stats().counts(),
            num_params: net.num_params(),
            sharded_bytes: net.stats().sharded_bytes(),
            gather_buffer_bytes: net.stats().gather_buffer_bytes(),
            peak_unsharded_bytes: net.stats().peak_unsharded_bytes(),
            state: net.state().full(Recipient::All)?,
        })
    }
}

/// What a run ended with, on rank 0.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub counts: Counts,
    pub num_params: usize,
    pub sharded_bytes: usize,
    pub gather_buffer_bytes: usize,
    pub peak_unsharded_bytes: usize,
    pub state: FullState,
}

impl Outcome {
    /// The bits of every loss, norm and parameter.
    pub fn assert_bitwise(&self, other: &Self) {
        let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&self.losses), bits(&other.losses), "{:?} {:?}", self.losses, other.losses);
        assert_eq!(bits(&self.norms), bits(&other.norms), "{:?} {:?}", self.norms, other.norms);
        assert_eq!(self.state.len(), other.state.len());
        for (path, data) in &self.state {
            assert!(data.as_bytes() == other.state[path].as_bytes(), "`{path}` differs");
        }
    }

    /// Losses equal to a relative tolerance.
    pub fn assert_close(&self, other: &Self, tolerance: f64) {
        assert_eq!(self.losses.len(), other.losses.len());
        for (a, b) in self.losses.iter().zip(&other.losses) {
            assert!((a - b).abs() <= tolerance * a.abs(), "{:?} {:?}", self.losses, other.losses);
        }
    }
}
