//! Burn's training builder for one rank.

use std::io::{IsTerminal, stdin, stdout};
use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::train::logger::InMemoryMetricLogger;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainStep};

use super::silent::Silent;
use crate::fully_shard::Fsdp;
use crate::launch::Worker;
use crate::module::FsdpModule;

/// Returns Burn's builder for a training run on this rank. Every rank calls it.
///
/// On rank 0 it is [`SupervisedTraining::new`]: the dashboard in a terminal, metrics and
/// `experiment.log` in `directory`. Where stdout is a terminal without a keyboard, as under
/// `mpirun` in a job without one, it prints lines. The other ranks show nothing and write nothing.
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
    if worker.is_rank_zero() {
        let prints = stdout().is_terminal() && !has_keyboard();
        return if prints {
            training.renderer(Box::new(CliMetricsRenderer::new()))
        } else {
            training
        };
    }
    training
        .renderer(Box::new(Silent))
        .with_metric_logger(InMemoryMetricLogger::default())
        .with_application_logger(None)
}

/// Returns whether a terminal can be read. Burn shows its dashboard if stdout is a terminal, and
/// the dashboard reads keys from stdin or, if that is no terminal, from the terminal of the
/// session. `mpirun` gives its ranks a pseudo-terminal as stdout, also where the session has no
/// terminal.
fn has_keyboard() -> bool {
    let session = || std::fs::OpenOptions::new().read(true).write(true).open("/dev/tty").is_ok();
    !cfg!(unix) || stdin().is_terminal() || session()
}
