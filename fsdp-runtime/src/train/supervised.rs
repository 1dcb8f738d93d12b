//! Burn's training builder for one rank.

use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::train::logger::InMemoryMetricLogger;
use burn::train::{InferenceStep, SupervisedTraining, TrainStep};

use super::silent::Silent;
use crate::fully_shard::Fsdp;
use crate::launch::Worker;
use crate::module::FsdpModule;

/// Returns Burn's builder for a training run on this rank. Every rank calls it.
///
/// On rank 0 it is [`SupervisedTraining::new`]: the dashboard in a terminal, metrics and
/// `experiment.log` in `directory`. The other ranks show nothing and write nothing.
///
/// Pass a [`FsdpStrategy`](super::FsdpStrategy) to its `with_training_strategy`.
pub fn supervised<M>(
    worker: &Worker,
    directory: impl AsRef<Path>,
    train: Arc<dyn DataLoader<<M as TrainStep>::Input>>,
    valid: Arc<dyn DataLoader<<M as InferenceStep>::Input>>,
) -> SupervisedTraining<Fsdp<M>>
where
    M: FsdpModule + TrainStep + InferenceStep + 'static,
{
    let training = SupervisedTraining::new(directory, train, valid);
    if worker.rank() == crate::Rank::ZERO {
        return training;
    }
    training
        .renderer(Box::new(Silent))
        .with_metric_logger(InMemoryMetricLogger::default())
        .with_application_logger(None)
}
