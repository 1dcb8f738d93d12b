//! The messages that ranks exchange before a batch.

use std::sync::Arc;

use burn::data::dataloader::{DataLoaderIterator, Progress};
use burn::train::Interrupter;
use serde::{Deserialize, Serialize};

use crate::error::{Error, LearnerError};
use crate::launch::Worker;
use crate::layout::Rank;

/// State that one rank sends the others before a batch: whether it has one, and errors.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Turn {
    /// Whether the rank has a batch.
    has_batch: bool,
    /// The error of the rank's data loader.
    error: Option<String>,
    /// Reason of the rank's interrupter to stop the training, if there is one.
    stop: Option<String>,
    /// Numbers of the rank's items: those processed after this batch, and all.
    processed: usize,
    total: usize,
    /// Number of items of this batch.
    batch_items: usize,
}

/// The turns of all ranks, in rank order.
pub(super) struct Turns<'a> {
    worker: &'a Worker,
    all: Vec<Arc<Turn>>,
}

impl Turn {
    /// Returns the turn for the iterator's next batch, and the batch.
    pub(super) fn next<O>(
        iterator: &mut dyn DataLoaderIterator<O>,
        interrupter: &Interrupter,
    ) -> (Self, Option<O>) {
        let before = iterator.progress().items_processed;
        let (batch, error) = match iterator.next() {
            Some(Ok(batch)) => (Some(batch), None),
            Some(Err(error)) => (None, Some(error.to_string())),
            None => (None, None),
        };
        let progress = iterator.progress();
        let stop = interrupter.should_stop();
        let turn = Self {
            has_batch: batch.is_some(),
            error,
            stop: stop.then(|| interrupter.get_message().unwrap_or_default()),
            processed: progress.items_processed,
            total: progress.items_total,
            batch_items: progress.items_processed.saturating_sub(before),
        };
        (turn, batch)
    }

    /// Exchanges the turns of all ranks. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`LearnerError::Data`] on every rank if the data loader of one has failed.
    pub(super) fn exchange(self, worker: &Worker) -> Result<Turns<'_>, Error> {
        let all = worker.exchange_as("all_gather", "the turn of the learner", self)?;
        let failed = worker.world().ranks().zip(&all);
        for (rank, turn) in failed {
            if let Some(reason) = turn.error.clone() {
                return Err(LearnerError::Data { rank, reason }.into());
            }
        }
        Ok(Turns { worker, all })
    }
}

impl Turns<'_> {
    /// Returns whether all ranks have a batch, for training.
    ///
    /// # Errors
    ///
    /// [`LearnerError::UnevenBatches`] if some ranks have one, and
    /// [`LearnerError::UnevenBatchSizes`] if these have different numbers of items; `batch` is its
    /// number.
    pub(super) fn all_have_batches(&self, batch: usize) -> Result<bool, Error> {
        let ranks = self.worker.world().ranks().zip(&self.all);
        let (with, without): (Vec<_>, Vec<_>) = ranks.partition(|(_, turn)| turn.has_batch);
        if with.is_empty() {
            return Ok(false);
        }
        if without.is_empty() {
            let expected = self.all[0].batch_items;
            return match with.iter().find(|(_, turn)| turn.batch_items != expected) {
                Some(&(rank, turn)) => {
                    let items = turn.batch_items;
                    Err(LearnerError::UnevenBatchSizes { batch, rank, items, expected }.into())
                }
                None => Ok(true),
            };
        }
        let ranks = |them: Vec<(Rank, _)>| them.into_iter().map(|(rank, _)| rank).collect();
        let (with, without) = (ranks(with), ranks(without));
        Err(LearnerError::UnevenBatches { batch, with, without }.into())
    }

    /// Returns the first rank without a batch while another rank has one; `None` if there is no
    /// such rank.
    pub(super) fn first_without(&self) -> Option<Rank> {
        let mut ranks = self.worker.world().ranks().zip(&self.all);
        ranks.find(|(_, turn)| !turn.has_batch).map(|(rank, _)| rank)
    }

    /// Returns whether any rank has a batch, for validation.
    pub(super) fn any_has_batch(&self) -> bool {
        self.all.iter().any(|turn| turn.has_batch)
    }

    /// Returns why training is to stop, if any rank's interrupter says so.
    pub(super) fn stop(&self) -> Option<&str> {
        self.all.iter().find_map(|turn| turn.stop.as_deref())
    }

    /// Returns the progress over all ranks, with the batch of this turn.
    pub(super) fn progress(&self) -> Progress {
        let sum = |part: fn(&Turn) -> usize| self.all.iter().map(|turn| part(turn)).sum();
        Progress::new(sum(|turn| turn.processed), sum(|turn| turn.total), Some("items".into()))
    }
}
