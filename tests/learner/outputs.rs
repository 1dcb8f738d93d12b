//! Burn's output types leave a unit's forward, and all their rows reach the metrics of rank 0.

use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, Param};
use burn::nn::loss::{BinaryCrossEntropyLossConfig, CrossEntropyLossConfig, MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor, TensorData, TensorReadError};
use burn::train::metric::{Adaptor, Metric, MetricMetadata, MetricName, SerializedEntry};
use burn::train::{
    ExecutionStrategy, InferenceStep, Learner, MultiLabelClassificationOutput, RegressionOutput,
    SequenceOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use fsdp_runtime::Rank;
use fsdp_runtime::prelude::*;
use fsdp_runtime::train::{FsdpStrategy, RankLoader, supervised};
use tempfile::tempdir;

use super::support::compare::{Within, assert_close};
use super::support::ranks::on_ranks;

const FEATURES: usize = 4;
/// Labels of a row, or tokens of its sequence. The row with number `i` has the bits of `i`.
const LABELS: usize = 3;
/// Items of one batch of all ranks, of different labels.
const BATCH: usize = 8;
const TRAIN: usize = 3 * BATCH;
const VALID: usize = BATCH;

#[derive(Clone, Debug, UnitValue)]
pub struct Batch {
    rows: Tensor<2>,
    /// Shape `[rows, LABELS]`, each 0 or 1.
    targets: Tensor<2, Int>,
}

#[derive(Clone)]
struct Rows;

impl Batcher<usize, Batch> for Rows {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let row = |i: usize| (0..FEATURES).map(move |f| ((i * 5 + f * 3) as f32 * 0.41).sin());
        let bits = |i: usize| (0..LABELS).map(move |bit| (i >> bit & 1) as i32);
        let rows: Vec<f32> = items.iter().flat_map(|i| row(*i)).collect();
        let targets: Vec<i32> = items.iter().flat_map(|i| bits(*i)).collect();
        let rows = TensorData::new(rows, [items.len(), FEATURES]);
        let targets = TensorData::new(targets, [items.len(), LABELS]);
        Batch { rows: Tensor::from_data(rows, device), targets: Tensor::from_data(targets, device) }
    }
}

fn items(first: usize, count: usize) -> InMemDataset<usize> {
    InMemDataset::new((first..first + count).collect())
}

/// The tensors of one update of a metric.
#[derive(Clone, Debug)]
struct Update {
    /// Values of the loss.
    loss: Vec<f32>,
    /// Targets of each row, and then its other values. Sorted by the targets, since the ranks'
    /// rows are in another order than those of one device.
    rows: Vec<Vec<f32>>,
}

impl Update {
    /// Joins columns of equally many rows.
    fn new(loss: &Tensor<1>, columns: Vec<TensorData>) -> Self {
        let count = columns[0].shape()[0];
        let mut rows = vec![Vec::new(); count];
        for column in columns {
            assert_eq!(column.shape()[0], count, "a value for each row");
            let values: Vec<f32> = column.iter::<f32>().collect();
            let width = values.len() / count;
            rows.iter_mut().zip(values.chunks(width)).for_each(|(row, part)| row.extend(part));
        }
        rows.sort_by(|a, b| a[..LABELS].partial_cmp(&b[..LABELS]).expect("0 or 1"));
        Self { loss: loss.clone().into_data().iter::<f32>().collect(), rows }
    }
}

impl Adaptor<Update> for MultiLabelClassificationOutput {
    fn adapt(&self) -> Update {
        let columns = [self.targets.clone().into_data(), self.output.clone().into_data()];
        Update::new(&self.loss, columns.into())
    }
}

impl Adaptor<Update> for RegressionOutput {
    fn adapt(&self) -> Update {
        let columns = [self.targets.clone().into_data(), self.output.clone().into_data()];
        Update::new(&self.loss, columns.into())
    }
}

impl Adaptor<Update> for SequenceOutput {
    fn adapt(&self) -> Update {
        let predictions = self.predictions.clone().expect("the forward returns predictions");
        let columns = [
            self.targets.clone().into_data(),
            self.logits.clone().into_data(),
            predictions.into_data(),
        ];
        Update::new(&self.loss, columns.into())
    }
}

/// A metric that keeps what it is updated with.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<Update>>>);

impl Kept {
    fn take(&self) -> Vec<Update> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Metric for Kept {
    type Input = Update;

    fn name(&self) -> MetricName {
        Arc::new("Kept".into())
    }

    fn update(
        &mut self,
        update: &Update,
        _: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        self.0.lock().unwrap().push(update.clone());
        self.compute()
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(SerializedEntry::not_available(None))
    }

    fn clear(&mut self) {}
}

fn assert_same(found: &[Update], expected: &[Update], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: one update for each batch of all ranks");
    for (found, expected) in found.iter().zip(expected) {
        let close = Within::Scaled(1e-5);
        assert_eq!(found.rows.len(), BATCH, "{what}");
        assert_close(&found.loss, &expected.loss, close, format!("{what}: loss"));
        assert_close(&found.rows.concat(), &expected.rows.concat(), close, what);
    }
}

/// Returns a layer whose weights are the same at every call.
fn linear(outputs: usize, device: &Device) -> Linear {
    let weight = (0..FEATURES * outputs).map(|i| (i as f32 * 1.3).sin() * 0.5).collect();
    let mut layer = LinearConfig::new(FEATURES, outputs).init(device);
    let weight = TensorData::new::<f32, _>(weight, [FEATURES, outputs]);
    layer.weight = Param::from_data(weight, device);
    layer.bias = Some(Param::from_data(TensorData::zeros::<f32, _>([outputs]), device));
    layer
}

/// Defines a test of an output type: a model of one layer with `$outputs` outputs, whose forward
/// returns the output type. Its training at world 2 has the outputs of one device.
macro_rules! output_type {
    ($test:ident: $output:ident, $outputs:expr, |$layer:ident, $targets:ident| $forward:expr) => {
        mod $test {
            use super::*;

            #[derive(Module, Debug)]
            #[fsdp_unit(root)]
            pub struct Net {
                layer: Linear,
            }

            #[fsdp_unit]
            impl Net {
                fn forward(&self, batch: Batch) -> $output {
                    let ($layer, $targets) = (self.layer.forward(batch.rows), batch.targets);
                    $forward
                }
            }

            impl TrainStep for Net {
                type Input = Batch;
                type Output = $output;

                fn step(&self, batch: Batch) -> TrainOutput<$output> {
                    let item = self.forward(batch);
                    TrainOutput::new(self, item.loss.backward(), item)
                }
            }

            impl InferenceStep for Net {
                type Input = Batch;
                type Output = $output;

                fn step(&self, batch: Batch) -> $output {
                    self.forward(batch)
                }
            }

            /// Returns the updates of the metrics on one device, in training and in validation.
            fn plain(folder: &Path) -> [Vec<Update>; 2] {
                let device = Device::flex().autodiff();
                let load = |items| DataLoaderBuilder::new(Rows).batch_size(BATCH).build(items);
                let (train, valid) = (Kept::default(), Kept::default());
                let loaders = (load(items(0, TRAIN)), load(items(50, VALID)));
                let net = Net { layer: linear($outputs, &device) };
                SupervisedTraining::<Net>::new(folder, loaders.0, loaders.1)
                    .metric_train(train.clone())
                    .metric_valid(valid.clone())
                    .num_epochs(2)
                    .with_application_logger(None)
                    .with_training_strategy(ExecutionStrategy::single(device).into())
                    .launch(Learner::new(net, SgdConfig::new().init(), 0.2));
                [train.take(), valid.take()]
            }

            /// Returns the updates of the metrics of each of two ranks.
            fn sharded(folder: &Path) -> Vec<[Vec<Update>; 2]> {
                let folder = folder.to_path_buf();
                on_ranks(2, move |worker| {
                    let loader = |items| RankLoader::new(Rows, items, worker).batch_size(BATCH / 2);
                    let train_items = loader(items(0, TRAIN)).equal_lengths(true).build();
                    let (train, valid) = (Kept::default(), Kept::default());
                    let net = Net { layer: linear($outputs, worker.device()) };
                    let net = fully_shard(net, worker, FsdpOptions::new())?;
                    supervised(worker, &folder, train_items, loader(items(50, VALID)).build())
                        .metric_train(train.clone())
                        .metric_valid(valid.clone())
                        .num_epochs(2)
                        .with_application_logger(None)
                        .with_training_strategy(FsdpStrategy::new(worker).into())
                        .launch(Learner::new(net, SgdConfig::new().init(), 0.2));
                    Ok([train.take(), valid.take()])
                })
            }

            #[test]
            fn reaches_the_metrics_of_rank_0() {
                let (single, ranks) = (tempdir().unwrap(), tempdir().unwrap());
                let [train, valid] = plain(single.path());
                assert_eq!((train.len(), valid.len()), (6, 2));
                let found = sharded(ranks.path());
                assert_same(&found[Rank::ZERO.index()][0], &train, "training");
                assert_same(&found[Rank::ZERO.index()][1], &valid, "validation");
                assert!(found[1].iter().all(Vec::is_empty), "rank 1 computes no metrics");
            }
        }
    };
}

output_type!(multi_label: MultiLabelClassificationOutput, LABELS, |output, targets| {
    let loss = BinaryCrossEntropyLossConfig::new().with_logits(true).init(&output.device());
    let loss = loss.forward(output.clone(), targets.clone());
    MultiLabelClassificationOutput::new(loss, output, targets)
});

output_type!(regression: RegressionOutput, LABELS, |output, targets| {
    let targets = targets.float();
    let loss = MseLoss::new().forward(output.clone(), targets.clone(), Reduction::Mean);
    RegressionOutput::new(loss, output, targets)
});

output_type!(sequence: SequenceOutput, LABELS * 2, |output, targets| {
    let [rows, _] = output.dims();
    let loss = CrossEntropyLossConfig::new().init(&output.device());
    let flat = output.clone().reshape([rows * LABELS, 2]);
    let loss = loss.forward(flat, targets.clone().reshape([rows * LABELS]));
    let logits = output.reshape([rows, LABELS, 2]);
    let predictions = logits.clone().argmax(2).squeeze_dim::<2>(2);
    SequenceOutput::new(loss, logits, Some(predictions), targets)
});
