//! The outputs that go to the metrics, one batch late.

use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::tensor::{Device, TensorData};
use burn::train::TrainingItem;

use super::output::RankOutput;
use crate::error::{Error, LearnerError};
use crate::launch::Worker;
use crate::layout::{Rank, WorldSize};

/// The output of the last batch. It goes to rank 0 before the next batch, when the device has
/// computed it.
pub(super) struct Seen<T> {
    device: Device,
    last: Option<Last<T>>,
}

/// Output and position of the last batch.
struct Last<T> {
    /// The output; `None` where this rank only took part.
    output: Option<T>,
    item: TrainingItem<()>,
}

impl<T: RankOutput> Seen<T> {
    /// Creates the record of a run without a batch yet. The metrics get the outputs of several
    /// ranks as tensors on `device`.
    pub(super) fn new(device: Device) -> Self {
        Self { device, last: None }
    }

    /// Adds the output of a batch, without its autodiff graph.
    pub(super) fn add(
        &mut self,
        output: T,
        progress: Progress,
        batch: usize,
        lr: Option<ModuleLearningRate>,
        worker: &Worker,
    ) -> Result<(), Error> {
        let failed = |error: burn::backend::ExecutionError| LearnerError::Output {
            rank: worker.rank(),
            reason: error.to_string(),
        };
        let output = Some(output.sync().map_err(failed)?);
        self.last = Some(Last { output, item: TrainingItem::new((), progress, Some(batch), lr) });
        Ok(())
    }

    /// Adds a batch in which this rank only took part.
    pub(super) fn add_none(&mut self, progress: Progress, batch: usize) {
        let item = TrainingItem::new((), progress, Some(batch), None);
        self.last = Some(Last { output: None, item });
    }

    /// Takes the input of the metrics for the last batch: on rank 0 the outputs of all ranks, and
    /// nothing on the others, which receive none. Every rank calls it; all of them have a last batch
    /// or none has.
    ///
    /// # Errors
    ///
    /// [`LearnerError::OutputMismatch`] if ranks sent different numbers of tensors.
    pub(super) fn take(&mut self, worker: &Worker) -> Result<Vec<TrainingItem<T>>, Error> {
        let Some(Last { output, item }) = self.last.take() else { return Ok(Vec::new()) };
        let outputs = match worker.world() {
            WorldSize::ONE => output.into_iter().collect(),
            _ => {
                let own = output.map(RankOutput::into_host);
                let all = worker.gather_as("the outputs for the metrics", Rank::ZERO, own)?;
                outputs_of(worker, all.unwrap_or_default(), &self.device)?
            }
        };
        let with = |output| {
            let TrainingItem { progress, iteration, lr, .. } = &item;
            TrainingItem::new(output, progress.clone(), *iteration, lr.clone())
        };
        Ok(outputs.into_iter().map(with).collect())
    }
}

/// Returns the outputs of a batch, given the tensors of the ranks; those of a rank that only took
/// part are `None`.
fn outputs_of<T: RankOutput>(
    worker: &Worker,
    all: Vec<Arc<Option<Vec<TensorData>>>>,
    device: &Device,
) -> Result<Vec<T>, Error> {
    // Only this rank has received the values, so they are not copied.
    let sent = |(rank, output)| Some((rank, Arc::unwrap_or_clone(output)?));
    let ranks: Vec<_> = worker.world().ranks().zip(all).filter_map(sent).collect();
    let Some((_, first)) = ranks.first() else { return Ok(Vec::new()) };
    let expected = first.len();
    if let Some((rank, other)) = ranks.iter().find(|(_, other)| other.len() != expected) {
        let (rank, found) = (*rank, other.len());
        return Err(LearnerError::OutputMismatch { rank, found, expected }.into());
    }
    Ok(T::from_ranks(ranks.into_iter().map(|(_, tensors)| tensors).collect(), device))
}
