//! A small classifier, its data, and its training steps in Burn's way.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use fsdp_runtime::prelude::*;
use fsdp_runtime::train::mean_loss;

const FEATURES: usize = 6;
const WIDTH: usize = 10;
const CLASSES: usize = 3;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    linear: Linear,
}

#[fsdp_unit]
impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.linear.forward(x).tanh()
    }
}

/// A classifier of two blocks. The output of its root unit is one of Burn's output types.
#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Net {
    blocks: Vec<Block>,
    head: Linear,
    /// Whether the loss is the mean over the rows of classes other than 0.
    sums: bool,
}

#[fsdp_unit]
impl Net {
    fn forward_classification(&self, batch: Batch) -> ClassificationOutput {
        let x = self.blocks.iter().fold(batch.rows, |x, block| block.forward(x));
        let output = self.head.forward(x);
        let device = output.device();
        let loss = if self.sums {
            let targets = batch.targets.clone();
            let counted = targets.clone().not_equal_elem(0).float();
            let weight = f64::from(counted.clone().sum().into_scalar::<f32>());
            let losses = log_softmax(output.clone(), 1).gather(1, targets.unsqueeze_dim(1));
            mean_loss((losses.squeeze_dim::<1>(1).neg() * counted).sum(), weight)
        } else {
            let loss = CrossEntropyLossConfig::new().init(&device);
            loss.forward(output.clone(), batch.targets.clone())
        };
        ClassificationOutput::new(loss, output, batch.targets)
    }
}

/// Returns a layer whose weights are the same at every call.
fn linear(from: usize, to: usize, device: &Device) -> Linear {
    let values =
        |len: usize| (0..len).map(|i| (i as f32 * 1.7 + from as f32).sin() * 0.4).collect();
    let weight = TensorData::new(values(from * to), [from, to]);
    let mut layer = LinearConfig::new(from, to).init(device);
    layer.weight = Param::from_data(weight, device);
    layer.bias = Some(Param::from_data(TensorData::new(values(to), [to]), device));
    layer
}

impl Net {
    pub fn new(device: &Device) -> Self {
        let block = |from| Block { linear: linear(from, WIDTH, device) };
        let blocks = vec![block(FEATURES), block(WIDTH)];
        Self { blocks, head: linear(WIDTH, CLASSES, device), sums: false }
    }

    /// Sets whether the loss is the mean over the rows of classes other than 0.
    pub fn with_sums(self, sums: bool) -> Self {
        Self { sums, ..self }
    }

    /// Returns the weights of the last layer.
    pub fn head_weights(&self) -> Vec<f32> {
        self.head.weight.val().into_data().try_into_vec_as().unwrap()
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let item = self.forward_classification(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.forward_classification(batch)
    }
}

/// One row of features and its class.
#[derive(Clone, Debug)]
pub struct Row {
    features: [f32; FEATURES],
    class: i32,
}

#[derive(Clone, Debug, UnitValue)]
pub struct Batch {
    rows: Tensor<2>,
    targets: Tensor<1, Int>,
}

/// Returns `count` rows, from the number `first` on.
pub fn rows(first: usize, count: usize) -> InMemDataset<Row> {
    let row = |i: usize| {
        let features = std::array::from_fn(|f| ((i * 7 + f * 3) as f32 * 0.37).sin());
        Row { features, class: ((i * i + i / 3) % CLASSES) as i32 }
    };
    InMemDataset::new((first..first + count).map(row).collect())
}

#[derive(Clone, Debug)]
pub struct Rows;

impl Batcher<Row, Batch> for Rows {
    fn batch(&self, items: Vec<Row>, device: &Device) -> Batch {
        let features = items.iter().flat_map(|row| row.features).collect();
        let rows = TensorData::new::<f32, _>(features, [items.len(), FEATURES]);
        let classes: Vec<i32> = items.iter().map(|row| row.class).collect();
        let targets = TensorData::new(classes, [items.len()]);
        Batch { rows: Tensor::from_data(rows, device), targets: Tensor::from_data(targets, device) }
    }
}
