//! Training runs of the small transformer, launched with different options and compared.

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::model::Counts;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use super::compare::{Within, assert_close, assert_same_bits, assert_same_state};
use super::ranks::launch_options;
use super::transformer::{Net, Numbered, batch, loss};

/// A training run of [`Net`], each rank on rows of its own.
#[derive(Clone, Debug)]
pub struct Run {
    /// Number of ranks.
    pub world: usize,
    /// Rows of a rank's batch.
    pub rows_per_rank: usize,
    pub steps: usize,
    /// Number of [`Block`](super::Block)s.
    pub blocks: usize,
    /// Probability.
    pub dropout: f64,
    /// The norm that gradients are clipped to, if they are.
    pub clip: Option<f64>,
    pub learning_rate: f64,
    pub optimizer: fn() -> ModuleOptimizer,
    pub options: FsdpOptions,
    pub device: Device,
    /// Whether the initial weights are the same on every device.
    pub numbered: bool,
    /// Whether the embeddings, and one matrix of each block, are frozen.
    pub frozen: bool,
    /// Threads of each rank's rayon pool, if other than the launch's default.
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
            numbered: false,
            frozen: false,
            threads: None,
        }
    }

    /// Returns this run with the options that `change` makes of its own.
    pub fn with_options(&self, change: impl FnOnce(FsdpOptions) -> FsdpOptions) -> Self {
        Self { options: change(self.options.clone()), ..self.clone() }
    }

    pub fn with_strategy(mut self, strategy: ShardingStrategy) -> Self {
        self.options = self.options.with_strategy(strategy);
        self
    }

    /// Runs all ranks. Returns what rank 0 has at the end.
    #[track_caller]
    pub fn launch(&self) -> Outcome {
        let run = self.clone();
        let mut options = launch_options(self.world).with_device(self.device.clone());
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

    fn rank(&self, worker: &Worker) -> Result<Outcome, Error> {
        let device = worker.device();
        let mut net = Net::new(self.blocks, self.dropout, device);
        if self.numbered {
            net = net.map(&mut Numbered(0));
        }
        if self.frozen {
            for block in &mut net.blocks {
                block.up.weight = block.up.weight.clone().set_require_grad(false);
            }
            net = Net { embed: net.embed.clone().freeze(), ..net };
        }
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

/// What rank 0 has at the end of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The mean loss over ranks of each step.
    pub losses: Vec<f64>,
    /// The norm of the gradients of each step before clipping. Empty without clipping.
    pub norms: Vec<f64>,
    pub counts: Counts,
    pub num_params: usize,
    pub sharded_bytes: usize,
    pub gather_buffer_bytes: usize,
    pub peak_unsharded_bytes: usize,
    pub state: FullState,
}

impl Outcome {
    /// Asserts that every loss, norm and parameter has the same bits.
    #[track_caller]
    pub fn assert_bitwise(&self, other: &Self) {
        assert_same_bits(&self.losses, &other.losses, "losses");
        assert_eq!(self.norms.len(), other.norms.len(), "both are clipped, or neither is");
        if !self.norms.is_empty() {
            assert_same_bits(&self.norms, &other.norms, "norms");
        }
        assert_same_state(&self.state, &other.state, "parameters");
    }

    /// Asserts that losses are equal to a relative tolerance.
    #[track_caller]
    pub fn assert_close(&self, other: &Self, tolerance: f64) {
        assert_close(&other.losses, &self.losses, Within::Relative(tolerance), "losses");
    }
}
