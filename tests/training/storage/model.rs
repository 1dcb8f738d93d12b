//! The small transformer with frozen matrices beside trained ones, and the runs that are compared.

use burn::module::Module;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::Device;
use fsdp_runtime::Error;
use fsdp_runtime::optim::WholeParam;
use fsdp_runtime::prelude::*;
use fsdp_runtime::state::FullState;

use crate::support::transformer::Numbered;
pub use crate::support::{Block, Embed, Net};
use crate::support::{batch, loss, of_rank_0};

pub const BLOCKS: usize = 3;

/// Returns a model whose embeddings, and one matrix of each block, are frozen.
pub fn mixed(device: &Device) -> Net {
    freeze(Net::new(BLOCKS, 0.1, device).map(&mut Numbered(0)))
}

/// Freezes the embeddings, and one matrix of each block.
pub fn freeze(mut net: Net) -> Net {
    for block in &mut net.blocks {
        block.up.weight = block.up.weight.clone().set_require_grad(false);
    }
    Net { embed: net.embed.clone().freeze(), ..net }
}

/// Returns a model of which only matrices are frozen, and not all of any unit. The forecast assumes
/// that what is stored in f32 is trained, and that the inputs of inner units are tracked.
pub fn partly(device: &Device) -> Net {
    let mut net = mixed(device);
    net.embed.position = net.embed.position.set_require_grad(true);
    net.embed.norm = net.embed.norm.unfreeze();
    net
}

/// One training run.
#[derive(Clone, Debug)]
pub struct Run {
    pub world: usize,
    pub options: FsdpOptions,
    pub steps: usize,
    /// Whether all ranks have the same rows, without dropout.
    pub same_rows: bool,
    /// The norm that gradients are clipped to, if they are.
    pub clip: Option<f64>,
    /// An optimizer that needs whole matrices, in place of AdamW.
    pub whole: Option<fn() -> ModuleOptimizer>,
}

/// What rank 0 has at the end of a run.
#[derive(Debug)]
pub struct Outcome {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub state: FullState,
}

impl Run {
    pub fn new(world: usize, options: FsdpOptions) -> Self {
        let options = options.with_seed(3);
        Self { world, options, steps: 3, same_rows: false, clip: Some(0.5), whole: None }
    }

    pub fn launch(&self) -> Outcome {
        let run = self.clone();
        of_rank_0(self.world, move |worker| {
            let mut net = mixed(worker.device());
            if run.same_rows {
                net = freeze(Net::new(BLOCKS, 0.0, worker.device()).map(&mut Numbered(0)));
            }
            Ok(run.train(net, worker)?.1)
        })
    }

    /// Shards a model and trains it.
    pub fn train(&self, net: Net, worker: &Worker) -> Result<(Fsdp<Net>, Outcome), Error> {
        let mut net = fully_shard(net, worker, self.options.clone())?;
        let mut optimizer = AdamWConfig::new().init();
        let mut whole = self.whole.map(|whole| WholeParam::new(whole()));
        let first = if self.same_rows { 0 } else { worker.rank().index() * 4 };
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..self.steps {
            let (tokens, labels) = batch(step, first..first + 4, worker.device());
            let loss = loss(net.forward(tokens), labels);
            losses.push(f64::from(loss.clone().into_scalar::<f32>()));
            let mut grads = net.backward(loss)?;
            if let Some(clip) = self.clip {
                norms.push(net.clip_grad_norm(&mut grads, clip)?);
            }
            net = match &mut whole {
                Some(whole) => whole.step(1e-2, net, grads)?,
                None => optimizer.step(1e-2, net, grads),
            };
        }
        let state = net.state().full(Recipient::All)?;
        Ok((net, Outcome { losses, norms, state }))
    }
}
