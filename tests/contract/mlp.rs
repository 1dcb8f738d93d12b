//! A stack of blocks, and the means to train it on several ranks.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use fsdp_runtime::prelude::*;
use fsdp_runtime::{Error, HookedForward};

pub use crate::support::on;

pub const WIDTH: usize = 16;
pub const HIDDEN: usize = 40;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    pub up: Linear,
    pub down: Linear,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.down.forward(relu(self.up.forward(x)))
    }
}

impl Block {
    pub fn new(device: &Device) -> Self {
        Self {
            up: LinearConfig::new(WIDTH, HIDDEN).init(device),
            down: LinearConfig::new(HIDDEN, WIDTH).init(device),
        }
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Mlp {
    pub blocks: Vec<Block>,
    pub head: Linear,
}

#[fsdp_unit]
impl Mlp {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.head.forward(x)
    }
}

impl Mlp {
    pub fn new(blocks: usize, device: &Device) -> Self {
        Self {
            blocks: (0..blocks).map(|_| Block::new(device)).collect(),
            head: LinearConfig::new(WIDTH, 3).init(device),
        }
    }
}

/// Rows that differ from rank to rank and step to step.
pub fn input(rank: usize, step: usize, rows: usize, device: &Device) -> Tensor<2> {
    let at = |i: usize| ((i * 37 + rank * 1009 + step * 7919) % 101) as f32 / 50.0 - 1.0;
    let data: Vec<f32> = (0..rows * WIDTH).map(at).collect();
    Tensor::from_data(TensorData::new(data, [rows, WIDTH]), device)
}

pub fn loss(output: Tensor<2>) -> Tensor<1> {
    output.powf_scalar(2.0).mean()
}

/// A sharded model of `blocks` blocks, from one seed.
pub fn sharded(blocks: usize, worker: &Worker, options: FsdpOptions) -> Result<Fsdp<Mlp>, Error> {
    fully_shard(Mlp::new(blocks, worker.device()), worker, options.with_seed(11))
}

/// A full gradient from the shards of all ranks: what `NO_SHARD` returns.
pub fn gradient<const D: usize>(
    gradients: &GradientsParams,
    param: &Param<Tensor<D>>,
) -> Option<Vec<f32>> {
    gradients.get::<D>(param.id).map(|gradient| gradient.into_data().iter::<f32>().collect())
}

/// The parameters of `model` before sharding, as every rank has them under one seed.
pub fn unsharded<M: HookedForward>(
    model: M,
    worker: &Worker,
    options: FsdpOptions,
) -> Result<M, Error> {
    let options = options.with_strategy(ShardingStrategy::NoShard).with_seed(11);
    Ok((*fully_shard(model, worker, options)?).clone().materialize())
}
