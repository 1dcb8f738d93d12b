//! The model of `fsdp test` and its data. Weights and batches are computed from their indices, so
//! that every rank and every run has the same.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{Device, Tensor, TensorData};
use fsdp_runtime::prelude::*;

/// Number of features of an input.
const WIDTH: usize = 32;
/// Number of features inside a layer.
const HIDDEN: usize = 64;
const LAYERS: u64 = 3;
/// Number of items of one rank's batch.
const BATCH: usize = 8;

#[derive(Module, Debug)]
#[fsdp_unit]
pub(super) struct Layer {
    up: Linear,
    down: Linear,
}

#[fsdp_unit]
impl Layer {
    pub(super) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.down.forward(self.up.forward(x).tanh())
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub(super) struct Model {
    layers: Vec<Layer>,
    head: Linear,
}

#[fsdp_unit]
impl Model {
    pub(super) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.layers.iter().fold(x, |x, layer| layer.forward(x)))
    }
}

impl Model {
    pub(super) fn new(device: &Device) -> Self {
        let layer = |index: u64| Layer {
            up: linear(2 * index + 1, WIDTH, HIDDEN, device),
            down: linear(2 * index + 2, HIDDEN, WIDTH, device),
        };
        Self { layers: (0..LAYERS).map(layer).collect(), head: linear(0, WIDTH, 1, device) }
    }
}

/// Returns a linear layer with the weights of a seed.
fn linear(seed: u64, inputs: usize, outputs: usize, device: &Device) -> Linear {
    let scale = 2.0 / (inputs as f32).sqrt();
    let weights = noise(seed, inputs * outputs).map(|value| value * scale).collect();
    let weights = TensorData::new::<f32, _>(weights, [inputs, outputs]);
    Linear {
        weight: Param::from_tensor(Tensor::from_data(weights, device)),
        bias: Some(Param::from_tensor(Tensor::zeros([outputs], device))),
    }
}

/// Inputs and targets.
pub(super) struct Batch {
    inputs: Tensor<2>,
    targets: Tensor<2>,
}

impl Batch {
    /// Returns the batches of `ranks`, one after the other. A rank has one batch, whose loss falls
    /// with each step.
    pub(super) fn new(ranks: std::ops::Range<usize>, device: &Device) -> Self {
        let items = BATCH * ranks.len();
        let noise = |rank: usize| noise(1000 + rank as u64, BATCH * WIDTH);
        let inputs: Vec<f32> = ranks.flat_map(noise).collect();
        // The sum of the first half of the features, less that of the second half.
        let target = |item: &[f32]| {
            let (first, second) = item.split_at(WIDTH / 2);
            first.iter().sum::<f32>() - second.iter().sum::<f32>()
        };
        let targets: Vec<f32> = inputs.chunks(WIDTH).map(target).collect();
        Self {
            inputs: Tensor::from_data(TensorData::new(inputs, [items, WIDTH]), device),
            targets: Tensor::from_data(TensorData::new(targets, [items, 1]), device),
        }
    }

    /// Returns the mean squared error, of shape `[1]`.
    pub(super) fn loss(&self, model: &Model) -> Tensor<1> {
        let error = model.forward(self.inputs.clone()) - self.targets.clone();
        error.powf_scalar(2.0).mean()
    }
}

/// Returns `length` numbers of -0.5 to 0.5, which depend on the seed and the position alone
/// (SplitMix64).
fn noise(seed: u64, length: usize) -> impl Iterator<Item = f32> {
    (0..length as u64).map(move |index| {
        let mut bits = (seed << 32 | index).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        // The upper 24 bits, which an `f32` holds exactly.
        ((bits ^ (bits >> 31)) >> 40) as f32 / (1u32 << 24) as f32 - 0.5
    })
}
