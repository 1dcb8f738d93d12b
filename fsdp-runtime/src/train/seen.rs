//! The outputs that go to the metrics, one batch late.

use burn::data::dataloader::Progress;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::tensor::{Device, TensorData};
use burn::train::TrainingItem;

use super::output::RankOutput;
use super::turn::Turns;
use crate::error::{Error, LearnerError};
use crate::launch::Worker;
use crate::layout::WorldSize;

/// The output of the last batch. It goes to the other ranks with the exchange before the next
/// batch, when the device has computed it.
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

    /// Returns the tensors of this rank's last output, for the other ranks.
    pub(super) fn take_own(&mut self, world: WorldSize) -> Option<Vec<TensorData>> {
        if world == WorldSize::ONE {
            return None;
        }
        self.last.as_mut()?.output.take().map(RankOutput::into_host)
    }

    /// Returns the input of the metrics for the last batch: the outputs of all ranks. `turns` has
    /// the results of [`take_own`](Self::take_own) on each rank.
    pub(super) fn take(
        &mut self,
        turns: &Turns<'_>,
        leads: bool,
    ) -> Result<Vec<TrainingItem<T>>, Error> {
        let Some(Last { output, item }) = self.last.take() else { return Ok(Vec::new()) };
        let outputs = match output {
            Some(own) => vec![own],
            None if leads => turns.outputs(&self.device)?,
            None => Vec::new(),
        };
        let with = |output| {
            let TrainingItem { progress, iteration, lr, .. } = &item;
            TrainingItem::new(output, progress.clone(), *iteration, lr.clone())
        };
        Ok(outputs.into_iter().map(with).collect())
    }
}
