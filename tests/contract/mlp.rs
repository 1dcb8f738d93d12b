//! The toy model at the sizes of these tests, and the means to train it on several ranks.

use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};
use fsdp_runtime::Error;
use fsdp_runtime::model::HookedForward;
use fsdp_runtime::prelude::*;

use crate::support::mlp::Sizes;
pub use crate::support::mlp::{Block, Mlp, loss};
pub use crate::support::{of_rank_0, on_ranks};

pub const WIDTH: usize = 16;
pub const HIDDEN: usize = 40;
/// Elements of a row of the output.
pub const OUTPUTS: usize = 3;

fn sizes(blocks: usize) -> Sizes {
    Sizes { blocks, width: WIDTH, hidden: HIDDEN, outputs: OUTPUTS }
}

impl Block {
    pub fn new(device: &Device) -> Self {
        sizes(1).block(device)
    }
}

impl Mlp {
    pub fn new(blocks: usize, device: &Device) -> Self {
        sizes(blocks).init(device)
    }
}

/// Returns rows that differ from rank to rank and step to step: `[rows, WIDTH]`.
pub fn input(rank: usize, step: usize, rows: usize, device: &Device) -> Tensor<2> {
    let at = |i: usize| ((i * 37 + rank * 1009 + step * 7919) % 101) as f32 / 50.0 - 1.0;
    let data: Vec<f32> = (0..rows * WIDTH).map(at).collect();
    Tensor::from_data(TensorData::new(data, [rows, WIDTH]), device)
}

/// Returns a sharded model of `blocks` blocks, initialised from one seed.
pub fn sharded(blocks: usize, worker: &Worker, options: FsdpOptions) -> Result<Fsdp<Mlp>, Error> {
    fully_shard(Mlp::new(blocks, worker.device()), worker, options.with_seed(11))
}

/// Returns the elements of a parameter's gradient: this rank's shard, or all under `NO_SHARD`. None
/// where this rank has no gradient of it.
pub fn gradient<const D: usize>(
    gradients: &GradientsParams,
    param: &Param<Tensor<D>>,
) -> Option<Vec<f32>> {
    gradients.get::<D>(param.id).map(|gradient| gradient.into_data().iter::<f32>().collect())
}

/// Returns the full gradient of a parameter, put together from the shards of all ranks in rank
/// order.
pub fn full_gradient<'a>(shards: impl IntoIterator<Item = &'a Option<Vec<f32>>>) -> Vec<f32> {
    shards.into_iter().flatten().flatten().copied().collect()
}

/// Returns the unsharded model with the values that every rank shards under one seed.
pub fn unsharded<M: HookedForward>(
    model: M,
    worker: &Worker,
    options: FsdpOptions,
) -> Result<M, Error> {
    let options = options.with_strategy(ShardingStrategy::NoShard).with_seed(11);
    Ok((*fully_shard(model, worker, options)?).clone().materialize())
}
